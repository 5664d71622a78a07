"""results/make.py as it is called, on a queue of small studies."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.errors import UserError
from oelm.system.files import delete
from results.make import drop_interrupted, read_queue
from tests.study.studies import environment, make_file

ROOT = Path(__file__).parents[2]
STUDY = """
[study]
methods = ["baseline", "oelm"]
lrs = [1e-3, 3e-3]
choose_seeds = 1
widen = 0
measure = "best"
seeds = 1

[task]
data = "made.csv"
text = "body"
label = "topic"
tokenizer = "train:300"
max_length = 32

[model]
name = "gpt-tiny"

[training]
steps = 2
batch_size = 8
"""
QUEUE = """
[[studies]]
study = "small.toml"
folder = "screen"

[[studies]]
study = "small.toml"
folder = "more-seeds"
set = ["study.seeds=2"]
runs = ["screen"]

[[studies]]
study = "small.toml"
folder = "other-seeds"
trials = ["screen"]
keep = true
"""


@pytest.fixture
def make(tmp_path):
    make_file(tmp_path)
    (tmp_path / "small.toml").write_text(STUDY)
    (tmp_path / "queue.toml").write_text(QUEUE)
    (tmp_path / "results").mkdir()
    env = environment(tmp_path / "cache") | {"PYTHONPATH": str(ROOT / "src")}

    def call(*words, code=0):
        command = [sys.executable, str(ROOT / "results" / "make.py"), "--queue", "queue.toml", *words]
        command += ["--results", "results"]
        ended = subprocess.run(command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True)
        logs = "".join(path.read_text() for path in tmp_path.glob("studies/*.log"))
        assert ended.returncode == code, ended.stdout + ended.stderr + logs
        return ended.stdout + ended.stderr

    return call


def runs(folder):
    return {path.parent.name for path in Path(folder).glob("runs/*/*/*/results.json")}


def test_mistakes_are_one_line_and_a_key_of_the_call_wins(make, tmp_path):
    for words in (["--time", "soon"], ["--queue", "none.toml"], ["--plan", "--set", "study.nosuch=1"]):
        said = make(*words, code=1)
        assert said.count("\n") == 1 and words[-1].split("=")[0].removeprefix("study.") in said
    said = make("--time", "30s", code=1)
    assert said == "--time 30s is too short: 30 s of it are for writing records\n"
    make("--plan", "--only", "more-seeds", "--set", "study.seeds=7")  # the queue says 2
    assert json.loads((tmp_path / "results/more-seeds/study.json").read_text())["plan"]["seeds"] == 7


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        ('[[studies]]\nstudy = "a"\n[[studies]]\nfolder = "b"\n', ", [[studies]] 2: study is missing"),
        ('[[studies]]\nstudy = "a"\nrun = ["b"]\n', ", [[studies]] 1 (a): unknown key 'run'; an entry has"),
        ('[[studies]]\nstudy = "a"\nruns = "b"\n', ', [[studies]] 1 (a): runs = "b" does not fit'),
        ('[[study]]\nstudy = "a"\n', ": unknown key 'study'; the file has: studies"),
    ],
)
def test_a_mistake_in_a_queue_is_named_with_its_entry_and_key(queue, said, tmp_path):
    path = tmp_path / "queue.toml"
    path.write_text(queue)
    with pytest.raises(UserError, match=f"^{re.escape(f'{path}{said}')}"):
        read_queue(path, None)


def test_interrupted_runs_are_no_records(tmp_path):
    for status in ("completed", "interrupted", "failed"):
        run = tmp_path / "runs" / "task" / "oelm" / status
        run.mkdir(parents=True)
        (run / "results.json").write_text(json.dumps({"status": status}))
    drop_interrupted(tmp_path)
    assert runs(tmp_path) == {"completed", "failed"}


@pytest.mark.slow
def test_a_queue_is_made_published_and_gone_on_with(make, tmp_path):
    make("--plan", "--only", "screen")
    assert "failed" in make("--only", "more-seeds", "--set", "study.seeds=0", code=1)  # the queue says 2
    delete(tmp_path / "studies")
    plan = json.loads((tmp_path / "results/screen/study.json").read_text())
    assert plan["plan"]["lrs"] == [1e-3, 3e-3]
    said = make("--set", "study.jobs=2")
    assert [line.split()[::5] for line in said.splitlines()] == [
        ["screen", "complete"], ["more-seeds", "complete"], ["other-seeds", "complete"],
    ]  # fmt: skip
    screen, more, other = (tmp_path / "new" / name for name in ("screen", "more-seeds", "other-seeds"))
    assert json.loads((screen / "study.json").read_text())["plan_digest"] == plan["plan_digest"]
    assert len(runs(screen)) == 6 and runs(screen) < runs(more) and len(runs(more)) == 8
    # Of the trials nothing was made again; the measured runs were.
    assert "4 records imported" in (tmp_path / "studies/other-seeds.log").read_text()
    assert len(runs(other)) == 6 and [*tmp_path.glob("studies/other-seeds/runs/*/*/measured-*/model")]
    assert not [*tmp_path.glob("studies/screen/runs/*/*/*/model")]

    # Elsewhere, with what was published: there is nothing to be made.
    (tmp_path / "studies").rename(tmp_path / "before")
    (tmp_path / "results").rename(tmp_path / "plans")
    (tmp_path / "new").rename(tmp_path / "results")
    assert "6 runs" in make("--only", "screen", "--time", "10m")
    log = (tmp_path / "studies/screen.log").read_text()
    assert "6 records imported" in log and "6 runs are done already" in log

    assert "queue.toml has no nothing" in make("--only", "nothing", code=1)
    (tmp_path / "made.csv").unlink()
    assert "failed, see studies/more-seeds.log" in make("--only", "more-seeds", code=1)
