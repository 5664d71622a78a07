"""A study's own MPS daemon. The tool is NVIDIA's; here scripts stand for it, and a library for the driver."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from oelm.config import make_config
from oelm.study.design import StudyConfig
from oelm.study.launchers import RunJob, mps
from oelm.study.launchers.local import LocalLauncher
from oelm.study.launchers.mps import TOOL, start_daemons

WORKS = """#!/bin/sh
if [ "$1" = -d ]; then
  echo "start $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY" >>"$RECORD"
  touch "$CUDA_MPS_PIPE_DIRECTORY/control"
else
  read told; echo "$told $CUDA_MPS_PIPE_DIRECTORY" >>"$RECORD"
fi
"""
DRIVER = "int cuInit(unsigned f) { return %d; } int cuDevicePrimaryCtxRetain(void **c, int d) { return 0; }"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A script in the tool's place and a driver whose first answer is `driver`; return what it is told."""
    if shutil.which("cc") is None:
        pytest.skip("no compiler for a library that stands for the driver")
    record = tmp_path / "told"
    record.touch()
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("RECORD", str(record))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv(mps.PIPES, raising=False)

    def use(script: str = WORKS, driver: int = 0):
        (folder / TOOL).write_text(script)
        (folder / TOOL).chmod(0o755)
        source = folder / "driver.c"
        source.write_text(DRIVER % driver)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
        return lambda: [line.split() for line in record.read_text().splitlines()]

    return use


def test_a_daemon_sees_one_gpu_and_stops_with_its_folder(install):
    told = install()
    daemon = start_daemons(["3"])["3"]
    folder = Path(daemon.environment[mps.PIPES])
    assert daemon.environment["CUDA_VISIBLE_DEVICES"] == "0" and folder.is_dir()
    daemon.close()
    assert told() == [["start", "3", str(folder)], ["quit", str(folder)]]
    assert not folder.exists()


@pytest.mark.slow
def test_a_study_that_is_killed_leaves_no_daemon(install):
    told = install()
    code = "from oelm.study.launchers.mps import *; import time; MpsDaemon('0'); print('up', flush=True); "
    command = [sys.executable, "-c", code + "time.sleep(100)"]
    study = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert study.stdout is not None and study.stdout.readline() == "up\n"
    study.send_signal(signal.SIGKILL)
    study.wait()
    end = time.monotonic() + 20
    while len(told()) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert [words[0] for words in told()] == ["start", "quit"]
    study.stdout.close()


@pytest.mark.parametrize(
    ("script", "driver", "reason"),
    [
        ("#!/bin/sh\nexit 7\n", 0, f"{TOOL}: exit code 7"),
        ("#!/bin/sh\nsleep 60\n", 0, f"{TOOL}: no answer in 1 s"),
        (WORKS, 46, "exit code 46"),  # it starts, and no process can use it
    ],
)
def test_what_fails_or_hangs_is_told_in_one_line(
    install, monkeypatch, capfd, tmp_path, script, driver, reason
):
    install(script, driver)
    monkeypatch.setattr(mps, "PATIENCE", 1.0 if "sleep" in script else 15.0)
    began = time.monotonic()
    assert start_daemons(["0"]) == {}
    assert time.monotonic() - began < 15
    out = capfd.readouterr().err
    assert out.startswith("note: runs take turns on the GPU") and reason in out and out.count("\n") == 1
    assert not [*tmp_path.glob("oelm-mps-*")]


def test_a_daemon_of_the_users_is_left_alone(install, monkeypatch, tmp_path):
    told = install()
    pipes = tmp_path / "theirs"
    pipes.mkdir()
    monkeypatch.setenv(mps.PIPES, str(pipes))
    (pipes / "control").touch()
    assert start_daemons(["0"]) == {}
    assert told() == [["get_server_list", str(pipes)]]
    install('#!/bin/sh\n[ -n "$1" ] || exit 1\n' + WORKS.partition("\n")[2])  # what is left of one
    daemon = start_daemons(["0"])["0"]
    assert daemon.environment[mps.PIPES] != str(pipes)
    daemon.close()


def test_nothing_is_started_where_no_gpu_is_shared(install, monkeypatch):
    told = install()
    assert start_daemons([]) == {} and told() == []
    monkeypatch.setenv("PATH", "/nonexistent")
    assert start_daemons(["0"]) == {}


def started_with(launcher: LocalLauncher) -> str:
    """The environment of its worker, as soon as the system shows it."""
    path = Path(f"/proc/{launcher.workers[0].process.pid}/environ")
    while not (text := path.read_bytes().decode()):
        time.sleep(0.01)
    return text


def test_runs_on_one_gpu_share_it_until_the_gpu_fails(install, monkeypatch, tmp_path):
    """Here it fails at once: there is none. The run must not be trained on the CPU instead."""
    told = install()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 * 10**10, 8 * 10**10))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    launcher = LocalLauncher(StudyConfig(jobs=5), 1e9, tmp_path / "log")
    job = RunJob(make_config({"task": {"name": "imdb"}}), tmp_path / "data", tmp_path / "run")
    try:
        assert launcher.places == 5 and told() == []  # for a dry run no daemon is started
        assert launcher.start(job)
        assert [*launcher.daemons] == ["4", "5"]  # on the last one a run is alone
        assert [words[1] for words in told()] == ["4", "5"]
        environment = started_with(launcher)
        assert f"{mps.PIPES}={launcher.daemons['4'].environment[mps.PIPES]}\0" in environment
        assert "CUDA_VISIBLE_DEVICES=0\0" in environment
        ended = None
        while ended is None:
            ended = launcher.poll(60)
        assert (ended.kind, ended.reason.code) == ("device", "run.no_gpu")
        assert not (tmp_path / "run").exists()
        launcher.start(job)
        environment = started_with(launcher)
        assert mps.PIPES not in environment and "CUDA_VISIBLE_DEVICES=4\0" in environment
    finally:
        launcher.close()
    assert [words[0] for words in told()] == ["start", "start", "quit", "quit"]
