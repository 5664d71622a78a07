"""Hadamard matrices: square, entries +-1, orthogonal columns. They exist only for some sizes."""

from functools import cache

import numpy as np

from oelm.errors import UserError


def hadamard_matrix(n: int) -> np.ndarray:
    """A Hadamard matrix of order n, from Sylvester's and Paley's constructions and their products.

    These reach 1, 2 and most multiples of 4, among them every usual d_model (384 = 12 x 32,
    768 = 12 x 64, 1600 = 20 x 80). Other orders are refused.
    """
    matrix = _construct(n)
    if matrix is None:
        why = "none exists" if n > 2 and n % 4 else "no construction known here reaches it"
        raise UserError(
            f"no Hadamard matrix of order {n}: {why}; 1, 12, 20 and 28 times any power of two work"
        )
    return matrix


@cache
def _construct(n: int) -> np.ndarray | None:
    if n == 1:
        return np.ones((1, 1))
    if n == 2:
        return np.array([[1.0, 1.0], [1.0, -1.0]])
    if n < 1 or n % 4:
        return None
    for a in (2, *range(4, int(n**0.5) + 1, 4)):  # Kronecker products of smaller ones
        if n % a == 0 and (left := _construct(a)) is not None and (right := _construct(n // a)) is not None:
            return np.kron(left, right)
    if _is_prime(n - 1):
        return _paley_one(n - 1)
    if _is_prime(n // 2 - 1) and (n // 2 - 1) % 4 == 1:
        return _paley_two(n // 2 - 1)
    return None


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % p for p in range(2, int(q**0.5) + 1))


def _jacobsthal(q: int) -> np.ndarray:
    """Q[i, j] = +1 where j - i is a non-zero square modulo the prime q, -1 where it is not, 0 for i = j."""
    character = -np.ones(q)
    character[np.unique(np.arange(1, q) ** 2 % q)] = 1
    character[0] = 0
    index = np.arange(q)
    return character[(index[None, :] - index[:, None]) % q]


def _paley_one(q: int) -> np.ndarray:
    """Order q + 1 for a prime q = 3 mod 4: I + S with S skew-symmetric."""
    s = np.zeros((q + 1, q + 1))
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, -1, _jacobsthal(q)
    return s + np.eye(q + 1)


def _paley_two(q: int) -> np.ndarray:
    """Order 2 (q + 1) for a prime q = 1 mod 4: a symmetric conference matrix, its entries 2 x 2."""
    c = np.zeros((q + 1, q + 1))
    c[0, 1:], c[1:, 0], c[1:, 1:] = 1, 1, _jacobsthal(q)
    return np.kron(c, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1), [[1, -1], [-1, -1]])
