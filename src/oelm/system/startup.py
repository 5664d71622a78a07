"""What lets a process of ours start sooner: imports without garbage collection."""

import contextlib
import gc
import sys
from collections.abc import Iterator


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
