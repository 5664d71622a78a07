"""Without `speed/` everything works on the plain path: training, resuming, evaluation, studies."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.runs import make_store

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def without_speed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in a folder of its own, less one of its parts."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(SOURCE / "oelm", folder / "oelm", ignore=shutil.ignore_patterns("__pycache__", "speed"))
    return folder


def oelm(package: Path, *words: object, given: str | None = None, code: int = 0) -> str:
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "oelm", *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        cwd=package, capture_output=True, text=True, input=given, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_nothing_but_the_step_imports_it() -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "oelm.speed" in path.read_text() and "speed" not in path.parts
    }
    assert users == {"oelm/training/step.py"}


@pytest.mark.slow
def test_training_resuming_and_using_a_model(without_speed: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    words = ["train", "--data", store, "--model", "gpt-tiny", "--method", "oelm", "--max-length", 32]
    words += ["--steps", 30, "--set", "training.save_every=5", "--set", "training.eval_every=10"]
    oelm(without_speed, *words, "--out", tmp_path / "run")
    oelm(without_speed, *words, "--out", tmp_path / "stopped", "--stop-after", "0.05s", code=75)
    oelm(without_speed, *words, "--out", tmp_path / "stopped")
    found = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "stopped")]
    assert found[0]["test"]["metrics"] == found[1]["test"]["metrics"]
    assert found[0]["arithmetic"]["path"] == "plain" and found[0]["paths"]["padded"]
    assert "accuracy" in oelm(without_speed, "evaluate", tmp_path / "run")
    assert oelm(without_speed, "predict", tmp_path / "run", given="w5 w6\n")


@pytest.mark.slow
def test_a_study(without_speed: Path, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    words = ["study", "--data", store, "--model", "gpt-tiny", "--methods", "baseline,oelm", "--lrs", "1e-3"]
    oelm(without_speed, *words, "--seeds", 2, "--steps", 10, "--max-length", 32, "--out", tmp_path / "s")
    assert "baseline" in oelm(without_speed, "report", tmp_path / "s")
