"""What a run refuses, and how it ends where going on makes no sense: one line, and nothing spoilt."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oelm.cli.main import main
from oelm.data import open_store
from oelm.errors import AuditError, RunError, UserError
from oelm.system.messages import read_notice
from oelm.training import loop
from oelm.training.checkpoint import read_checkpoint
from oelm.training.status import run_status
from tests.data.made import write_csv
from tests.training.runs import Machine, Strike, kept, make_store, outcome

Unbroken = Callable[..., tuple[Path, Path]]


def _tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with size and time of change: equal where nothing was touched."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def _status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text()))


def test_two_processes_cannot_write_one_folder(machine: Machine, tmp_path: Path) -> None:
    config, out = machine.config(steps=5000), tmp_path / "run"
    first = machine.start(config, out)
    first.wait_for(lambda: (out / "checkpoints/index.json").exists())
    second = machine.run(config, out)
    assert second.code == 2
    assert "in use by another process" in second.message
    overwriting = machine.run(config, out, "--overwrite")
    assert overwriting.code == 2
    assert first.process.is_alive()
    first.send(signal.SIGTERM)
    assert first.end().code == 75
    assert _status(out)["status"] == "interrupted"


def test_a_finished_run_is_overwritten_only_when_told(
    machine: Machine, unbroken: Unbroken, tmp_path: Path
) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    before = _tree(out)
    ended = machine.run(config, out)
    assert ended.code == 2
    assert "finished run" in ended.message
    assert _tree(out) == before
    (out / "stray.txt").write_text("of the old run")
    killed = machine.run(config, out, "--overwrite", strike=Strike(signal.SIGKILL, "RunFolder.open", n=12))
    assert killed.code == -signal.SIGKILL  # halfway through the deletion
    assert machine.run(config, out, "--overwrite").code == 0
    assert outcome(out) == outcome(reference)
    assert not (out / "stray.txt").exists()


def test_another_configuration_is_refused_with_the_difference(
    machine: Machine, unbroken: Unbroken, tmp_path: Path
) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    machine.run(config, out, strike=Strike(signal.SIGKILL, path="step-00000006"))
    before = _tree(out)
    ended = machine.run(machine.config(lr=1e-3), out)
    assert ended.code == 2
    assert "training.lr is 0.002 there, 0.001 here" in ended.message
    assert _tree(out) == before
    # How often a run saves or logs decides nothing.
    assert machine.run(machine.config(keep=4, save_every=7), out).code == 0
    assert outcome(out)["best"]["model.safetensors"] == outcome(reference)["best"]["model.safetensors"]


def test_data_that_changed_is_refused(machine: Machine, tmp_path: Path) -> None:
    config, out, store = machine.config(), tmp_path / "run", tmp_path / "store"
    shutil.copytree(machine.store, store)
    machine.run(config, out, store=store, strike=Strike(signal.SIGKILL, path="step-00000006"))
    shutil.rmtree(store)
    shutil.copytree(make_store(tmp_path, shuffled=True), store)
    ended = machine.run(config, out, store=store)
    assert ended.code == 2
    assert "other data" in ended.message


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["plain", "overwrite"])
@pytest.mark.parametrize("name", ["thesis.tex", "config.toml", "lockfile"])
def test_a_folder_that_is_not_a_run_is_never_touched(
    machine: Machine, tmp_path: Path, name: str, overwrite: list[str]
) -> None:
    (tmp_path / name).write_text("[other]\nkey = 1\n")
    before = _tree(tmp_path)
    ended = machine.run(machine.config(), tmp_path, *overwrite)
    assert ended.code == 2, ended.text
    assert "is not a run" in ended.message
    assert _tree(tmp_path) == before


def test_a_rate_that_blows_up_leaves_only_good_checkpoints(machine: Machine, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = machine.run(machine.config(lr=1e38, save_every=1, warmup=0), out)
    assert ended.code == 1, ended.text
    assert "last good checkpoint is" in ended.message
    assert "lower learning rate" in ended.message
    assert _status(out)["status"] == "failed"
    for name in kept(out):
        found = read_checkpoint(out / "checkpoints" / name)
        assert all(value.isfinite().all() for value in found.model.values())


def _poison(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Spoil the weights once so many steps are taken."""
    step = loop._step

    def poisoned(run: Any, *arguments: Any) -> Any:
        if run.progress.step == after:
            run.step.raw.classifier.weight.data.fill_(float("nan"))
        return step(run, *arguments)

    monkeypatch.setattr(loop, "_step", poisoned)


