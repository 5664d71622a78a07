"""The GPU is opened beside the imports, and these are not searched for garbage. Here a library stands for
NVIDIA's driver."""

import os
import shutil
import subprocess
import sys

import pytest

DRIVER = """
#include <stdio.h>
int cuInit(unsigned flags) { puts("init"); return %d; }
int cuDevicePrimaryCtxRetain(void **context, int gpu) { printf("open %%d", gpu); fflush(stdout); return 0; }
"""
WAKE = "from oelm.system.startup import *; wake_gpu(); [t.join() for t in threading.enumerate()[1:]]"


@pytest.mark.parametrize(
    ("answer", "rank", "calls"), [(0, {}, "init\nopen 0"), (100, {}, "init\n"), (0, {"LOCAL_RANK": "1"}, "")]
)
def test_the_first_gpu_is_opened_by_a_process_that_is_alone(tmp_path, answer, rank, calls):
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    (tmp_path / "driver.c").write_text(DRIVER % answer)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True
    )
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), **rank}
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'oelm'; {WAKE}"]  # without torch
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == calls
    if not shutil.which("nvidia-smi"):  # no driver: nothing happens
        del env["LD_LIBRARY_PATH"]
        assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == ""


COLLECTION = """
import gc, sys
sys.argv[0] = "oelm"
from oelm.system.startup import without_collection

with without_collection():
    off = not gc.isenabled()
    import torch
print(off, gc.isenabled(), gc.get_freeze_count() > 100_000)
gc.unfreeze()
with without_collection():  # torch is there already
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count())
"""


def test_a_process_imports_torch_without_garbage_collection_and_collects_afterwards():
    done = subprocess.run([sys.executable, "-c", COLLECTION], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "True", "True", "0"]
