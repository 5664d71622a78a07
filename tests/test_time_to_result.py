"""benchmarks/time_to_result.py as it is called, on a small dataset and model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.data import load_file, prepare
from tests.study.studies import make_file

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_both_arms_and_a_study_are_timed(tmp_path):
    dataset = load_file(make_file(tmp_path), text="body", label="topic")
    store = prepare(dataset, tokenizer="train:300", max_length=32, cache=tmp_path / "cache")
    record = tmp_path / "record.json"
    command = [sys.executable, "benchmarks/time_to_result.py", "--data", str(store.folder), "--epochs", "1"]
    command += [
        "--size",
        "gpt-tiny",
        "--leave-out",
        "warm",
        "--jobs",
        "2",
        "--runs",
        "2",
        "--json",
        str(record),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "src", "OELM_COMMIT": "of the test"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(record.read_text())
    assert found["about"]["commit"] == "of the test" and "--data DATA" in found["command"]
    ours, trainer = found["runs"]
    assert (ours["arm"], trainer["arm"]) == ("cold", "trainer")
    for run in (ours, trainer):
        assert run["steps"] == -(-len(store["train"]) // 16)
        assert sum(run["phases"].values()) == pytest.approx(run["seconds"], abs=0.2)
        assert min(run["phases"].values()) > -0.1 and 0 <= run["test_accuracy"] <= 1
        assert str(tmp_path) not in run["command"]
    assert found["studies"][0]["jobs"] == 2 and found["studies"][0]["runs"] >= 2
    assert not (store.folder / "references.json").exists()
    assert ended.stdout.splitlines()[-1].startswith("| 2 |") and "| trainer | 1 |" in ended.stdout
