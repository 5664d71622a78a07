"""The fast path is watched: at the first step and now and then the plain path computes the same batch, and
loss and gradient norm of the two are compared.

The plain path is PyTorch's own operations on padded texts, without our kernels, CUDA graphs or copies of
weights. In half precision a few batches have gradients that rounding alone changes by half: where the two
paths differ by more than the tolerance, float32 decides which of them errs.
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

# Steps. To compare takes as long as some forty fast ones: under a hundredth of all. At the first step nothing
# is recorded yet as a CUDA graph, some hundred steps later every shape is.
EARLY, EVERY = (200, 1_000), 5_000
PART_TOKENS = 8_192  # of a batch, for the plain path at a time: it needs more memory
# The largest relative deviation of loss and gradient norm at which float32 is not asked.
TOLERANCE = {"fp32": {"loss": 1e-4, "grad_norm": 1e-3}, "bf16": {"loss": 0.01, "grad_norm": 0.05}}
MAX_ERROR_RATIO = 4  # allowed error of the fast path over the plain path's, both against float32


def due(watch: Watch, step: int) -> bool:
    return watch.again or step in EARLY or (step > 0 and step % EVERY == 0)


def has_dropout(model: nn.Module) -> bool:
    """With dropout the two paths draw different numbers: then both are computed anew without it."""
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    config = getattr(model, "config", None)
    values = config.to_dict() if config is not None else {}
    rates += [v for key, v in values.items() if "drop" in key and isinstance(v, float)]
    return any(rate > 0 for rate in rates)


@dataclass(frozen=True)
class Yardstick:
    """What a step's loss and gradient norm should be: by the plain path, and by it in float32."""

    plain: dict[str, float]
    exact: dict[str, float]


def yardstick(step: "FastStep", batches: Epoch, k: int) -> Yardstick:
    """Of batch k, with the weights as they are."""
    plain = measure(step, batches, k)
    exact = plain if step.precision == "fp32" else measure(step, batches, k, precise=True)
    return Yardstick(plain, exact)


def compare(watch: Watch, fast: dict[str, float], right: Yardstick, precision: str, step: int) -> None:
    """Note the relative deviations of the fast path's numbers from the plain path's. Raises RunError where
    they are beyond the tolerance and float32 says that the fast path is to blame. What is not finite in the
    plain path, too, is for the run itself to notice."""
    for name, allowed in TOLERANCE[precision].items():
        deviation = _deviation(fast[name], right.plain[name])
        if deviation > allowed and math.isfinite(right.plain[name]) and math.isfinite(fast[name]):
            usual = max(_deviation(right.plain[name], right.exact[name]), allowed)
            if _deviation(fast[name], right.exact[name]) > MAX_ERROR_RATIO * usual:
                seen = {"fast": fast[name], "plain": right.plain[name], "exact": right.exact[name]}
                reason = notice("run.fast_path_wrong", step=step, what=name, **seen)
                raise RunError(reason, advice=notice("advice.plain_path"))
        if math.isfinite(deviation):
            watch.largest[name] = max(watch.largest.get(name, 0.0), deviation)
    watch.checks, watch.again = watch.checks + 1, False


def _deviation(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-12)


def measure(
    step: "FastStep", batches: Epoch, k: int, plain: bool = True, precise: bool = False
) -> dict[str, float]:
    """Loss and gradient norm of batch k with the weights as they are, without dropout. Nothing is changed.
    `plain`: by the plain path; `precise`: in float32, whatever the precision of the run."""
    objective, model, device = step.objective, step.raw, step.state.device
    layout = Layout(segments=step.layout.segments) if plain else replace(step.layout, round_widths=False)
    items = batches.batch(k)
    count, longest = objective.count("train", items), float(step.resolved.plan.lengths.max())
    parts = min(len(items), max(1, math.ceil(len(items) * longest / PART_TOKENS)))
    weights = [p for p in model.parameters() if p.requires_grad]
    sums: list[Tensor | None] = [None] * len(weights)
    loss, training = 0.0, model.training
    try:
        model.eval()  # no dropout, and an embedding that trains in windows is whole
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
