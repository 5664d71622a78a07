"""A GPU's clock and power while it is timed, from `nvidia-smi`, where there is one.

A large GPU under load runs into its power limit and lowers its clock; two arms that differ in power then
differ in clock as well. Without these two numbers nobody can tell that from a difference in work.
"""

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import torch


class GpuClock:
    """Samples a GPU from `with` to its end; elsewhere, and without nvidia-smi, it sees nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: list[tuple[float, float, float]] = []  # when, MHz, W
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "GpuClock":
        program = shutil.which("nvidia-smi")
        if self.device.type == "cuda" and program is not None:
            query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms=50"]
            command = [program, f"--id={_name(self.device)}", *query]
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self.thread = threading.Thread(target=self._read, args=[self.process.stdout], daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.thread.join()
            self.process.communicate()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            with suppress(ValueError):  # "[N/A]"
                clock, power = map(float, line.split(","))
                self.samples.append((time.perf_counter(), clock, power))

    def since(self, start: float) -> tuple[float | None, float | None]:
        """The median clock (MHz) and power (W) since then."""
        seen = [sample[1:] for sample in list(self.samples) if sample[0] > start]
        if not seen:
            return None, None
        clocks, powers = zip(*seen, strict=True)
        return statistics.median(clocks), statistics.median(powers)


def _name(device: torch.device) -> str:
    """nvidia-smi counts all GPUs, PyTorch those it may see; this names one for both."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