def test_nan_stops_with_step_items_and_the_last_good_checkpoint(
    machine: Machine,
    unbroken: Unbroken,
    train_here: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    _poison(monkeypatch, after=8)
    with pytest.raises(
        RunError, match="the loss is nan at step 9, by the fast path and by the plain one; items "
    ) as caught:
        train_here(config, out)
    assert "the last good checkpoint is step-00000006" in str(caught.value)
    assert _status(out)["status"] == "failed"
    recorded = [read_notice(_status(out)[key]) for key in ("reason", "advice")]
    assert "; ".join(map(str, recorded)) == str(caught.value)
    assert _status(out)["failure"] == {"kind": "diverged"}
    assert "try a lower learning rate" in str(caught.value)
    assert kept(out)[-1] == "step-00000006"
    items = _status(out)["reason"]["values"]["items"]
    assert len(items) == 8
    assert set(items) <= set(open_store(machine.store)["train"].ids.tolist())
    monkeypatch.undo()
    assert machine.run(config, out).code == 0  # what spoilt it is gone: nothing else is lost
    assert outcome(out) == outcome(reference)


def test_a_failed_run_records_the_step_it_got_to_and_not_the_one_that_looked(
    machine: Machine,
    train_here: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _poison(monkeypatch, after=1)
    config, out = machine.config(steps=8, log_every=8, eval_every=8, save_every=0), tmp_path / "run"
    with pytest.raises(RunError, match="at step 2, by the fast path and by the plain one;"):
        train_here(config, out)
    assert (run_status(out).step, run_status(out).of) == (2, 8)


def test_a_frozen_weight_that_moves_ends_the_run_at_the_next_save(
    unbroken: Unbroken,
    train_here: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, _ = unbroken()
    out = tmp_path / "run"
    step = loop._step

    def tampering(run: Any, *arguments: Any) -> Any:
        if run.progress.step == 6:
            frozen = next(p for p in run.step.raw.parameters() if not p.requires_grad)
            frozen.data[0, 0] += 1e-6
        return step(run, *arguments)

    monkeypatch.setattr(loop, "_step", tampering)
    with pytest.raises(AuditError):
        train_here(config, out)
    assert _status(out)["status"] == "failed"
    assert _status(out)["failure"] == {"kind": "software"}
    assert kept(out)[-1] == "step-00000006"


def test_a_run_at_chance_level_is_flagged(machine: Machine, unbroken: Unbroken, tmp_path: Path) -> None:
    assert not _status(unbroken()[1])["at_chance"]
    store = make_store(tmp_path, shuffled=True)
    config = machine.config(lr=1e-7, steps=10)
    assert machine.run(config, tmp_path / "run", store=store).code == 0
    assert _status(tmp_path / "run")["at_chance"]
    assert "training.at_chance" in [w["code"] for w in _status(tmp_path / "run")["warnings"]]
    ended = machine.run(config, tmp_path / "stopped", "--stop-at-chance", store=store)
    assert ended.code == 1
    assert "stopped at chance level" in ended.message
    assert _status(tmp_path / "stopped")["status"] == "failed"
    assert _status(tmp_path / "stopped")["failure"] == {"kind": "at_chance"}


def test_a_disk_without_room_is_refused_before_the_start(
    unbroken: Unbroken,
    train_here: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, _ = unbroken()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=70_000_000))
    with pytest.raises(RunError, match="has 70 MB free, but a checkpoint needs"):
        train_here(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_is_noticed_before_a_save(
    machine: Machine,
    unbroken: Unbroken,
    train_here: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    asked = iter([10**12] * 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(asked, 10**6)))
    with pytest.raises(RunError, match="has 1 MB free") as caught:
        train_here(config, out)
    assert caught.value.kind == "disk" and "learning rate" not in str(caught.value)
    assert kept(out) == ["step-00000005", "step-00000006"]
    monkeypatch.undo()
    assert machine.run(config, out).code == 0
    assert outcome(out) == outcome(reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trackers": ["nonsense"]}, "unknown tracker 'nonsense'"),
        ({"batch_size": 1}, "too few for"),
    ],
)
def test_a_run_that_cannot_start_leaves_nothing(
    machine: Machine,
    train_here: Callable[..., dict[str, Any]],
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        train_here(machine.config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


MISTAKES = {
    "an unknown key": (["--config", "wrong.toml"], "unknown key 'training.learning_rate'"),
    "no TOML": (["--config", "texts.csv"], "texts.csv is not a TOML file"),
    "a missing TOML": (["--config", "none.toml"], "none.toml: no such file"),
    "an unknown method": (["--data", "texts.csv", "--method", "magic"], "magic"),
    "an unknown task": (["--task", "imbd"], "there is no task 'imbd'"),
    "an unknown experiment": (["GPT-99"], "GPT-99"),
    "a file as folder": (["--data", "texts.csv", "--out", "wrong.toml"], "wrong.toml is a file"),
    "a rate in words": (["--data", "texts.csv", "--lr", "fast"], 'training.lr = "fast"'),
    "a negative rate": (["--data", "texts.csv", "--lr", "-1"], "training.lr must be positive"),
    "no assignment": (["--data", "texts.csv", "--set", "nonsense"], "write it as section.key=value"),
    "an unknown section": (["--data", "texts.csv", "--set", "oven.heat=3"], "unknown key 'oven'"),
    "a time in words": (["--data", "texts.csv", "--stop-after", "soon"], "write 90s, 9m or 2h"),
    "a missing file": (["--data", "none.csv"], "none.csv"),
    "a missing column": (["--data", "texts.csv", "--text", "body"], "body"),
    "no data": ([], "task.name (--task)"),
    "a number as name": (["--data", "texts.csv", "--set", "model.name=5"], "model.name"),
    "not a number of steps": (["--data", "texts.csv", "--steps", "many"], "'--steps'"),
    "a value for a table": (["--data", "texts.csv", "--set", "training=1"], "training must be a table"),
    "a value for the model": (["--data", "texts.csv", "--set", "model=-inf"], "model must be a table"),
    "thousands of digits": (["--config", "digits.toml"], "a number in it has thousands of digits"),
    "too deep": (["--data", "texts.csv", "--set", f"training.lr={'[' * 5000}"], "nested too deeply"),
    "no end": (["--data", "texts.csv", "--stop-after", "99999999999999999999h"], "at most a year"),
    "a long name": (["--data", "texts.csv", "--out", "x" * 300], "more than 200 bytes"),
    "a long file": (["--data", f"{'x' * 300}.csv"], "file name too long"),
    "a pipe": (["--data", "pipe.csv"], "pipe.csv is a pipe or a device"),
    "a device": (["--data", "zero.csv"], "zero.csv is a pipe or a device"),
    "training rows of a task": (
        ["--data", "texts.csv", "--train-on", "mnli"],
        "train_on is for the task xnli",
    ),
    "an unknown flag": (["--data", "texts.csv", "--speed", "9"], "--speed"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    mistake: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, message = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    (tmp_path / "wrong.toml").write_text("[training]\nlearning_rate = 1\n")
    (tmp_path / "digits.toml").write_text(f"[training]\nlr = {'9' * 5000}\n")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    write_csv(tmp_path / "texts.csv", ["text", "label"], [[f"text {i}", i % 2] for i in range(40)])
    before = sorted(os.walk(tmp_path))
    monkeypatch.setattr(sys, "argv", ["oelm", "train", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert message in printed[-1]
    assert len([line for line in printed if line.startswith("oelm:")]) == 1
    assert "Traceback" not in "".join(printed)
    assert sorted(os.walk(tmp_path)) == before
