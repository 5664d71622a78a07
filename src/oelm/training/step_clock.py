"""Seconds of every single step, without waiting for the GPU."""

import time
from itertools import pairwise
from typing import Any

import torch


class StepClock:
    """A mark after each step: the time, or on a GPU an event in its queue, which takes the time when the GPU
    gets there. Marks are read where the loop has waited for the GPU anyway."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start()

    def start(self) -> None:
        """Begin with the next step; what lies between is not counted."""
        self.marks = [self._mark()]

    def step_done(self) -> None:
        self.marks.append(self._mark())

    def read(self) -> list[float]:
        """The seconds of each step since the start, all of which have ended."""
        if self.device.type != "cuda":
            return [after - before for before, after in pairwise(self.marks)]
        self.marks[-1].synchronize()  # the GPU has passed it already: this never waits
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self.marks)]

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
