"""The kernel for cross-entropy on a CPU. Run with TRITON_INTERPRET=1 by test_interpreted.py."""

import pytest
import torch
import torch.nn.functional as F
from interpreter import error, honest_interpreter  # noqa: F401  a fixture

from oelm.models import lm_loss as module
from oelm.models.lm_loss import FP16_GAIN, lm_loss, lm_losses
from oelm.speed.kernels.cross_entropy_triton import cross_entropy_
from oelm.speed.operations import cross_entropy_for

# Numpy warns where the first attempt at a normaliser is infinite, and where logits are.
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
VOCAB, WIDTH = 150, 192  # three blocks, the last of which is padding for the most part


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel_for", cross_entropy_for)


def made(dtype: torch.dtype, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.randint(0, VOCAB, (9,))
    targets[::4] = -100
    return (scale * torch.randn(9, WIDTH)).to(dtype), targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [0.01, 3.0, 100.0])
@pytest.mark.parametrize(
    ("dtype", "gain"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, FP16_GAIN)]
)
def test_losses_and_gradient(dtype: torch.dtype, gain: float, scale: float, smoothing: float) -> None:
    logits, targets = made(dtype, scale)
    exact = logits[:, :VOCAB].double().requires_grad_()
    losses = F.cross_entropy(exact, targets, label_smoothing=smoothing, reduction="none")
    losses.sum().backward()
    found = cross_entropy_(logits.clone(), targets, VOCAB, smoothing, gain, -100, False)
    assert error(found, losses.detach()) < 1e-6
    assert torch.equal(cross_entropy_(logits, targets, VOCAB, smoothing, gain, -100, True), found)
    assert not logits[:, VOCAB:].any() and not logits[::4].any()  # padding, and what does not count
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert error(logits[:, :VOCAB] / gain, exact.grad) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_far_above_the_first_block(dtype: torch.dtype) -> None:
    """So far above that exponentials relative to the first block are infinite, or their inverse is
    next to nothing; or there is nothing in the first block at all."""
    for word, value, first in ((100, 200.0, 0.0), (VOCAB - 1, 96.0, 0.0), (100, 1.0, float("-inf"))):
        logits, targets = made(dtype)
        targets = targets.where(targets < 0, targets.clamp(min=64))
        logits[:, :64] += first
        logits[:, word] = value
        exact = logits[:, :VOCAB].double().requires_grad_()
        losses = F.cross_entropy(exact, targets, reduction="none")
        losses.sum().backward()
        assert error(cross_entropy_(logits, targets, VOCAB, 0.0, 1.0, -100, True), losses.detach()) < 1e-6
        assert error(logits[:, :VOCAB], exact.grad) < torch.finfo(dtype).eps


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("word", [3, 100])
def test_what_is_no_number_stays_none(value: float, word: int) -> None:
    logits, _ = made(torch.float32)
    logits[1, word] = value
    losses = cross_entropy_(logits, torch.full((9,), 5), VOCAB, 0.0, 1.0, -100, True)
    assert losses.isnan().tolist() == [row == 1 for row in range(9)]


def test_a_target_that_is_almost_certain_keeps_its_gradient() -> None:
    logits = torch.zeros(1, WIDTH)
    logits[0, 5] = 10.0
    exact = (logits[:, :VOCAB].double().softmax(1)[0, 5] - 1).item()  # about -0.007
    cross_entropy_(logits, torch.tensor([5]), VOCAB, 0.0, 1.0, -100, True)
    assert logits[0, 5].item() == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("target", [VOCAB, WIDTH, -1])
def test_a_word_that_does_not_exist_has_no_loss(target: int) -> None:
    logits, _ = made(torch.float32)
    assert cross_entropy_(logits[:1], torch.tensor([target]), VOCAB, 0.0, 1.0, -100, True).isnan().all()


def test_the_loss_in_chunks_is_the_same_with_it() -> None:
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(97, 16, requires_grad=True)
    targets = torch.randint(0, 97, (50,))
    targets[::7] = -100
    loss = lm_loss(hidden, weight, targets, chunk=16, label_smoothing=0.1)
    found = torch.autograd.grad(loss, (hidden, weight))
    full = F.cross_entropy(hidden @ weight.T, targets, label_smoothing=0.1, reduction="sum")
    expected = torch.autograd.grad(full, (hidden, weight))
    torch.testing.assert_close(loss, full)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    rows = lm_losses(hidden, weight, targets, chunk=16, label_smoothing=0.1)
    torch.testing.assert_close(rows.sum(), full.detach())


def test_targets_of_any_stride_and_rows_that_hold_no_numbers() -> None:
    hidden, weight = torch.randn(50, 16), torch.randn(97, 16, requires_grad=True)
    targets = torch.randint(0, 97, (50, 3))
    targets[::7] = -100
    hidden[::7] = float("nan")
    hidden.requires_grad_()
    loss = lm_loss(hidden, weight, targets[:, 1], chunk=16)
    expected = lm_loss(hidden, weight, targets[:, 1].clone(), chunk=16)
    assert torch.equal(loss, expected) and loss.isfinite()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (hidden, weight)))
    rows = lm_losses(hidden, weight, targets[:, 1], chunk=16)
    assert torch.equal(rows, lm_losses(hidden, weight, targets[:, 1].clone(), chunk=16))


def test_registered_as_torch_wants_it() -> None:
    logits, targets = made(torch.float32)
    torch.library.opcheck(cross_entropy_, (logits, targets, VOCAB, 0.1, 1.0, -100, True))
