"""Seconds of every single step, without waiting for the GPU."""

import time
from itertools import pairwise
from typing import Any

import torch


class StepClock:
    """Marks the end of each step: by the time, or on a GPU by a CUDA event in its stream. The marks are read
    where the loop has waited for the GPU anyway."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start()

    def start(self) -> None:
        """Start timing with the next step; the time since the last one is not counted."""
        self.marks = [self._mark()]

    def step_done(self) -> None:
        self.marks.append(self._mark())

    def read(self) -> list[float]:
        """The seconds of each step since `start`; all of them must have ended."""
        if self.device.type != "cuda":
            return [after - before for before, after in pairwise(self.marks)]
        self.marks[-1].synchronize()  # does not wait, as the GPU has passed it already
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self.marks)]

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
