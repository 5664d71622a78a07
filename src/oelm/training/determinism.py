"""The same seed gives the same bits on one kind of GPU."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def same_bits(wanted: bool, device: torch.device) -> Iterator[None]:
    """While this lasts, PyTorch takes deterministic operations on a GPU, and refuses where it has none.

    Our own kernels add in one order anyway; a CPU does so for one number of threads.
    """
    if not wanted or device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a search for bugs, at the price of time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled
