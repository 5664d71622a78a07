"""Checks of the fast path: at the first step and now and then the plain path computes the same batch, and the
loss and gradient norm of both are compared.

The plain path is PyTorch's own operations on padded texts, without our kernels, CUDA graphs or copies of
weights. In half precision, rounding alone can change the gradients of a few batches by half. So if the two
paths differ by more than the tolerance, float32 decides which of them is wrong.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from oelm.data import Epoch
from oelm.data.assemble import Layout
from oelm.errors import RunError
from oelm.system.messages import notice
from oelm.training.step import Watch

if TYPE_CHECKING:
    from oelm.speed.step import FastStep

# Steps at which the paths are compared. A comparison takes as long as some forty fast steps, under 1 % in
# all. At the first step no CUDA graph is recorded yet; some hundred steps later every shape is.
EARLY, EVERY = (200, 1_000), 5_000
PART_TOKENS = 8_192  # tokens of a batch that the plain path computes at a time, as it needs more memory
# The largest relative deviations of loss and gradient norm that are accepted without float32.
TOLERANCE = {"fp32": {"loss": 1e-4, "grad_norm": 1e-3}, "bf16": {"loss": 0.01, "grad_norm": 0.05}}
MAX_ERROR_RATIO = 4  # allowed error of the fast path over the plain path's, both against float32


def due(watch: Watch, step: int) -> bool:
    return watch.again or step in EARLY or (step > 0 and step % EVERY == 0)


def has_dropout(model: nn.Module) -> bool:
    """Whether the model uses dropout. The paths draw different numbers, so both are then compared without
    it."""
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    config = getattr(model, "config", None)
    values = config.to_dict() if config is not None else {}
    rates += [v for key, v in values.items() if "drop" in key and isinstance(v, float)]
    return any(rate > 0 for rate in rates)


@dataclass(frozen=True)
class Expected:
    """A step's expected loss and gradient norm: by the plain path, and by the plain path in float32."""

    plain: dict[str, float]
    exact: dict[str, float]


def measure_expected(step: "FastStep", batches: Epoch, k: int) -> Expected:
    """The expected values of batch k, with the current weights."""
    plain = measure(step, batches, k)
    exact = plain if step.precision == "fp32" else measure(step, batches, k, precise=True)
    return Expected(plain, exact)


def compare(watch: Watch, fast: dict[str, float], expected: Expected, precision: str, step: int) -> None:
    """Record the relative deviations of the fast path's numbers from the plain path's. Raises RunError if
    they are beyond the tolerance and float32 shows that the fast path is wrong. Numbers that are not finite
    are left to the run's own checks."""
    for name, allowed in TOLERANCE[precision].items():
        deviation = _deviation(fast[name], expected.plain[name])
        if deviation > allowed and math.isfinite(expected.plain[name]) and math.isfinite(fast[name]):
            usual = max(_deviation(expected.plain[name], expected.exact[name]), allowed)
            if _deviation(fast[name], expected.exact[name]) > MAX_ERROR_RATIO * usual:
                values = {"fast": fast[name], "plain": expected.plain[name], "exact": expected.exact[name]}
                reason = notice("run.fast_path_wrong", step=step, what=name, **values)
                raise RunError(reason, advice=notice("advice.plain_path"))
        if math.isfinite(deviation):
            watch.largest[name] = max(watch.largest.get(name, 0.0), deviation)
    watch.checks, watch.again = watch.checks + 1, False


def _deviation(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-12)


def measure(
    step: "FastStep", batches: Epoch, k: int, plain: bool = True, precise: bool = False
) -> dict[str, float]:
    """Loss and gradient norm of batch k with the current weights, without dropout; nothing is changed.
    `plain`: by the plain path; `precise`: in float32 instead of the run's precision."""
    objective, model, device = step.objective, step.raw, step.state.device
    layout = Layout(segments=step.layout.segments) if plain else replace(step.layout, round_widths=False)
    items = batches.batch(k)
    count, longest = objective.count("train", items), float(step.resolved.plan.lengths.max())
    parts = min(len(items), max(1, math.ceil(len(items) * longest / PART_TOKENS)))
    weights = [p for p in model.parameters() if p.requires_grad]
    sums: list[Tensor | None] = [None] * len(weights)
    loss, training = 0.0, model.training
    try:
        model.eval()  # no dropout, and row windows are written back
        with step.suspended() if plain else nullcontext():
            for part in range(parts):
                batch = objective.batch("train", batches.share(k, part, parts), layout).to(device)
                with torch.autocast(device.type, enabled=False) if precise else step.autocast():
                    value = objective.loss(model, batch) / count
                grads = torch.autograd.grad(value, weights, allow_unused=True)
                loss += float(value.detach())
                sums = [
                    s if g is None else g if s is None else s + g for s, g in zip(sums, grads, strict=True)
                ]
    finally:
        model.train(training)
    norms = torch.stack([torch.linalg.vector_norm(s.float()) for s in sums if s is not None])
    return {"loss": loss, "grad_norm": float(torch.linalg.vector_norm(norms))}
