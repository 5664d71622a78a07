"""Value-only attention: what it computes, and that every way of computing it agrees."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import softmax
from torch import Tensor

from oelm.errors import UserError
from oelm.speed import value_only
from oelm.speed.value_only import value_only_attention, value_only_attention_varlen

LENGTHS = [7, 1, 0, 33, 12, 0, 0]  # texts of length zero in the middle and at the end
ROWS = sum(LENGTHS) + 5  # and rows of no text


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
    out = value_only.reference(q, k, v, causal=causal, scale=0.7)
    out.backward(grad)
    scores = 0.7 * np.einsum("bhqd,bhkd->bhqk", q.detach().numpy(), k.detach().numpy())
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
    out = value_only_attention(q, k, v, causal=causal, implementation="torch")
    out.sin().sum().backward()
    exact = v.detach().double().requires_grad_()
    expected = value_only.reference(q.double(), k.double(), exact, causal=causal)
    expected.sin().sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(v.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    assert q.grad is None and k.grad is None


@pytest.mark.parametrize("causal", [False, True])
def test_packed_texts_do_not_see_each_other_and_other_rows_are_zero(causal: bool) -> None:
    q, k, v = drawn(ROWS, 2, 8)
    grad = torch.randn_like(v)
    cu_seqlens = offsets(LENGTHS)
    out = value_only_attention_varlen(q, k, v, cu_seqlens, causal=causal)
    out.backward(grad)
    # The oracle: one attention over everything, with a mask that lets each text see itself.
    text = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = text[:, None] == text[None, :]
    if causal:
        mask = mask.tril()
    whole = [x.detach()[: len(text)].transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask)
    expected.backward(grad[: len(text)].transpose(0, 1)[None])
    torch.testing.assert_close(out[: len(text)], expected[0].transpose(0, 1))
    torch.testing.assert_close(v.grad[: len(text)], whole[2].grad[0].transpose(0, 1))
    assert not out[len(text) :].any() and not v.grad[len(text) :].any()
    assert q.grad is None and k.grad is None
    definition = value_only.reference_varlen(q, k, v, cu_seqlens, causal=causal)
    torch.testing.assert_close(out, definition)


def test_frozen_values_leave_nothing_to_do() -> None:
    q, k, v = drawn(1, 1, 4, 4)
    assert not value_only_attention(q, k, v.detach(), causal=False).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_hundreds_are_no_trouble(dtype: torch.dtype) -> None:
    q, k, v = drawn(1, 2, 30, 16, dtype=dtype)
    out = value_only_attention(q * 15, k * 15, v, causal=True)  # scores of up to about 2,000
    out.sum().backward()
    assert out.isfinite().all() and v.grad.isfinite().all()


def test_without_triton_or_a_gpu_the_portable_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(1, 1, 4, 4, dtype=torch.float32)
    with pytest.raises(UserError, match="needs a GPU"):
        value_only_attention(q, k, v, causal=False, implementation="triton")
    monkeypatch.setattr(value_only, "value_only_triton", None)
    assert value_only_attention(q, k, v, causal=False).isfinite().all()
    with pytest.raises(UserError, match="not installed"):
        value_only_attention(q, k, v, causal=False, implementation="triton")


def test_inputs_that_do_not_fit_are_refused() -> None:
    q, k, v = drawn(1, 2, 4, 8)
    cu_seqlens = offsets([4])
    with pytest.raises(UserError, match="one shape"):
        value_only_attention(q, k[:, :, :3], v, causal=False)
    with pytest.raises(UserError, match="one dtype"):
        value_only_attention(q, k, v.float(), causal=False)
    with pytest.raises(UserError, match=r"\(B, H, T, D\)"):
        value_only_attention(q[0], k[0], v[0], causal=False)
    with pytest.raises(UserError, match="positive"):
        value_only_attention(q, k, v, causal=False, scale=0.0)
    with pytest.raises(UserError, match="implementation"):
        value_only_attention(q, k, v, causal=False, implementation="cuda")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"\(N, H, D\)"):
        value_only_attention_varlen(q, k, v, cu_seqlens, causal=False)
    with pytest.raises(UserError, match="int32"):
        value_only_attention_varlen(q[0], k[0], v[0], cu_seqlens.long(), causal=False)
