"""Have the driver set up the GPU while Python imports torch: neither needs the other for some seconds."""

import contextlib
import ctypes
import os
import threading


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
