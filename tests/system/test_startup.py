"""Imports are not searched for garbage."""

import subprocess
import sys

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


def test_importing_the_package_is_such_an_import():
    code = "import gc, oelm; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
