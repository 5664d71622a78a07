"""Why a run failed is a code: real errors, and what a run records of them."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from oelm.config import make_config, read_toml
from oelm.data import open_store
from oelm.errors import FAULTS, OUTCOMES, FolderInUse, RunError, UserError
from oelm.system.files import lock_file
from oelm.training import loop
from oelm.training.failure import failure_kind
from oelm.training.folder import RunFolder
from tests.training.runs import Machine

HUGE = 1 << 55  # elements, which no machine has room for


def _write_to_a_full_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def _read_what_is_no_checkpoint(folder: Path) -> None:
    (folder / "x.safetensors").write_bytes(b"\xff" * 100)
    load_file(folder / "x.safetensors")


@pytest.mark.parametrize(
    ("fail", "error", "kind"),
    [
        (lambda _: torch.empty(HUGE), RuntimeError, "memory"),
        (lambda _: bytearray(HUGE), MemoryError, "memory"),
        (lambda _: _write_to_a_full_disk(), OSError, "disk"),
        (lambda folder: (folder / "nothing").read_text(), OSError, "disk"),
        (_read_what_is_no_checkpoint, SafetensorError, "disk"),
        (lambda _: torch.zeros(2) @ torch.zeros(3), RuntimeError, "software"),
        (lambda folder: RunFolder(folder)._check_kind(), UserError, "input"),
    ],
    ids=["tensor", "bytes", "full", "missing", "safetensors", "bug", "folder"],
)
def test_real_errors_are_told_apart(
    fail: Callable[[Path], Any], error: type[Exception], kind: str, tmp_path: Path
) -> None:
    (tmp_path / "a stranger").touch()
    with pytest.raises(error) as caught:
        fail(tmp_path)
    assert failure_kind(caught.value) == kind
    assert kind in FAULTS and kind not in OUTCOMES


def test_errors_of_the_gpu_and_of_the_system() -> None:
    assert failure_kind(torch.OutOfMemoryError("CUDA out of memory")) == "gpu_memory"
    assert failure_kind(torch.AcceleratorError("CUDA error: unspecified launch failure")) == "device"
    assert failure_kind(OSError(errno.ENOMEM, "Cannot allocate memory")) == "memory"
    assert failure_kind(RunError("the loss is nan", "diverged")) == "diverged"


def test_a_folder_that_another_process_holds_has_its_own_class(tmp_path: Path) -> None:
    lock = lock_file(tmp_path / "lock")
    with pytest.raises(FolderInUse):
        RunFolder(tmp_path).open(make_config({"task": {"name": "imdb"}}), overwrite=False, data="")
    lock.close()


@pytest.mark.parametrize(
    ("failing", "spoils", "error", "kind"),
    [
        (lambda: torch.empty(HUGE), False, RunError, "memory"),
        (_write_to_a_full_disk, False, RunError, "disk"),
        (lambda: [][0], False, IndexError, "software"),
        (lambda: [][0], True, RunError, "diverged"),  # a metric that cannot be computed from NaN
    ],
    ids=["memory", "disk", "bug", "diverged"],
)
def test_a_run_records_the_kind_and_advises_by_the_cause(
    failing: Callable[[], Any],
    spoils: bool,
    error: type[Exception],
    kind: str,
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = loop._step

    def tampered(run: Any, *arguments: Any) -> Any:
        if run.progress.step == 4:
            if spoils:
                run.step.raw.classifier.weight.data.fill_(float("nan"))
            failing()
        return step(run, *arguments)

    monkeypatch.setattr(loop, "_step", tampered)
    values = read_toml(machine.config())
    values["task"]["data"] = str(machine.store)
    out = tmp_path / "run"
    with pytest.raises(error) as caught:
        loop.train(make_config(values), open_store(machine.store), out, show=False)
    results = json.loads((out / "results.json").read_text())
    assert results["status"] == "failed" and results["failure"] == {"kind": kind}
    assert results["schema"] == 4
    assert ("learning rate" in str(caught.value)) == (kind == "diverged")
    assert ("training.accumulate" in str(caught.value)) == (kind == "memory")
    if kind != "software":
        assert "the last good checkpoint is step-00000003" in str(caught.value)
