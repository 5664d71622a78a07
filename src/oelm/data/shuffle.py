"""Seeded order by hashing: the same on every machine and with every version of numpy.

numpy does not promise that a generator's stream stays the same in later versions. A hash of (seed, item)
does, so that a resumed run, a fixed split and a nested subset never change.
"""

import hashlib

import numpy as np

Array = np.ndarray


def _mix(x: Array) -> Array:
    """splitmix64's finaliser: a bijection of 64-bit words; every input bit reaches all of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffle_keys(values: Array, *seeds: int) -> Array:
    """A pseudo-random 64-bit key for each value; sorting by it shuffles."""
    keys = np.asarray(values).astype(np.uint64)
    for seed in seeds:
        salt = np.array([seed & (2**64 - 1)], dtype=np.uint64)
        keys = _mix(keys + _mix(salt + np.uint64(0x9E3779B97F4A7C15)))
    return keys


def permutation(n: int, *seeds: int) -> Array:
    """The numbers 0..n-1 in an order that depends only on n and the seeds."""
    return np.argsort(shuffle_keys(np.arange(n, dtype=np.uint64), *seeds), kind="stable")


def text_key(*texts: str) -> int:
    """A 64-bit hash of a text or pair."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass"))
        digest.update(b"\xff")  # never part of UTF-8, so ("ab", "c") differs from ("a", "bc")
    return int.from_bytes(digest.digest(), "little")
