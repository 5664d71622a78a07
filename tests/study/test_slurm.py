"""Studies on a real Slurm of one node (.ci/slurm starts one): what goes wrong there changes no record."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import oelm
from oelm.cli.main import app
from oelm.study.analysis import analyse
from oelm.study.report import summary
from oelm.study.run_claims import Queue
from oelm.study.slurm_jobs import tasks
from tests.study import studies
from tests.study.studies import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SLURM = ("--slurm", "--set", "study.slurm.workers=2", "--set", "study.jobs=1")
ONE_RATE = ("--lrs", "1e-3", "--seeds", "1")
LONG = (*ONE_RATE, "--steps", "800", "--set", "training.log_every=50", "--set", "training.eval_every=400",
        "--set", "training.save_every=100")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    """Skip without a Slurm; fail where CI says that there must be one."""
    asked = shutil.which("sinfo") and subprocess.run(
        ["sinfo", "-h", "-o", "%t"], capture_output=True, text=True
    )
    if not asked or asked.returncode or not asked.stdout.strip():
        reason = 'no Slurm answers here; `eval "$(.ci/slurm)"` starts one'
        pytest.fail(reason) if os.environ.get("OELM_REQUIRE_SLURM") else pytest.skip(reason)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return studies.make_file(tmp_path_factory.mktemp("data"))


def local(data: Path, out: Path, *more: str, cwd: Path | None = None) -> Path:
    code, text = studies.run(data, out, *more, "--jobs", "2", cwd=cwd)
    assert code == 0, text
    return out


def finished(study: "subprocess.Popen[str]", out: Path) -> str:
    text, _ = study.communicate(timeout=900)
    logs = "\n".join(path.read_text() for path in (out / "log").glob("slurm-*.log"))
    assert study.returncode == 0, f"{text}\n{logs}"
    return logs


def same_records(out: Path, reference: Path) -> None:
    assert studies.records(out) == studies.records(reference)


def test_two_studies_at_once_a_killed_command_and_edited_code_leave_the_records_of_a_local_study(
    data, tmp_path
):
    reference = local(data, tmp_path / "local", "--seeds", "2")
    plugin, source = tmp_path / "own_plugin.py", tmp_path / "source"
    plugin.write_text("")
    shutil.copytree(Path(oelm.__file__).parent, source / "oelm", ignore=shutil.ignore_patterns("__pycache__"))
    with_plugin = (*ONE_RATE, "--plugin", "own_plugin")
    reference_of_two = local(data, tmp_path / "local-two", *with_plugin, cwd=tmp_path)
    two = studies.start(data, tmp_path / "two", *with_plugin, *SLURM, cwd=tmp_path, source=source)
    first = studies.start(data, tmp_path / "one", "--seeds", "2", *SLURM)
    wait_for(lambda: tasks(tmp_path / "two"))
    for path in (plugin, source / "oelm" / "study" / "worker.py", source / "oelm" / "training" / "loop.py"):
        path.write_text("raise RuntimeError('edited after the workers were submitted')")
    wait_for(lambda: any((tmp_path / "one" / "queue" / ".work").glob("*")))
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    name = (tmp_path / "one" / "slurm" / "name").read_text()
    again = studies.start(data, tmp_path / "one", "--seeds", "2", *SLURM)
    finished(again, tmp_path / "one")
    assert (tmp_path / "one" / "slurm" / "name").read_text() == name
    assert len({task.name.partition("_")[0] for task in tasks(tmp_path / "one") or ()}) == 1  # it attached
    finished(two, tmp_path / "two")
    same_records(tmp_path / "one", reference)
    same_records(tmp_path / "two", reference_of_two)


# A worker is signalled 25 to 55 s after its start: Slurm looks at its jobs every 30 s, and signals early.
SLOW_ON_SLURM = """
import os, time
from oelm.training.step import PlainStep

begin = PlainStep._begin

def slowly(step, number):
    time.sleep(0.1 if "SLURM_JOB_ID" in os.environ else 0)
    begin(step, number)

