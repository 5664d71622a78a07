"""Where the time of a step goes, kernel by kernel."""

import re
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from oelm.bench.measure import StepArm, now

STEPS = 8
MOST = 60  # kernels of an arm that are told apart


def profiled(arm: StepArm, device: torch.device) -> list[dict[str, Any]]:
    """The kernels of an arm's steps, the longest first: name, calls and seconds of a step.

    On a GPU what runs there, on a CPU PyTorch's operators without what they call. An arm has taken a window
    before, so that the clock is the one it is timed at.
    """
    gpu = device.type == "cuda"
    torch.backends.cuda.enable_cudnn_sdp(arm.cudnn_attention)
    arm.window()
    steps = min(arm.steps, STEPS)
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        for k in range(steps):
            arm.step(k)
        now(device)
    sums: dict[str, list[float]] = {}
    for event in found.key_averages():
        microseconds = event.self_device_time_total if gpu else event.self_cpu_time_total
        entry = sums.setdefault(short(event.key), [0.0, 0.0])
        entry[0] += event.count / steps
        entry[1] += microseconds * 1e-6 / steps
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    rest = [entry for _, entry in ordered[MOST:]]
    kept = ordered[:MOST] + (
        [("(all others)", [sum(column) for column in zip(*rest, strict=True)])] if rest else []
    )
    return [{"name": name, "calls": calls, "seconds": seconds} for name, (calls, seconds) in kept]


def short(name: str) -> str:
    """A kernel's name without its template's arguments."""
    name = re.sub(r"<.*", "", name.removeprefix("void "))
    return name if len(name) <= 72 else f"...{name[-69:]}"
