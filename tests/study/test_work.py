"""Real workers on one folder: kills, one that is stopped and wakes up late, the records of a local study."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from oelm.errors import UserError
from oelm.study.run_claims import Queue
from oelm.study.work import work
from tests.study import studies

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


def wait_for(condition, seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_ten_workers_kills_and_one_that_wakes_up_late_leave_the_records_of_a_local_study(data, tmp_path):
    code, text = studies.run(data, tmp_path / "local", *MORE)
    assert code == 0, text
    out = tmp_path / "shared"
    study = studies.start(data, out, *MORE, "--launcher", "workers")
    assert wait_for(lambda: (out / "study.toml").exists())
    workers = [Process(data, out, tmp_path / f"worker-{n}.log") for n in range(10)]
    assert wait_for(lambda: any(one.training for one in workers))
    sleeper = next(one for one in workers if one.training)
    sleeper.signal(signal.SIGSTOP)
    for _ in range(4):
        assert wait_for(
            lambda: study.poll() is not None or any(w.training for w in workers if w is not sleeper)
        )
        for one in [w for w in workers if w.training and w is not sleeper][:1]:
            one.signal(signal.SIGKILL)
            one.process.wait()
            workers.remove(one)
    # The run of the one that sleeps is taken over, and only then it wakes up.
    queue = Queue(out)
    assert wait_for(
        lambda: any(path.suffix == ".2" for path in queue.work.glob("*.2")) or not queue.work.exists()
    )
    sleeper.signal(signal.SIGCONT)
    text, _ = study.communicate(timeout=300)
    assert study.returncode == 0, text
    for one in workers:
        assert one.process.wait(60) == 0, one.log.read_text()
    assert "to another worker" in sleeper.log.read_text()
    assert studies.records(out) == studies.records(tmp_path / "local")


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