PlainStep._begin = slowly
"""


def test_a_run_that_meets_the_time_limit_is_queued_again_and_ends_the_same(data, tmp_path):
    (tmp_path / "slow_on_slurm.py").write_text(SLOW_ON_SLURM)
    # Two runs of 30 s at least, whatever the machine: the first signal falls into one of them.
    more = (*LONG, "--steps", "300", "--plugin", "slow_on_slurm")
    reference = local(data, tmp_path / "local", *more, cwd=tmp_path)
    one = ("--set", "study.slurm.workers=1", "--set", "study.slurm.time=1", "--set", "study.slurm.lead=5")
    out = tmp_path / "slurm"
    logs = finished(studies.start(data, out, *more, *SLURM, *one, cwd=tmp_path), out)
    assert "the time limit is near: runs are saved, and the job is queued again" in logs
    assert "(worker 3 of this run)" in logs  # taken, given back, taken
    (task,) = tasks(out) or ()
    assert task.restarts >= 1
    same_records(out, reference)


def kill_node(out: Path) -> None:
    """End all that Slurm has on this node for a study, as a node that loses its power does."""
    configuration = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True).stdout
    pid_file = next(
        line.split("=")[1].strip() for line in configuration.splitlines() if "SlurmdPidFile" in line
    )
    os.kill(int(Path(pid_file).read_text()), signal.SIGKILL)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(out) in process.cmdline() and "work" in process.cmdline():
                parent = process.parent()
                if parent is not None and "slurmstepd" in parent.name():
                    parent.kill()
                process.kill()  # the process that trains ends with it


def test_a_node_that_fails_has_its_workers_queued_again_and_changes_nothing(data, tmp_path):
    reference = local(data, tmp_path / "local", *LONG)
    out = tmp_path / "slurm"
    study = studies.start(data, out, *LONG, *SLURM)
    wait_for(lambda: any((out / "queue" / ".work").glob("*/checkpoints/step-*")))
    kill_node(out)
    try:
        wait_for(lambda: any(task.restarts for task in tasks(out) or ()))  # Slurm has seen it
    finally:
        subprocess.run(["slurmd"], check=True)
    logs = finished(study, out)
    assert "(worker 2 of this run)" in logs  # it was taken over
    same_records(out, reference)


# A step that takes longer than Slurm waits between its signal and its kill.
SLOW_STEP = """
import time
from oelm.training.step import PlainStep

begin = PlainStep._begin

def slowly(step, number):
    time.sleep(20 if number == 5 else 0)
    begin(step, number)

PlainStep._begin = slowly
"""


def test_cancelled_workers_save_their_runs_before_they_leave(data, tmp_path):
    (tmp_path / "slow_step.py").write_text(SLOW_STEP)
    out = tmp_path / "slurm"
    more = (*LONG, "--set", "training.log_every=1", "--plugin", "slow_step", "--set", "training.fast=false")
    study = studies.start(data, out, *more, *SLURM, cwd=tmp_path)
    logs = out / "queue" / ".work"
    wait_for(lambda: len(list(logs.glob("*/metrics.jsonl"))) == 2)
    time.sleep(2)
    done = CliRunner().invoke(app, ["cancel", str(out)])
    assert done.exit_code == 0, done.output
    assert [task.state for task in tasks(out) or ()] == ["COMPLETED"] * 2
    text, _ = study.communicate(timeout=300)
    assert study.returncode == 75 and "stopped by oelm cancel" in text
    states = [state.event for _, state in Queue(out).states()]
    assert states == ["released"] * 2
    assert len(list(logs.glob("*/checkpoints/step-*"))) == 2  # no step was due to be saved


def test_what_waits_is_shown_with_slurms_reason_and_can_be_cancelled(data, tmp_path):
    out = tmp_path / "slurm"
    later = ("--set", 'study.slurm.extra=["--begin=now+1hour"]')
    study = studies.start(data, out, *ONE_RATE, *SLURM, *later)
    wait_for(lambda: any(task.reason == "BeginTime" for task in tasks(out) or ()))
    asked = CliRunner().invoke(app, ["status", str(out), "--json"])
    runs = json.loads(asked.output)
    assert [run["status"] for run in runs] == ["queued", "queued"]
    assert all("queued, PENDING (BeginTime)" in run["reason"] for run in runs)
    done = CliRunner().invoke(app, ["cancel", str(out)])
    assert done.exit_code == 0, done.output
    text, _ = study.communicate(timeout=300)
    assert study.returncode == 75 and "stopped by oelm cancel" in text
    wait_for(lambda: not any(task.live for task in tasks(out) or ()), 30)


def test_what_slurm_refuses_is_said_in_one_line(data, tmp_path):
    code, text = studies.run(
        data, tmp_path / "s", *ONE_RATE, *SLURM, "--set", "study.slurm.partition=no-such"
    )
    assert code == 2
    assert text.splitlines()[-1].startswith("oelm: Slurm refused the workers: invalid partition")


def demo(out: Path, *more: str) -> "subprocess.Popen[str]":
    """The demo study, with fewer and shorter runs."""
    words = ["study", "demo", "--lrs", "3e-4", "--seeds", "2", "--steps", "8", *more, "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-m", "oelm", *words], env=studies.environment(out.parent / "cache"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_the_demo_gives_the_same_table_locally_with_workers_and_on_slurm(tmp_path):
    alone, shared, slurm = (tmp_path / name for name in ("alone", "shared", "slurm"))
    finished(demo(alone), alone)
    running = [(demo(shared, "--launcher", "workers"), shared), (demo(slurm, *SLURM), slurm)]
    wait_for((shared / "study.toml").exists)
    worker = subprocess.run(
        [sys.executable, "-m", "oelm", "work", str(shared)], env=studies.environment(tmp_path / "cache"),
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert worker.returncode == 0, worker.stderr
    table = summary(analyse(alone), "en")
    assert "TF-IDF + logistic regression" in table
    for study, out in running:
        finished(study, out)
        assert summary(analyse(out), "en") == table
        same_records(out, alone)
