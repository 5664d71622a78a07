"""benchmarks/make.py as it is called, and the queue of the records in benchmarks/."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.make import read_queue
from oelm.errors import UserError
from tests.test_doc_commands import understand

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
QUEUE = """
[shapes.small]
model_type = "bert"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 16
vocab_size = 60

[[records]]
record = "copy.json"
on = "cpu"
minutes = 0.1
command = "-c 'import shutil, sys; shutil.copy(*sys.argv[1:])' {shapes}/small/config.json {record}"

[[records]]
record = "said.json"
on = "cpu"
minutes = 0.1
command = "-c 'import sys as s; open(s.argv[1], \\"w\\").write(str(s.argv[2:]))' {record} {ready}/a {shapes}"

[[records]]
record = "slow.json"
on = "cpu"
minutes = 60
command = "-c 'import time; time.sleep(600)'"

[[records]]
record = "wrong.json"
on = "cpu"
minutes = 0.1
command = "-c 'raise SystemExit(3)'"

[[records]]
record = "elsewhere.json"
on = "h200"
minutes = 0.1
command = "-c ''"
"""
# Records that no command of the queue makes.
BY_HAND = {
    "cpu-1m.json": "gpt-tiny with another vocabulary, for docs/clusters.md",
    "cpu-estimates.json": "estimates of --dry-run beside what studies took",
    "data.json": "data.py writes it itself, from data that is not ours to copy",
    "h200-ablation-before.json": "of paths that are deleted",
    "h200-freezing-rested.json": "of an option that is deleted",
    "h200-guard.json": "needs another tree",
    "run_claims.json": "needs the folder of a file system",
}


def entries():
    return tomllib.loads((BENCHMARKS / "queue.toml").read_text())["records"]


def test_the_queue_makes_every_record():
    made = {entry["record"] for entry in entries()}
    assert len(made) == len(entries())
    assert {path.name for path in BENCHMARKS.glob("*.json")} <= made | set(BY_HAND)
    assert not made & set(BY_HAND)


def test_its_commands_are_understood():
    for entry in entries():
        assert "{record}" in entry["command"]
        words = shlex.split(entry["command"].format(ready="r", shapes="s", record="n.json"))
        if words[0] == "-m":
            assert words[1] == "oelm"
            understand(words[2:])
        else:
            known = (ROOT / words[0]).read_text()
            assert all(f'"{word}"' in known for word in words if word.startswith("--")), words


def make(folder, *words):
    (folder / "queue.toml").write_text(QUEUE)
    command = [sys.executable, str(BENCHMARKS / "make.py"), "--queue", "queue.toml", "--on", "cpu", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return ended.returncode, {line.split()[0]: line.split(" s  ")[1] for line in ended.stdout.splitlines()}


def test_records_are_measured_while_there_is_time(tmp_path):
    code, states = make(tmp_path, "--time", "5m")
    assert states.pop("wrong.json").startswith("failed, see ")
    measured = {"copy.json": "measured", "said.json": "measured"}
    assert states == {**measured, "slow.json": "skipped, no time"} and code == 1
    assert (tmp_path / "new/said.json").read_text() == "['a', 'shapes']"
    assert (tmp_path / "new/copy.json").stat().st_size and (
        tmp_path / "new/shapes/small/model.safetensors"
    ).exists()
    assert make(tmp_path, "--only", "copy.json") == (0, {"copy.json": "measured"})
    assert make(tmp_path, "--only", "elsewhere.json") == (1, {})


def test_nothing_runs_on_when_time_is_up(tmp_path):
    started = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    (tmp_path / "start.py").write_text(
        f"import os, subprocess, sys\nos.chdir({str(tmp_path)!r})\n"
        f"subprocess.run([sys.executable, '-c', {started!r}])\n"
    )
    (tmp_path / "queue.toml").write_text(
        f'[[records]]\nrecord = "x.json"\non = "cpu"\nminutes = 0.01\ncommand = "{tmp_path}/start.py"\n'
    )
    command = [sys.executable, str(BENCHMARKS / "make.py"), "--queue", "queue.toml", "--on", "cpu"]
    ended = subprocess.run([*command, "--time", "4s"], cwd=tmp_path, capture_output=True, text=True)
    assert "stopped, time is up" in ended.stdout, ended.stderr
    pid = (tmp_path / "pid").read_text()
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return
    assert state == "Z"  # ended, and waits for whoever adopted it


def test_a_mistake_is_one_line(tmp_path):
    (tmp_path / "wrong.toml").write_text('[[records]]\nrecord = "a.json"\n')
    where = "wrong.toml, [[records]] 1 (a.json): "
    for words, said in (
        (["--time", "soon"], "soon"),
        (["--queue", "none.toml"], "none.toml"),
        (["--queue", "wrong.toml"], where),
    ):
        command = [sys.executable, str(BENCHMARKS / "make.py"), "--on", "cpu", *words]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 1 and ended.stderr.count("\n") == 1 and said in ended.stderr


FIRST = '[[records]]\nrecord = "a.json"\non = "cpu"\nminutes = 1\ncommand = ""\n'


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        (f"{FIRST}[[records]]\nrecord = 'b.json'\n", ", [[records]] 2 (b.json): on is missing"),
        (f"{FIRST}minuets = 1\n", ", [[records]] 1 (a.json): unknown key 'minuets'; an entry has: record"),
        (FIRST.replace("= 1", '= "1m"'), ', [[records]] 1 (a.json): minutes = "1m" does not fit'),
        (FIRST.replace('""', '"{recrod}"'), ", [[records]] 1 (a.json): command does not fit: 'recrod'"),
        (FIRST.replace("records", "record"), ": unknown key 'record'; the file has: records, shapes"),
        (f"{FIRST}[shapes.a]\n", ": [shapes.a] needs a model_type"),
        ("", ": it needs entries, each of them a table [[records]]"),
    ],
)
def test_a_mistake_in_a_queue_is_named_with_its_entry_and_key(queue, said, tmp_path):
    path = tmp_path / "queue.toml"
    path.write_text(queue)
    with pytest.raises(UserError, match=f"^{re.escape(f'{path}{said}')}"):
        read_queue(path)
