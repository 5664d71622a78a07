"""What Slurm's commands print, in whatever version, as the workers of a study."""

import os
from pathlib import Path

import pytest

from oelm.study.queue_status import all_runs, slurm_lines
from oelm.study.run_claims import Queue
from oelm.study.slurm_jobs import Task, tasks

# As Slurm 22.05 answers, which knows no field for restarts; 12_0 was queued again once.
SACCT = """#!/bin/sh
case "$*" in *Restart*) echo "sacct: fatal: Invalid field requested" >&2; exit 1;; esac
echo "11_0|CANCELLED by 1000|None"
echo "11_1|FAILED|NonZeroExitCode"
case "$*" in *" -D "*) echo "12_0|REQUEUED|None";; esac
echo "12_0|TIMEOUT|TimeLimit"
echo "13_[0-3]|PENDING|Resources"
"""
SQUEUE = """#!/bin/sh
echo "13|0|PENDING|Resources|0|"
echo "13|1|PENDING|Priority|2|"
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    for name, text in {"sacct": SACCT, "squeue": SQUEUE}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    out = tmp_path / "study"
    (out / "slurm").mkdir(parents=True)
    (out / "slurm" / "name").write_text("oelm-study")
    return out


def test_ended_workers_are_read_from_sacct_and_live_ones_from_squeue(study):
    known = {task.name: task for task in tasks(study) or ()}
    assert known == {
        "11_0": Task("11_0", "CANCELLED", "None", 0),
        "11_1": Task("11_1", "FAILED", "NonZeroExitCode", 0),
        "12_0": Task("12_0", "TIMEOUT", "TimeLimit", 1),
        "13_0": Task("13_0", "PENDING", "Resources", 0),
        "13_1": Task("13_1", "PENDING", "Priority", 2),
    }


def claim(out: Path, owner: str, event: str = "claim") -> None:
    taken = Queue(out, owner).take()
    assert taken is not None
    if event != "claim":
        taken.end(event)


def test_a_run_waits_for_its_own_worker_and_one_that_never_had_any_for_the_next(study):
    queue = Queue(study)
    queue.open()
    for name in "abc":
        queue.add(name, {"folder": f"runs/t/m/{name}", "config": {"training": {"seed": 1}}})
    claim(study, "slurm-13_1-node-1", "released")
    claim(study, "slurm-12_0-node-2", "claim")
    os.utime(queue.jobs / "b" / "1", (0, 0))
    runs = {Path(run.folder).name: run for run in all_runs([study], {study: tasks(study)})}
    assert {name: run.status for name, run in runs.items()} == {
        "a": "requeued",
        "b": "requeued",
        "c": "queued",
    }
    assert runs["a"].reason == "Slurm job 13_1: requeued, PENDING (Priority), started again 2 times"
    assert "no sign of life from slurm-12_0-node-2" in str(runs["b"].reason)
    assert str(runs["b"].reason).endswith("Slurm job 12_0: failed, TIMEOUT (TimeLimit)")
    assert runs["c"].reason == "Slurm job 13_0: queued, PENDING (Resources)"
    running = Task("13_0", "RUNNING", "None", 0)
    (reason,) = [r.reason for r in all_runs([study], {study: [running]}) if Path(r.folder).name == "c"]
    assert reason is None  # its turn comes
    assert slurm_lines({study: None}) == ["Slurm does not answer"]


def test_a_worker_that_asked_for_longer_is_not_called_silent(study):
    queue = Queue(study)
    queue.open()
    queue.add("a", {"folder": "runs/t/m/a", "config": {"training": {"seed": 1}}})
    assert Queue(study, "w", expires=1e12).take() is not None
    os.utime(queue.jobs / "a" / "1", (0, 0))
    assert [run.status for run in all_runs([study], {})] == ["running"]
