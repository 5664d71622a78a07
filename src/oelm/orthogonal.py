"""The idea: every attention head gets its own orthonormal query block and key block.

A *block* is the matrix W of one head, shaped (d_model, head_dim): q = x @ W. Its columns are
orthonormal, W.T @ W = I, so a layer-normed x, whose entries have variance 1, gives q whose entries
have variance 1 too, and attention scores q.k / sqrt(head_dim) of standard deviation 1. Blocks of
different heads are drawn independently: orthogonality is head-wise, not between heads.

Everything here is a pure function of its arguments, computed on the CPU in float64 and cast by the
caller. What is drawn depends only on (seed, name, head, kind), through numpy's Philox: not on a
global generator, the order of calls, the device, or any other layer.

    kind        a block is
    orthogonal  Haar-distributed: uniform among all orthonormal blocks
    global      a slice of one Haar-distributed matrix shared by all heads, as the first reports had it
    hadamard    columns of a randomised Hadamard matrix: orthonormal, every entry +-1/sqrt(d_model)
    gaussian    N(0, 1/d_model): the control, same scale as an orthonormal block, no orthogonality
    normal      N(0, 0.02^2): the usual start, at d_model 512 about half the scale of the others

and, from a weight that is already there, `q_factor` (the Q of each head's own QR) and `polar_factor`
(the orthonormal block nearest to each head's own).
"""

import contextlib
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from oelm.errors import UserError

if TYPE_CHECKING:  # a report names methods and must not wait for torch
    import torch

Array = np.ndarray

NORMAL_STD = 0.02
ORTHONORMAL_KINDS = ("orthogonal", "global", "hadamard")
KINDS = (*ORTHONORMAL_KINDS, "gaussian", "normal")


