"""What is asked for ahead is in memory before it is read: the system itself is asked."""

import ctypes
import mmap
import os
import sys
import time

import numpy as np
import pytest

from oelm.data import read_ahead as module
from oelm.data.read_ahead import read_ahead, read_whole

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")


def resident(array):
    """Which pages of a memory map are in memory."""
    page = mmap.PAGESIZE
    start = array.ctypes.data // page * page
    pages = -(-(array.ctypes.data + array.nbytes - start) // page)
    found = (ctypes.c_ubyte * pages)()
    failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), found)
    assert not failed
    return np.frombuffer(found, np.uint8) & 1 > 0


@pytest.fixture
def cold(tmp_path):
    """A file of a thousand pages, none of them (but for its head) in memory."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.zeros(512 * mmap.PAGESIZE, dtype=np.uint16))
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    array = np.load(path, mmap_mode="r")
    array._mmap.madvise(mmap.MADV_RANDOM)  # nothing is read that nobody asked for
    if resident(array).mean() > 0.1:
        pytest.skip("this file system keeps its files in memory")
    return array


def wait_for(what):
    end = time.monotonic() + 20
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    assert what()


def test_parts_are_read_and_nothing_else(cold):
    tokens = mmap.PAGESIZE // 2  # a page's worth
    starts, ends = np.array([100, 700]) * tokens, np.array([120, 701]) * tokens + 5
    read_ahead(cold, starts, ends)
    wanted = np.zeros(len(resident(cold)), bool)
    wanted[100:121] = wanted[700:702] = True  # the head of the file shifts them by less than a page
    wait_for(lambda: resident(cold)[wanted].all())
    assert resident(cold)[~wanted].mean() < 0.1


def test_all_of_it_is_read_where_memory_has_room(cold, monkeypatch):
    monkeypatch.setattr(module, "SHARE", 1 << 60)
    assert not read_whole(cold)
    monkeypatch.undo()
    assert read_whole(cold)
    wait_for(lambda: resident(cold).all())


def test_what_is_in_memory_already_is_left_alone():
    read_ahead(np.arange(10), np.array([0]), np.array([10]))
    assert read_whole(np.arange(10))


def test_nothing_is_nothing_to_ask_for(cold):
    end = np.array([len(cold)])
    read_ahead(cold, end, end)
    read_ahead(cold, np.zeros(0, int), np.zeros(0, int))
