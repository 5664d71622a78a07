"""NVIDIA's Multi-Process Service: kernels of processes that share a GPU run at the same time, not in turns.

It is optional: if it fails or takes too long, one line says so and the runs take turns on the GPU.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from oelm.system.library_errors import first_line
from oelm.system.messages import notice
from oelm.system.terminal import say

TOOL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PATIENCE = 15.0  # seconds for each of: starting a daemon, its first client, stopping it
# A client like torch but without its import, which shows whether the driver answers through the daemon.
CLIENT = (
    "import ctypes; cuda, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p(); "
    "raise SystemExit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))"
)
# Stops the daemon when the study closes this shell's standard input, or ends in any way.
WATCH = 'cat >/dev/null; echo quit | "$0"; rm -rf "$1"'


class MpsDaemon:
    """A daemon for one GPU, with pipes of its own. Processes with its `environment` share that GPU."""

    def __init__(self, gpu: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="oelm-mps-"))
        pipes = {PIPES: str(self.folder), LOGS: str(self.folder)}
        # Clients count the GPUs that the daemon sees.
        self.environment = pipes | {"CUDA_VISIBLE_DEVICES": "0"}
        own = os.environ | pipes | {"CUDA_VISIBLE_DEVICES": gpu}
        none = subprocess.DEVNULL
        self._watch = subprocess.Popen(
            ["sh", "-c", WATCH, TOOL, str(self.folder)],
            env=own, stdin=subprocess.PIPE, stdout=none, stderr=none, start_new_session=True,
        )  # fmt: skip
        try:
            _run([TOOL, "-d"], own)
            _run([sys.executable, "-Sc", CLIENT], os.environ | self.environment)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Stop the daemon; its clients have ended. One that does not stop is killed."""
        assert self._watch.stdin is not None
        self._watch.stdin.close()
        try:
            self._watch.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._watch.pid, signal.SIGKILL)
            self._watch.wait()
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / f"{TOOL}.pid").read_text()), signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)


def start_daemons(gpus: list[str]) -> dict[str, MpsDaemon]:
    """A daemon for each of these GPUs, where the machine has the service and the user has not started it."""
    if not gpus or shutil.which(TOOL) is None or _daemon_answers():
        return {}
    daemons: dict[str, MpsDaemon] = {}
    try:
        for gpu in gpus:
            daemons[gpu] = MpsDaemon(gpu)
    except OSError as error:
        say(f"note: {notice('study.no_mps', error=first_line(error))}", err=True)
    return daemons


def _daemon_answers() -> bool:
    """Whether the daemon that processes here use by default is running."""
    if not Path(os.environ.get(PIPES, "/tmp/nvidia-mps"), "control").exists():
        return False
    with contextlib.suppress(OSError):
        _run([TOOL], dict(os.environ), b"get_server_list\n")
        return True
    return False


def _run(command: list[str], env: dict[str, str], stdin: bytes = b"") -> None:
    """Run a command for at most PATIENCE seconds; OSError if it fails or takes longer."""
    none = subprocess.DEVNULL  # a pipe would stay open in the daemon, and be waited for
    name = Path(command[0]).name
    try:
        ended = subprocess.run(
            command, env=env, input=stdin, stdout=none, stderr=none, start_new_session=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{name}: no answer in {PATIENCE:g} s") from None
    if ended.returncode:
        raise OSError(f"{name}: exit code {ended.returncode}")