def generator(seed: int, *key: str | int) -> np.random.Generator:
    """A Philox generator for this key alone. Any change of any part of the key gives another stream."""
    digest = hashlib.sha256(repr((int(seed), *key)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def draw_blocks(kind: str, d_model: int, num_heads: int, head_dim: int, *, seed: int, name: str) -> Array:
    """Fresh blocks of one projection: (num_heads, d_model, head_dim), float64.

    For grouped-query attention call it once per projection with that projection's number of heads.
    """
    check_shape(d_model, num_heads, head_dim)
    if kind == "global":
        if num_heads * head_dim > d_model:
            raise UserError(
                f"'global' needs num_heads * head_dim <= d_model, but {num_heads} * {head_dim} > {d_model}: "
                "only d_model columns can be orthonormal; use 'orthogonal', which works head by head"
            )
        whole = _haar(generator(seed, name, "global"), d_model, num_heads * head_dim)
        return whole.reshape(d_model, num_heads, head_dim).transpose(1, 0, 2)
    draw = {"orthogonal": _haar, "hadamard": _hadamard, "gaussian": _gaussian, "normal": _normal}.get(kind)
    if draw is None:
        raise UserError(f"unknown kind of block {kind!r}; known: {', '.join(KINDS)}")
    return np.stack([draw(generator(seed, name, h, kind), d_model, head_dim) for h in range(num_heads)])


def check_shape(d_model: int, num_heads: int, head_dim: int) -> None:
    """Refuse sizes for which no orthonormal block exists."""
    if min(d_model, num_heads, head_dim) < 1:
        raise UserError(f"sizes must be positive: d_model {d_model}, heads {num_heads}, head_dim {head_dim}")
    if head_dim > d_model:
        raise UserError(
            f"head_dim {head_dim} > d_model {d_model}: "
            "at most d_model columns of length d_model can be orthonormal"
        )


def _haar(rng: np.random.Generator, rows: int, columns: int) -> Array:
    # QR alone is not uniform: LAPACK fixes the signs of R. Forcing R's diagonal positive makes the
    # decomposition unique, and then Q inherits the rotation invariance of the Gaussian.
    return q_factor(rng.standard_normal((rows, columns)))


def _hadamard(rng: np.random.Generator, rows: int, columns: int) -> Array:
    # Random row signs and a random choice of signed columns decorrelate the heads.
    block = hadamard_matrix(rows)[:, rng.permutation(rows)[:columns]]
    return block * rng.choice([-1, 1], (rows, 1)) * rng.choice([-1, 1], (1, columns)) / np.sqrt(rows)


def _gaussian(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return rng.standard_normal((rows, columns)) / np.sqrt(rows)


def _normal(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return rng.standard_normal((rows, columns)) * NORMAL_STD


def q_factor(block: Array) -> Array:
    """The Q of block = QR with R's diagonal positive: same column space, orthonormal, scale lost."""
    q, r = np.linalg.qr(block)
    return q * np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)[..., None, :]


def polar_factor(block: Array) -> Array:
    """The orthonormal block nearest to this one (Frobenius): U V.T of its singular value decomposition."""
    u, _, vt = np.linalg.svd(block, full_matrices=False)
    return u @ vt


# A projection's weight as `nn.Linear` stores it is (num_heads * head_dim, d_model): head h owns the
# rows h * head_dim to (h + 1) * head_dim, which are its block transposed.


def to_weight(blocks: Array) -> Array:
    """(num_heads, d_model, head_dim) blocks -> (num_heads * head_dim, d_model) weight."""
    num_heads, d_model, head_dim = blocks.shape
    return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(num_heads * head_dim, d_model)


def to_blocks(weight: "torch.Tensor | Array", num_heads: int) -> Array:
    """The inverse of `to_weight`, in float64 on the CPU."""
    if not isinstance(weight, np.ndarray):
        weight = weight.detach().cpu()
        # numpy converts on one core, but has no bfloat16.
        weight = np.asarray((weight if weight.dtype.itemsize > 2 else weight.double()).numpy(), np.float64)
    rows, d_model = weight.shape
    if rows % num_heads:
        raise UserError(f"a weight of {rows} rows does not divide into {num_heads} heads")
    return weight.reshape(num_heads, rows // num_heads, d_model).transpose(0, 2, 1)


def one_blas_thread() -> contextlib.AbstractContextManager[Any]:
    """A context in which numpy computes on one core, with the same bits. The blocks are so small that threads
    mostly wait for each other, for seconds if other processes use the cores."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:  # it comes with scikit-learn
        return contextlib.nullcontext()
    return threadpool_limits(limits=1, user_api="blas")


def deviation(weight: "torch.Tensor | Array", num_heads: int, gain: float | Array = 1.0) -> Array:
    """Per head, the largest entry of |W.T W / gain^2 - I|: 0 for a perfectly orthonormal block.

    `gain` is one number, or one for each head.
    """
    blocks = to_blocks(weight, num_heads) / np.reshape(gain, (-1, 1, 1))
    gram = blocks.transpose(0, 2, 1) @ blocks
    return np.abs(gram - np.eye(gram.shape[-1])).max(axis=(1, 2))


def tolerance(dtype: "torch.dtype") -> float:
    """How far from orthonormal rounding to this dtype can put an orthonormal block.

    Rounding moves each entry by at most u = eps/2 of its size, so by Cauchy-Schwarz the Gram matrix
    moves by at most 2u + u^2 in any entry; twice that leaves room for a block rounded twice.
    """
    import torch

    return max(2.0 * torch.finfo(dtype).eps, 1e-6)


# Hadamard matrices: square, entries +-1, orthogonal columns. They exist only for some sizes.


def hadamard_matrix(n: int) -> Array:
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
def _construct(n: int) -> Array | None:
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


def _jacobsthal(q: int) -> Array:
    """Q[i, j] = +1 where j - i is a non-zero square modulo the prime q, -1 where it is not, 0 for i = j."""
    character = -np.ones(q)
    character[np.unique(np.arange(1, q) ** 2 % q)] = 1
    character[0] = 0
    index = np.arange(q)
    return character[(index[None, :] - index[:, None]) % q]


def _paley_one(q: int) -> Array:
    """Order q + 1 for a prime q = 3 mod 4: I + S with S skew-symmetric."""
    s = np.zeros((q + 1, q + 1))
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1, -1, _jacobsthal(q)
    return s + np.eye(q + 1)


def _paley_two(q: int) -> Array:
    """Order 2 (q + 1) for a prime q = 1 mod 4: a symmetric conference matrix, its entries 2 x 2."""
    c = np.zeros((q + 1, q + 1))
    c[0, 1:], c[1:, 0], c[1:, 1:] = 1, 1, _jacobsthal(q)
    return np.kron(c, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1), [[1, -1], [-1, -1]])
