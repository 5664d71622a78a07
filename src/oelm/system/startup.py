"""A faster start of our own processes: imports without garbage collection."""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A context to import torch and transformers in without garbage collection, which takes a fifth of the
    time and frees next to nothing. Afterwards the collector ignores all objects made so far (`gc.freeze`);
    so nothing is changed in a process that has imported torch already, which may have its user's objects."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
