"""The fast path is watched: at the first step and now and then the plain path computes the same batch, and
loss and gradient norm of the two are compared.

The plain path is PyTorch's own operations on padded texts, without our kernels, CUDA graphs or copies of
weights. In half precision a few batches have gradients that rounding alone changes by half: where the two
paths differ by more than the tolerance, float32 decides which of them errs.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oelm.data import Epoch
from oelm.errors import RunError
from oelm.speed.plain import plain_path
from oelm.system.messages import notice

# Steps. To compare takes as long as some forty fast ones: under a hundredth of all. At the first step nothing
# is recorded yet as a CUDA graph, some hundred steps later every shape is.
EARLY, EVERY = (200, 1_000), 5_000
PART_TOKENS = 8_192  # of a batch, for the plain path at a time: it needs more memory
# The largest relative deviation of loss and gradient norm at which float32 is not asked.
TOLERANCE = {"fp32": {"loss": 1e-4, "grad_norm": 1e-3}, "bf16": {"loss": 0.01, "grad_norm": 0.05}}
TIMES_WORSE = 4  # than the plain path, as far as float32 can tell, the fast one may be


@dataclass
class Watch:
    """What was compared so far: a part of the record."""

    checks: int = 0
    skipped: int = 0  # because the plain path needs more memory than there is
    largest: dict[str, float] = field(default_factory=dict)  # relative deviations of loss and grad_norm
    again: bool = True  # at the next step: the first one, or the run goes on with other hardware or software

    def due(self, step: int) -> bool:
        return self.again or step in EARLY or (step > 0 and step % EVERY == 0)

    def skip(self) -> None:
        self.skipped, self.again = self.skipped + 1, False

    def add(self, deviation: dict[str, float]) -> None:
        self.checks, self.again = self.checks + 1, False
        for name, value in deviation.items():
            if math.isfinite(value):
                self.largest[name] = max(self.largest.get(name, 0.0), value)


def why_unwatched(stepper: Any) -> str | None:
    """Why the fast path of a run is not compared; None where it is."""
    if stepper.plain:
        return "the run takes the plain path"
    if stepper.state.num_processes > 1:
        return "several processes"
    return None if stepper.precision in TOLERANCE else f"{stepper.precision} has no tolerance"


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


def yardstick(stepper: Any, batches: Epoch, k: int) -> Yardstick:
    """Of batch k, with the weights as they are."""
    plain = numbers(stepper, batches, k)
    exact = plain if stepper.precision == "fp32" else numbers(stepper, batches, k, precise=True)
    return Yardstick(plain, exact)


def compare(fast: dict[str, float], right: Yardstick, precision: str, step: int) -> dict[str, float]:
    """The relative deviations of the fast path's numbers from the plain path's.

    Raises RunError where they are beyond the tolerance and float32 says that the fast path is to blame. What
    is not finite in the plain path, too, is for the run itself to notice.
    """
    deviation = {name: _apart(fast[name], right.plain[name]) for name in right.plain}
    for name, allowed in TOLERANCE[precision].items():
        if (
            deviation[name] <= allowed
            or not math.isfinite(right.plain[name])
            or not math.isfinite(fast[name])
        ):
            continue
        usual = max(_apart(right.plain[name], right.exact[name]), allowed)
        if _apart(fast[name], right.exact[name]) > TIMES_WORSE * usual:
            seen = {"fast": fast[name], "plain": right.plain[name], "exact": right.exact[name]}
            reason = notice("run.fast_path_wrong", step=step, what=name, **seen)
            raise RunError(reason, advice=notice("advice.plain_path"))
    return deviation


def _apart(a: float, b: float) -> float:
    """The relative deviation of a from b."""
    return abs(a - b) / max(abs(b), 1e-12)


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def numbers(
    stepper: Any, batches: Epoch, k: int, plain: bool = True, precise: bool = False
) -> dict[str, float]:
    """Loss and gradient norm of batch k with the weights as they are, without dropout. Nothing is changed.

    `precise`: in float32, whatever the precision of the run.
    """
    objective, model, device = stepper.objective, stepper.raw, stepper.state.device
    items = batches.batch(k)
    count, size = objective.count("train", items), float(objective.plan("train", 1, None, None).lengths.max())
    parts = min(len(items), max(1, math.ceil(len(items) * size / PART_TOKENS)))
    weights = [p for p in model.parameters() if p.requires_grad]
    sums: list[Tensor | None] = [None] * len(weights)
    loss = 0.0
    before = objective.packed, objective.static, model.training
    try:
        model.eval()  # no dropout, and an embedding that trains in windows is whole
        objective.static = False
        objective.packed = objective.packed and not plain
        with plain_path(plain), torch.compiler.set_stance("force_eager"):
            for part in range(parts):
                batch = objective.batch("train", batches.share(k, part, parts)).to(device)
                with torch.autocast(device.type, enabled=False) if precise else stepper.autocast():
                    value = objective.loss(model, batch) / count
                grads = torch.autograd.grad(value, weights, allow_unused=True)
                loss += float(value.detach())
                sums = [
                    s if g is None else g if s is None else s + g for s, g in zip(sums, grads, strict=True)
                ]
    finally:
        objective.packed, objective.static = before[:2]
        model.train(before[2])
    norms = torch.stack([torch.linalg.vector_norm(s.float()) for s in sums if s is not None])
    return {"loss": loss, "grad_norm": float(torch.linalg.vector_norm(norms))}
