"""A launcher is one class: a study runs with one that the package does not know."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.config import make_config
from oelm.data import open_store
from oelm.errors import Interrupted, UserError
from oelm.study.design import StudyConfig, make_study
from oelm.study.folder import Setting, StudyFolder
from oelm.study.launchers import LAUNCHERS, EndedRun, Launcher, RunJob
from oelm.study.launchers.local import LocalLauncher
from oelm.study.scheduler import Scheduler
from oelm.system.messages import notice
from oelm.training.loop import train
from oelm.training.stopping import Stop
from tests.study.studies import RECIPE, make_file


class InThisProcess(Launcher):
    """Trains a run while it is started; the first attempt of all is lost."""

    def __init__(self, table: StudyConfig, memory_bytes: float, logs: Path) -> None:
        self.ended: deque[EndedRun] = deque()
        self.attempts = 0
        assert memory_bytes > 0 and table.launcher == "inline"

    @property
    def places(self) -> int:
        return 1

    def start(self, job: RunJob) -> bool:
        if self.ended:
            return False
        self.attempts += 1
        if self.attempts == 1:
            self.ended.append(EndedRun(job.folder, "process", "its node is gone"))
        else:
            train(job.config, open_store(str(job.dataset)), job.folder, show=False)
            self.ended.append(EndedRun(job.folder))
        return True

    def poll(self, seconds: float) -> EndedRun | None:
        return self.ended.popleft() if self.ended else None

    def stop(self) -> None: ...

    def close(self) -> None: ...


def test_a_study_takes_any_launcher_and_reads_results_from_the_runs_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(LAUNCHERS, "inline", InThisProcess)
    words = [
        "study",
        "--data",
        str(make_file(tmp_path)),
        *RECIPE,
        "--methods",
        "baseline,oelm",
        "--lrs",
        "1e-3",
    ]
    words += ["--seeds", "1", "--steps", "2", "--set", "study.launcher=inline", "--out", str(tmp_path / "s")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "its node is gone; trying again in 1 s" in done.output
    records, _ = StudyFolder(tmp_path / "s").records()
    assert {record.method for record in records if record.test is not None} == {"baseline", "oelm"}


def test_an_unknown_launcher_is_refused(tmp_path):
    words = ["study", "--task", "imdb", "--set", "study.launcher=pigeon", "--out", str(tmp_path / "s")]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError)
    assert "unknown launcher 'pigeon'; known: local" in str(done.exception)
    assert not (tmp_path / "s").exists()


class Queueing(InThisProcess):
    """Takes all runs; somebody stops the study when it has three."""

    def __init__(self, stop: Stop) -> None:
        self.stopped, self.taken = stop, 0

    @property
    def detached(self) -> bool:
        return True

    def start(self, job: RunJob) -> bool:
        self.taken += 1
        self.stopped.reason = notice("stop.signal", signal="Ctrl-C") if self.taken == 3 else None
        return True

    def poll(self, seconds: float) -> EndedRun | None:
        return None


def test_a_study_can_be_stopped_while_it_queues_its_runs(tmp_path):
    study = make_study({"task": {"name": "imdb"}, "model": {"name": "gpt-tiny"}})
    store: Any = SimpleNamespace(task="imdb", metric="accuracy", fingerprint="0" * 64, folder=tmp_path)
    setting = Setting(study, study.task_config(None), store, "fp32")
    stop = Stop()
    launcher = Queueing(stop)
    with pytest.raises(Interrupted):
        Scheduler([setting], tmp_path, launcher, "none").run(stop, lambda progress: None)
    assert launcher.taken == 3


def test_what_a_plugin_prints_is_no_answer_of_a_worker(tmp_path, monkeypatch):
    talk = "import os, sys\nprint('hello')\nos.write(1, b'from a library\\n')\nprint('ready', flush=True)\n"
    (tmp_path / "talks.py").write_text(talk)
    monkeypatch.chdir(tmp_path)
    launcher = LocalLauncher(StudyConfig(jobs=1), 1e6, tmp_path / "log")
    try:
        launcher.start(RunJob(make_config({"plugins": ["talks"]}), tmp_path / "no-data", tmp_path / "run"))
        ended = launcher.poll(60)
    finally:
        launcher.close()
    assert ended is not None and ended.kind == "input" and "no-data" in str(ended.full_reason)
    lines = (tmp_path / "log" / "worker-0.log").read_text().splitlines()
    assert sorted(lines) == ["from a library", "hello", "ready"]


def test_workers_that_were_prepared_train_the_first_runs(tmp_path):
    launcher = LocalLauncher(StudyConfig(jobs=2), 1e6, tmp_path / "log")
    job = RunJob(make_config({}), tmp_path / "no-data", tmp_path / "run")
    try:
        launcher.prepare(1)
        (prepared,) = launcher.workers
        launcher.prepare(9)
        assert launcher.workers[0] is prepared and len(launcher.workers) == 2
        assert launcher.start(job) and prepared.job is job and len(launcher.workers) == 2
        ended = launcher.poll(60)
        assert ended is not None and ended.kind == "input"
        launcher.prepare(2)
        assert len(launcher.workers) == 2
    finally:
        launcher.close()
    assert prepared.process.returncode is not None
    assert not (tmp_path / "log").exists()  # nothing was said
