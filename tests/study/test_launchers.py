"""A launcher is one class: a study runs with one that the package does not know."""

from collections import deque
from pathlib import Path

from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.data import open_store
from oelm.errors import UserError
from oelm.study.design import StudyConfig
from oelm.study.folder import StudyFolder
from oelm.study.launchers import LAUNCHERS, EndedRun, Launcher, RunJob
from oelm.training.loop import train
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
