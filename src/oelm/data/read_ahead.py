"""Memory-mapped tokens, asked for before they are read: the disk works while the model does.

A page of a mapped file is read when it is first touched, and whoever touches it waits. The system takes
hints, though, and reads what they name in the background.
"""

import mmap

import numpy as np

Array = np.ndarray
SHARE = 3  # a file is read as a whole where memory has room for it so many times


def read_whole(array: Array) -> bool:
    """Have all of a memory map read in the background; False where there is too little memory for that."""
    import psutil

    if array.nbytes * SHARE > psutil.virtual_memory().available:
        return False
    read_ahead(array, np.array([0]), np.array([len(array)]))
    return True


def read_ahead(array: Array, starts: Array, ends: Array) -> None:
    """Have array[start:end] of every pair read in the background, where `array` is a memory map of a file."""
    mapped = array.base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):  # some systems take no hints
        return
    assert isinstance(array, np.memmap)
    before = array.offset % mmap.ALLOCATIONGRANULARITY  # numpy maps from a whole page on
    first = (before + starts * array.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    size = before + ends * array.itemsize - first
    some = ends > starts
    for start, length in zip(first[some].tolist(), size[some].tolist(), strict=True):
        mapped.madvise(mmap.MADV_WILLNEED, start, length)
