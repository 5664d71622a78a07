"""One switch: whether our own kernels may run at all.

The plain path is PyTorch's own operations and nothing else. It is the yardstick for the fast one, and what a
run goes on with where the fast one has failed.
"""

import contextlib
from collections.abc import Iterator

_allowed = True


def kernels_allowed() -> bool:
    return _allowed


@contextlib.contextmanager
def plain_path(plain: bool = True) -> Iterator[None]:
    """While this lasts, no kernel of our own runs; with `plain` False nothing changes."""
    global _allowed
    before, _allowed = _allowed, _allowed and not plain
    try:
        yield
    finally:
        _allowed = before
