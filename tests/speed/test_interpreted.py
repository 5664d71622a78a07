"""Triton decides at import whether to interpret kernels or compile them: each in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed; on Linux it comes with the extra 'dev'",
)
HERE = Path(__file__).parent


def run(*command: str, **environment: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    child = subprocess.run(
        [sys.executable, *command], cwd=HERE, env=env | environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stdout + child.stderr


def test_the_kernels_over_the_whole_range_of_their_inputs() -> None:
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "kernel_ranges.py", TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("file", ["kernel_ranges.py", "interpreted_heads.py"])
def test_the_kernels_on_a_gpu(file: str) -> None:
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "interpreted_value_only.py",
        "interpreted_own.py",
        "interpreted_heads.py",
        "interpreted_cross_entropy.py",
    ],
)
def test_the_kernels_in_tritons_interpreter(file: str) -> None:
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", file, TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "86", "90", "100", "120"])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(capability: str, tmp_path: Path) -> None:
    """The interpreter takes much that the compiler refuses, and a GPU has as much shared memory as it has."""
    run("compile_kernels.py", capability, TRITON_CACHE_DIR=str(tmp_path))
