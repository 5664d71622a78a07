"""`oelm data` as a new user meets it: answers, exit codes, one line for a mistake, nothing half-written."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oelm.cli import main as cli
from oelm.data import TASKS, open_store
from tests.data.made import labelled, parquet, write_csv

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oelm", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call


def test_list_names_every_task_and_what_was_not_tried(run: Run) -> None:
    code, out, _ = run("data", "list")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert set(lines) == set(TASKS)
    code, out, _ = run("data", "list", "--json")
    assert [task["name"] for task in json.loads(out)] == list(TASKS)


def test_inspect_tells_what_is_in_a_file(run: Run, tmp_path: Path) -> None:
    path = labelled(tmp_path / "x.csv", 100, ("ham", "spam"))
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n,ham\n")
    code, out, _ = run(
        "data", "inspect", path, "--text", "body", "--label", "topic", "--max-length", 16, "--json"
    )
    assert code == 0
    report = json.loads(out)
    assert report["splits"]["train"]["class_counts"].keys() == {"ham", "spam"}
    assert sum(split["items"] for split in report["splits"].values()) == 101
    assert report["dropped"] == {"empty": 1}
    for split in report["splits"].values():
        assert split["length_50"] <= split["length_90"] <= split["length_100"]
        assert split["length_100"] <= 16
    code, out, _ = run("data", "inspect", path, "--text", "body", "--label", "topic", "--max-length", 16)
    assert code == 0
    for said in (
        "train:8192",
        "ham",
        "cut at 16",
        "duplicates between splits",
        "1 row dropped: empty texts",
    ):
        assert said in out


def test_prepare_prints_a_folder_that_opens(run: Run, tmp_path: Path) -> None:
    path = labelled(tmp_path / "x.csv")
    code, out, _ = run(
        "data", "prepare", path, "--text", "body", "--label", "topic", "--out", tmp_path / "out"
    )
    assert (code, out.strip()) == (0, str(tmp_path / "out"))
    assert open_store(tmp_path / "out").label_names == ["no", "yes"]
    code, out, _ = run("data", "inspect", tmp_path / "out")  # a prepared folder can be inspected too
    assert code == 0
    code, _, err = run(
        "data", "prepare", path, "--text", "body", "--label", "topic", "--out", tmp_path / "out"
    )
    assert (code, err.count("\n")) == (2, 1)


def test_tasks_from_a_folder(run: Run, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        parquet(
            tmp_path / "rte" / f"{split}.parquet",
            sentence1=[f"one {split} {i}" for i in range(60)],
            sentence2=[f"two {i}" for i in range(60)],
            label=[0, 1] * 30,
        )
    code, out, _ = run("data", "inspect", "rte", "--data-dir", tmp_path, "--tokenizer", "train:300", "--json")
    assert code == 0
    assert json.loads(out)["label_names"] == ["entailment", "not_entailment"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "'nothing' is neither a task (see `oelm data list`) nor a file"),
        (["gone.csv"], "there is no file gone.csv"),
        (["x.csv"], "x.csv has no column 'text'; it has: body, topic"),
        (["x.csv", "--text", "body", "--label", "topic", "--tokenizer", "train:5"], "between 257 and"),
        (["x.csv", "--text", "body", "--label", "topic", "--max-length", "1"], "leaves no room for text"),
        (
            ["x.csv", "--text", "body", "--label", "topic", "--train-size", "900"],
            "train_size 900 does not fit",
        ),
        (["ragged.csv"], "ragged.csv, row 2 (line 3): 3 fields where the header has 2"),
        (["imdb", "--label", "x"], "imdb is a task with fixed columns and splits; label is for files"),
        (["imdb", "--text-pair", "x"], "imdb is a task with fixed columns and splits"),
    ],
)
@pytest.mark.parametrize("verb", ["inspect", "prepare"])
def test_a_mistake_is_one_line_and_exit_code_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, verb: str, arguments: list[str],
    said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    labelled(tmp_path / "x.csv")
    write_csv(tmp_path / "ragged.csv", ["text", "label"], [["a", "b"], ["c", "d", "e"]])
    code, out, err = run("data", verb, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("oelm: ")
    assert said in err
    assert not [path for path in cache.rglob("*") if path.suffix != ".lock" and path.name != "stores"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rte"], "rte cannot be loaded from the hub"),
        (["x.csv", "--text", "body", "--label", "topic", "--tokenizer", "gpt2"], "set OELM_TOKENIZER_DIR"),
    ],
)
def test_without_a_network_one_line_says_what_to_do(tmp_path: Path, arguments: list[str], said: str) -> None:
    labelled(tmp_path / "x.csv")
    environment = {k: v for k, v in os.environ.items() if k not in ("OELM_DATA_DIR", "OELM_TOKENIZER_DIR")}
    done = subprocess.run(
        [sys.executable, "-m", "oelm", "data", "inspect", *arguments],
        env=environment | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
        cwd=tmp_path, text=True, capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr


def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "x.csv", ["text", "label"], [[f"{i} some words " * 300, i % 2] for i in range(4_000)]
    )
    cache = tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-m", "oelm", "data", "prepare", str(path)],
        env=os.environ | {"OELM_CACHE_DIR": str(cache)}, stderr=subprocess.PIPE, text=True,
        # A shell that runs the tests in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(cache.glob("stores/*.part/train.tokens.npy")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("oelm: stopped at once by Ctrl-C") and "Traceback" not in err
    assert [found.suffix for found in (cache / "stores").iterdir()] == [".lock"]
