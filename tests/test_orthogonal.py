import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from oelm.errors import UserError
from oelm.orthogonal import (
    KINDS,
    ORTHONORMAL_KINDS,
    deviation,
    draw_blocks,
    generator,
    hadamard_matrix,
    polar_factor,
    q_factor,
    to_blocks,
    to_weight,
    tolerance,
)

shapes = st.tuples(st.integers(1, 48), st.integers(1, 6), st.integers(1, 24))


@given(shapes, st.integers(0, 2**40), st.text(max_size=8))
@settings(max_examples=60, deadline=None)
def test_orthogonal_blocks_are_orthonormal_for_any_shape(shape, seed, name):
    d_model, heads, head_dim = shape
    assume(head_dim <= d_model)
    blocks = draw_blocks("orthogonal", d_model, heads, head_dim, seed=seed, name=name)
    assert blocks.shape == (heads, d_model, head_dim)
    assert blocks.dtype == np.float64
    assert deviation(to_weight(blocks), heads).max() < 1e-12


@given(shapes, st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_global_blocks_are_orthonormal_between_heads_too(shape, seed):
    d_model, heads, head_dim = shape
    if heads * head_dim > d_model:
        with pytest.raises(UserError, match="columns"):
            draw_blocks("global", d_model, heads, head_dim, seed=seed, name="w")
        return
    blocks = draw_blocks("global", d_model, heads, head_dim, seed=seed, name="w")
    assert deviation(to_weight(blocks), 1).max() < 1e-12  # all heads as one block


@pytest.mark.parametrize("d_model", [12, 64, 384, 512, 768, 1600])
def test_hadamard_entries_are_exactly_one_over_root_n(d_model):
    blocks = draw_blocks("hadamard", d_model, 3, 8, seed=1, name="w")
    assert np.unique(np.abs(blocks)).tolist() == [1 / np.sqrt(d_model)]
    assert deviation(to_weight(blocks), 3).max() < 1e-12
    assert not np.array_equal(np.abs(blocks[0] + blocks[1]), np.abs(blocks[0] * 2)), "heads are drawn apart"


def test_hadamard_matrices_exist_where_they_should():
    for n in range(1, 129):
        try:
            matrix = hadamard_matrix(n)
        except UserError as error:
            assert f"order {n}" in str(error)
            assert n % 4 or n in (52, 92, 100, 116), "a size two constructions reach"
            continue
        assert np.array_equal(np.abs(matrix), np.ones((n, n)))
        assert np.array_equal(matrix.T @ matrix, n * np.eye(n))


def test_haar_moments():
    """E[W] = 0 and E[W_ij W_kl] = delta/d; QR without the sign correction fails the first."""
    d, n = 6, 4000
    draws = np.stack([draw_blocks("orthogonal", d, 1, d, seed=s, name="w")[0] for s in range(n)])
    assert np.abs(draws.mean(0)).max() < 5 / np.sqrt(n * d)
    second = np.einsum("nij,nkl->ijkl", draws, draws) / n
    expected = np.einsum("ik,jl->ijkl", np.eye(d), np.eye(d)) / d
    assert np.abs(second - expected).max() < 5 * np.sqrt(3) / d / np.sqrt(n)
    # An entry of a uniform orthonormal block: its square is Beta(1/2, (d - 1)/2).
    assert stats.kstest(draws[:, 0, 0] ** 2, stats.beta(0.5, (d - 1) / 2).cdf).pvalue > 1e-3


def test_normal_kinds_have_their_scale():
    for kind, std in (("normal", 0.02), ("gaussian", 256**-0.5)):
        blocks = draw_blocks(kind, 256, 8, 64, seed=0, name="w")
        assert stats.kstest((blocks / std).ravel()[::7], "norm").pvalue > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_values_depend_on_the_key_alone(kind):
    def draw(**changes):
        key = {"seed": 3, "name": "h.0.attn.q_proj.weight"} | changes
        return draw_blocks(kind, 32, 2, 8, **key)

    first = draw()
    np.random.seed(1)  # the global generators must not matter
    torch.manual_seed(1)
    draw(name="another layer")
    assert np.array_equal(first, draw()), "same key, same bits, whatever was drawn in between"
    assert not np.allclose(first, draw(seed=4))
    assert not np.allclose(first, draw(name="h.1.attn.q_proj.weight"))
    assert not np.allclose(first[0], first[1])


def test_a_head_does_not_depend_on_how_many_there_are():
    few, many = (draw_blocks("orthogonal", 32, heads, 8, seed=0, name="w") for heads in (2, 4))
    assert np.array_equal(few, many[:2])


def test_generator_is_pinned():
    """A change of these values changes every result: it must be deliberate."""
    assert generator(0, "w", 1).integers(0, 2**32, 3).tolist() == [1681837755, 928154861, 340865785]


@given(shapes, st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_factors_of_a_weight(shape, seed):
    d_model, heads, head_dim = shape
    assume(head_dim <= d_model)
    weight = np.random.default_rng(seed).standard_normal((heads * head_dim, d_model))
    blocks = to_blocks(weight, heads)
    assert np.array_equal(to_weight(blocks), weight)
    q, polar = q_factor(blocks), polar_factor(blocks)
    for factor in (q, polar):
        assert deviation(to_weight(factor), heads).max() < 1e-10
        # Same column space: projecting the original onto it changes nothing.
        assert np.allclose(factor @ (factor.transpose(0, 2, 1) @ blocks), blocks, atol=1e-8)
    assert (np.diagonal(q.transpose(0, 2, 1) @ blocks, axis1=1, axis2=2) > -1e-9).all(), (
        "R's diagonal is positive"
    )
    # No orthonormal block is nearer than the polar factor.
    assert (
        np.linalg.norm(polar - blocks, axis=(1, 2)) <= np.linalg.norm(q - blocks, axis=(1, 2)) + 1e-9
    ).all()


def test_polar_factor_is_scipys():
    from scipy.linalg import polar

    block = np.random.default_rng(0).standard_normal((12, 5))
    assert np.allclose(polar_factor(block[None])[0], polar(block)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tolerance_fits_the_dtype(dtype):
    for d_model, head_dim in ((4, 4), (64, 64), (512, 64)):
        weight = torch.from_numpy(
            to_weight(draw_blocks("orthogonal", d_model, 4, head_dim, seed=0, name="w"))
        )
        assert deviation(weight.to(dtype), 4).max() <= tolerance(dtype)
        assert deviation(1.02 * weight.to(dtype), 4).max() > tolerance(dtype), "2 % off must be seen"
        assert deviation(3 * weight.to(dtype), 4, gain=3.0).max() <= 2 * tolerance(dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("orthogonal", 8, 2, 16), "head_dim 16 > d_model 8"),
        (("orthogonal", 8, 0, 4), "must be positive"),
        (("orthogonal8", 8, 2, 4), "unknown kind of block 'orthogonal8'; known: orthogonal"),
        (("hadamard", 10, 2, 4), "no Hadamard matrix of order 10: none exists"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(UserError, match=message):
        draw_blocks(*arguments, seed=0, name="w")


def test_a_weight_that_does_not_divide_into_heads_is_refused():
    with pytest.raises(UserError, match="10 rows does not divide into 4 heads"):
        to_blocks(np.zeros((10, 8)), 4)


def test_orthonormal_blocks_give_scores_of_unit_variance():
    """The reason for the scale: layer-normed inputs, scores of standard deviation 1."""
    x = np.random.default_rng(0).standard_normal((400, 512))
    for kind in (*ORTHONORMAL_KINDS, "gaussian"):
        q, k = (x @ draw_blocks(kind, 512, 1, 64, seed=0, name=n)[0] for n in ("q", "k"))
        assert (q @ k.T / 8).std() == pytest.approx(1.0, rel=0.05)
