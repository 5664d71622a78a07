"""Attention with dropout and windows, in Triton's interpreter or on a GPU. Run by test_interpreted.py."""

import itertools
from collections.abc import Callable

import pytest
import torch
from interpreter import error, honest_interpreter, tiles  # noqa: F401  fixtures
from torch import Tensor

from oelm.speed.kernels.attention_triton import INTERPRETED
from oelm.speed.kernels.heads_triton import forward

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LENGTHS = [1, 37, 0, 50, 5, 32, 0]
ROWS, HEADS, DIM = sum(LENGTHS), 2, 64
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(DEVICE)
SCALE = DIM**-0.5


def drawn(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> list[Tensor]:
    """q, k and v, (1, H, T, D)."""
    return [torch.randn(1, rows, HEADS, DIM).to(DEVICE, dtype).transpose(1, 2) for _ in range(3)]


def texts() -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise(BOUNDS.tolist()) if b > a]


def seeded(number: int) -> Tensor:
    return torch.tensor([number], device=DEVICE)


def kept(seed: int, chance: float) -> list[Tensor]:
    """What dropout leaves of every weight of each text, (H, L, L): 0 or 1 / (1 - chance). With equal scores
    and the rows of an identity as values, an output is the row of weights itself."""
    q = k = torch.zeros(1, HEADS, ROWS, DIM, device=DEVICE)
    v = torch.zeros(1, HEADS, ROWS, DIM, device=DEVICE)
    for part in texts():
        length = part.stop - part.start
        v[0, :, part, :length] = torch.eye(length, device=DEVICE)
    out = forward(q, k, v, BOUNDS, seeded(seed), False, SCALE, chance, 0)[0]
    return [out[0, :, p, : p.stop - p.start] * (p.stop - p.start) for p in texts()]


def plain(masks: list[Tensor], window: int = 0, causal: bool = False) -> Callable[..., Tensor]:
    """Attention text by text, its weights multiplied by the masks."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(v)
        for part, mask in zip(texts(), masks, strict=True):
            scores = q[0, :, part] @ k[0, :, part].transpose(1, 2) * SCALE
            places = torch.arange(scores.shape[-1], device=DEVICE)
            far = (places[:, None] - places).abs() > window if window else torch.zeros_like(scores) > 0
            hidden = far | (places > places[:, None]) if causal else far
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1) * mask
            out[0, :, part] = weights @ v[0, :, part]
        return out

    return call


def trained(call: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def errors(ours: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor]) -> list[float]:
    grad = torch.randn(1, HEADS, ROWS, DIM).to(DEVICE)
    found = trained(ours, inputs, grad.to(inputs[0].dtype))
    exact = trained(twin, [x.double() for x in inputs], grad.double())
    return [error(a, b) for a, b in zip(found, exact, strict=True)]


ONES = [torch.ones(HEADS, length, length, device=DEVICE) for length in LENGTHS if length]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("causal", [False, True])
def test_dropped_weights_have_the_right_gradients(causal: bool) -> None:
    masks = [mask.double() for mask in kept(7, 0.3)]
    ours = lambda q, k, v: forward(q, k, v, BOUNDS, seeded(7), causal, SCALE, 0.3, 0)[0]  # noqa: E731
    assert max(errors(ours, plain(masks, causal=causal), drawn())) < 1e-5


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("window", [1, 7, 16, 40, 500])
@pytest.mark.parametrize("gain", [1.0, 300.0])
def test_windows(window: int, gain: float) -> None:
    ours = lambda q, k, v: forward(q, k, v, BOUNDS, None, False, SCALE, 0.0, window)[0]  # noqa: E731
    q, k, v = drawn()
    assert max(errors(ours, plain(ONES, window), [q * gain, k, v])) < 1e-4 * gain**0.5


def test_a_window_and_dropout_together() -> None:
    masks = [mask.double() for mask in kept(3, 0.2)]
    ours = lambda q, k, v: forward(q, k, v, BOUNDS, seeded(3), False, SCALE, 0.2, 9)[0]  # noqa: E731
    assert max(errors(ours, plain(masks, 9), drawn())) < 1e-5


def test_without_either_it_is_attention_also_of_parts_that_lie_otherwise() -> None:
    ours = lambda q, k, v: forward(q, k, v, BOUNDS, None, False, SCALE, 0.0, 0)[0]  # noqa: E731
    q, k, v = drawn()
    assert max(errors(ours, plain(ONES), [q, k.contiguous(), v])) < 1e-5


def test_half_precision() -> None:
    masks = [mask.double() for mask in kept(7, 0.1)]
    ours = lambda q, k, v: forward(q, k, v, BOUNDS, seeded(7), False, SCALE, 0.1, 0)[0]  # noqa: E731
    assert max(errors(ours, plain(masks), drawn(torch.bfloat16))) < 0.01


def test_what_is_dropped_is_as_much_as_asked_and_different_everywhere() -> None:
    first = torch.cat([mask.flatten() for mask in kept(11, 0.25)])
    again = torch.cat([mask.flatten() for mask in kept(11, 0.25)])
    other = torch.cat([mask.flatten() for mask in kept(12, 0.25)])
    assert first.equal(again)
    assert first.max().item() == pytest.approx(1 / 0.75)
    share = (first == 0).double().mean().item()
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / len(first)) ** 0.5
    for one, two in ((first, other), tuple(kept(11, 0.25)[2].flatten(1))):  # other seeds; other heads
        both = ((one == 0) & (two == 0)).double().mean().item()
        assert abs(both - 0.0625) < 0.03
    long = kept(11, 0.25)[2][0]
    assert not (long[0] == long[1]).all() and not (long[:, 0] == long[:, 1]).all()


def test_registered_as_torch_wants_it() -> None:
    q, k, v = (x.requires_grad_() for x in drawn())
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(forward, (q, k, v, BOUNDS, seeded(1), False, SCALE, 0.1, 0), test_utils=checks)


def test_the_trial_of_the_kernel_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from oelm.speed import trial

    assert trial.why_no_heads(DEVICE) is None
    trial.why_no_heads.cache_clear()

    def broken(*_: object) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(trial.heads_triton, "forward", broken)
    assert trial.why_no_heads(DEVICE) == (
        "our kernel for packed attention does not run here: no such instruction"
    )
    trial.why_no_heads.cache_clear()
