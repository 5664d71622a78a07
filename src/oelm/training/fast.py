"""The fast paths: no padding, blocks compiled, and a step as one CUDA graph. They compute the same sums.

A small step on a large GPU is a queue of short kernels, and starting each takes longer than running it. A
CUDA graph starts them all at once. It wants the same tensors at the same addresses every time, so batches
are filled up to a few shapes (`data.assemble.filled`), and each shape has a graph that is recorded once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.gpt import OelmGPTPreTrainedModel
from oelm.training.objective import Batch, Classification, Objective

MOST_GRAPHS = 48  # shapes; a run with more of them goes on without graphs
# Tokens. In one exploration on an H200 compiling took some 15 s and saved some 0.2 us a token.
COMPILE_FROM = 100_000_000


@dataclass(frozen=True)
class Paths:
    """Which fast paths a run takes; where it does not, why."""

    padded: str | None
    eager: str | None
    compiled: bool

    def __str__(self) -> str:
        texts = "texts are packed end to end" if self.padded is None else f"texts are padded ({self.padded})"
        steps = "a step is a CUDA graph" if self.eager is None else f"no CUDA graphs ({self.eager})"
        return f"{texts}; {steps}; blocks are {'compiled' if self.compiled else 'not compiled'}"


def why_padded(config: RunConfig, objective: Objective, model: nn.Module, device: torch.device) -> str | None:
    """Why texts are padded in this run; None where they are packed end to end."""
    if not config.training.fast:
        return "training.fast is off"
    if not isinstance(objective, Classification) or not isinstance(model, OelmGPTPreTrainedModel):
        return "only classifiers of the reference GPT are packed"
    if device.type != "cuda":
        return "without a GPU padding to similar lengths is as fast"
    if model.config.attention_dropout:
        return f"attention dropout {model.config.attention_dropout:g} needs padded attention"
    return None


def why_eager(config: RunConfig, processes: int, device: torch.device, precision: str) -> str | None:
    """Why a step is not a CUDA graph in this run; None where it is."""
    if not config.training.fast:
        return "training.fast is off"
    if device.type != "cuda":
        return "CUDA graphs need a GPU"
    if processes > 1:
        return "several processes exchange gradients"
    if precision == "fp16":
        return "fp16 skips steps"
    if config.training.gradient_checkpointing:
        return "gradient checkpointing draws its random numbers twice"
    return None


def compile_blocks(model: nn.Module, tokens: float, config: RunConfig, device: torch.device) -> bool:
    """Compile every block of a reference GPT in place, where the run's tokens are enough to earn it back."""
    if not config.training.fast or device.type != "cuda" or tokens < COMPILE_FROM:
        return False
    if not isinstance(model, OelmGPTPreTrainedModel):
        return False
    for block in model.base_model.h:  # type: ignore[union-attr]
        block.compile(dynamic=True)
    return True


class GraphedStep:
    """Forward and backward of a batch as one graph per shape, and clipping and the optimizer as another.

    Gradients stay where they are: the step's end sets them to zero instead of giving them back. The first
    time a shape is met it is computed as usual, which also lets kernels tune themselves and the optimizer
    make its state; the second time it is recorded.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        finish: Callable[[], Tensor],
        scale: Tensor,
    ) -> None:
        self.forward, self.finish, self.scale = forward, finish, scale
        self.graphs: dict[Any, tuple[Any, Batch, Tensor]] = {}
        self.met: set[Any] = set()
        self.end: tuple[Any, Tensor] | None = None
        self.ended = False
        self.pool: Any = None

    def backward(self, batch: Batch, scale: float) -> Tensor:
        """The loss of a batch times `scale`, whose gradients are added to those that are there."""
        self.scale.fill_(scale)
        key = shapes_of(batch)
        if key in self.graphs:
            graph, static, loss = self.graphs[key]
            copy_batch(batch, static)
            graph.replay()
            return loss.clone()
        if key not in self.met or len(self.graphs) >= MOST_GRAPHS:
            self.met.add(key)
            return self.compute(batch)
        self.graphs[key] = self._record(batch)
        return self.backward(batch, scale)

    def compute(self, batch: Batch) -> Tensor:
        loss = self.forward(batch)
        (loss * self.scale).backward()
        return (loss * self.scale).detach()

    def step(self) -> Tensor:
        """Clip and update; the gradients' norm."""
        if not self.ended:  # as usual once: the optimizer makes its state
            self.ended = True
            return self.finish()
        if self.end is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                norm = self.finish()
            self.pool = self.pool or graph.pool()
            self.end = graph, norm
        graph, norm = self.end
        graph.replay()
        return norm.clone()

    def _record(self, batch: Batch) -> tuple[Any, Batch, Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = self.compute(batch)
        self.pool = self.pool or graph.pool()
        return graph, batch, loss


def shapes_of(batch: Batch) -> tuple[Any, ...]:
    tensors = {**batch.inputs, **batch.targets}
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())


def copy_batch(batch: Batch, static: Batch) -> None:
    """The batch's numbers into the tensors a graph was recorded with."""
    for mine, theirs in ((batch.inputs, static.inputs), (batch.targets, static.targets)):
        for name, tensor in mine.items():
            theirs[name].copy_(tensor, non_blocking=True)
