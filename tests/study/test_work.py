"""Real workers on one folder: kills, one that is stopped and wakes up late, the records of a local study."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from oelm.config import make_config, read_toml
from oelm.errors import UserError
from oelm.study.design import StudyConfig
from oelm.study.launchers.interface import RunJob
from oelm.study.launchers.local import LocalLauncher
from oelm.study.run_claims import Queue
from oelm.study.work import job_values, work
from tests.study import studies
from tests.study.studies import wait_for

MORE = ("--seeds", "3", "--steps", "24")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return studies.make_file(tmp_path_factory.mktemp("data"))


class Process:
    """An `oelm work` of one run at a time, and what it says."""

    def __init__(self, data: Path, out: Path, log: Path) -> None:
        self.log = log
        words = ["work", str(out), "--jobs", "1", "--expires", "12s"]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "oelm", *words], env=studies.environment(data.parent / "cache"),
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def training(self) -> bool:
        lines = [line for line in self.log.read_text().splitlines() if line.startswith(("takes", "finished"))]
        return self.process.poll() is None and bool(lines) and lines[-1].startswith("takes")

    def signal(self, number: signal.Signals) -> None:
        """To the worker and to the process that trains."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children()):
                process.send_signal(number)


@pytest.mark.slow
def test_ten_workers_kills_and_one_that_wakes_up_late_leave_the_records_of_a_local_study(data, tmp_path):
    code, text = studies.run(data, tmp_path / "local", *MORE)
    assert code == 0, text
    out = tmp_path / "shared"
    study = studies.start(data, out, *MORE, "--launcher", "workers")
    wait_for(lambda: (out / "study.toml").exists())
    workers = [Process(data, out, tmp_path / f"worker-{n}.log") for n in range(10)]
    wait_for(lambda: any(one.training for one in workers))
    sleeper = next(one for one in workers if one.training)
    sleeper.signal(signal.SIGSTOP)
    for _ in range(4):
        wait_for(lambda: study.poll() is not None or any(w.training for w in workers if w is not sleeper))
        for one in [w for w in workers if w.training and w is not sleeper][:1]:
            one.signal(signal.SIGKILL)
            one.process.wait()
            workers.remove(one)
    # The run of the one that sleeps is taken over, and only then it wakes up.
    queue = Queue(out)
    wait_for(lambda: any(path.suffix == ".2" for path in queue.work.glob("*.2")) or not queue.work.exists())
    sleeper.signal(signal.SIGCONT)
    text, _ = study.communicate(timeout=300)
    assert study.returncode == 0, text
    for one in workers:
        assert one.process.wait(60) == 0, one.log.read_text()
    assert "to another worker" in sleeper.log.read_text()
    assert studies.records(out) == studies.records(tmp_path / "local")


# A step that takes for ever: told to stop, such a run does not save in time.
STUCK = """
import time
from oelm.training.step import PlainStep

begin = PlainStep._begin
PlainStep._begin = lambda step, number: time.sleep(600) if number == 3 else begin(step, number)
"""


def one_run(machine, folder: Path, plugin: str = "", **training) -> RunJob:
    """A run of the session's dataset, not started."""
    values = read_toml(machine.config(**training))
    values["task"]["data"] = str(machine.store)
    values |= {"plugins": [plugin]} if plugin else {}
    return RunJob(make_config(values), machine.store, folder)


@pytest.mark.slow
def test_a_worker_told_to_stop_beats_until_its_runs_have_ended_and_only_then_gives_them_back(
    machine, tmp_path
):
    (tmp_path / "stuck.py").write_text(STUCK)
    root = tmp_path / "s"
    queue = Queue(root)
    queue.open()
    (root / "study.toml").write_text('[task]\nname = "imdb"\n[study]\nlauncher = "workers"\n')
    job = one_run(machine, root / "runs" / "a", "stuck", fast=False)
    queue.add("a", job_values(job, StudyConfig(jobs=1), 1e9, root))
    words = ["work", str(root), "--expires", "3s", "--patience", "5s", "--plugin", "stuck"]
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    worker = subprocess.Popen([sys.executable, "-m", "oelm", *words], env={**os.environ, "PYTHONPATH": path})
    try:
        log = root / "queue" / ".work" / "a.1" / "metrics.jsonl"
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= 2)
        (trainer,) = psutil.Process(worker.pid).children()
        worker.terminate()
        beats, end = set(), time.monotonic() + 30
        while (state := queue.state("a")).event == "claim" and time.monotonic() < end:  # type: ignore[union-attr]
            beats.add(state.raw)  # type: ignore[union-attr]
            time.sleep(0.02)
        assert state is not None and state.event == "released"
        assert not trainer.is_running()
        assert len(beats) >= 5  # twice a second for five seconds
        assert worker.wait(30) == 75
    finally:
        worker.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dropped", "killed", "torchrun killed"])
def test_no_process_of_a_run_outlives_it(machine, tmp_path, how):
    launcher = LocalLauncher(StudyConfig(jobs=1, gpus_per_run=2), 1e8, tmp_path / "log")
    out = tmp_path / "a"
    try:
        assert launcher.start(one_run(machine, out, steps=100_000, accumulate=1))
        worker = psutil.Process(launcher.workers[0].process.pid)
        wait_for(lambda: (out / "metrics.jsonl").exists())
        (torchrun,) = worker.children()
        ranks = torchrun.children()
        assert len(ranks) == 2
        if how == "dropped":
            launcher.drop(out)
            assert not [p for p in ranks if p.is_running()]
        else:
            (worker if how == "killed" else torchrun).kill()
            wait_for(lambda: not [p for p in ranks if p.is_running()], 10)
    finally:
        launcher.close()


def test_a_folder_that_is_no_study_for_workers_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a study"):
        work(tmp_path, None, None, 90.0, print)
    (tmp_path / "study.toml").write_text('[task]\nname = "imdb"\n')
    with pytest.raises(UserError, match="--launcher workers shares them"):
        work(tmp_path, None, None, 90.0, print)
    (tmp_path / "study.toml").write_text('[task]\nname = "imdb"\n[study]\nlauncher = "workers"\n')
    (tmp_path / "cancel").touch()
    with pytest.raises(UserError, match="was cancelled"):
        work(tmp_path, None, None, 90.0, print)
