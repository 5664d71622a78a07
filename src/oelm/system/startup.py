"""What lets a process of ours start sooner: the GPU's driver set up beside the imports, and these without
garbage collection."""

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator


def wake_gpu() -> None:
    """Start to open the first GPU that this process may use; return at once. torch then finds it open. Where
    there is no driver nothing happens. One of several processes has a GPU that only its launcher knows."""
    if "LOCAL_RANK" not in os.environ:
        threading.Thread(target=_open, daemon=True).start()


def _open() -> None:
    with contextlib.suppress(OSError, AttributeError):
        driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Import torch and transformers without garbage collection: it would go through all that they make, again
    and again, for a fifth of the time, and find next to nothing. Afterwards it passes over what is there by
    then; so a process that has torch already, and with it objects of its user, is left alone."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
