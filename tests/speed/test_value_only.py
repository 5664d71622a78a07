"""Value-only attention: what it computes, and that every way of computing it agrees."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import softmax
from torch import Tensor

from oelm.data.assemble import Packing
from oelm.speed import value_only
from oelm.speed.value_only import packed_value_only, value_only_attention

LENGTHS = [7, 1, 0, 33, 12, 0, 0]  # texts of length zero in the middle and at the end


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_is_the_formula_with_constant_probabilities(causal: bool) -> None:
    q, k, v = drawn(2, 3, 11, 8)
    grad = torch.randn_like(v)
    out = value_only.reference(q, k, v, causal=causal)
    out.backward(grad)
    scores = 8**-0.5 * np.einsum("bhqd,bhkd->bhqk", q.detach().numpy(), k.detach().numpy())
    if causal:
        scores[..., np.triu_indices(11, 1)[0], np.triu_indices(11, 1)[1]] = -np.inf
    weights = softmax(scores, axis=-1)
    np.testing.assert_allclose(out.detach(), weights @ v.detach().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(v.grad, weights.swapaxes(-1, -2) @ grad.numpy(), rtol=1e-12, atol=1e-14)
    assert q.grad is None and k.grad is None


@pytest.mark.parametrize("causal", [False, True])
def test_only_the_gradients_of_queries_and_keys_differ_from_attention(causal: bool) -> None:
    q, k, v = drawn(2, 2, 9, 4)
    grad = torch.randn_like(v)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    ours = value_only_attention(q, k, v, causal=causal)
    torch.testing.assert_close(ours, plain)
    (expected,) = torch.autograd.grad(plain, v, grad)
    ours.backward(grad)
    torch.testing.assert_close(v.grad, expected)
    assert q.grad is None and k.grad is None


def test_the_gradient_of_v_passes_gradcheck() -> None:
    q, k, v = drawn(1, 2, 5, 4)
    assert torch.autograd.gradcheck(lambda v: value_only_attention(q, k, v, causal=True), v)


@pytest.mark.parametrize("kept", [0, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_both_portable_ways_agree_with_the_definition(
    causal: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_only, "_KEEP_PROBABILITIES", kept)
    q, k, v = drawn(2, 2, 40, 16, dtype=torch.float32)
    out = value_only_attention(q, k, v, causal=causal)
    out.sin().sum().backward()
    exact = v.detach().double().requires_grad_()
    expected = value_only.reference(q.double(), k.double(), exact, causal=causal)
    expected.sin().sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(v.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    assert q.grad is None and k.grad is None


def test_packed_texts_do_not_see_each_other() -> None:
    q, k, v = drawn(sum(LENGTHS), 2, 8)
    grad = torch.randn_like(v)
    out = packed_value_only(q, k, v, Packing(offsets(LENGTHS), max(LENGTHS)))
    out.backward(grad)
    # The oracle: one attention over everything, with a mask that lets each text see itself.
    text = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    whole = [x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, attn_mask=text[:, None] == text[None, :])
    expected.backward(grad.transpose(0, 1)[None])
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    torch.testing.assert_close(v.grad, whole[2].grad[0].transpose(0, 1))
    assert q.grad is None and k.grad is None


def test_frozen_values_leave_nothing_to_do() -> None:
    q, k, v = drawn(1, 1, 4, 4)
    assert not value_only_attention(q, k, v.detach(), causal=False).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_hundreds_are_no_trouble(dtype: torch.dtype) -> None:
    q, k, v = drawn(1, 2, 30, 16, dtype=dtype)
    out = value_only_attention(q * 15, k * 15, v, causal=True)  # scores of up to about 2,000
    out.sum().backward()
    assert out.isfinite().all() and v.grad.isfinite().all()


def test_without_triton_the_portable_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(1, 1, 4, 4, dtype=torch.float32)
    monkeypatch.setattr(value_only, "attention_triton", None)
    assert value_only_attention(q, k, v, causal=False).isfinite().all()
