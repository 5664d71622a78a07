"""Kernels of our own, in Triton."""

import importlib
import os
from typing import Any

import torch


def load_kernels(name: str) -> Any:
    """A module of this folder; None where its kernels cannot run: PyTorch was built for the CPU and Triton's
    interpreter is off, or Triton is not installed."""
    if torch.version.cuda is None and "TRITON_INTERPRET" not in os.environ:
        return None
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError:  # Triton comes with torch's CUDA builds for Linux, and with few others
        return None
