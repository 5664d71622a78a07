"""A training step as a CUDA graph.

A small step on a large GPU is a queue of short kernels, and starting each takes longer than running it. A
CUDA graph starts them all at once. It wants the same tensors at the same addresses every time, so batches
are filled up to a few shapes (`data.assemble.filled`), and each shape has a graph that is recorded once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oelm.data.assemble import Batch, pinned
from oelm.system.private_torch import end_failed_recording

MOST_GRAPHS = 48  # shapes; further ones are computed without a graph


@dataclass(eq=False)
class GraphedStep:
    """A step as one graph per shape of its batch; with several batches to a step, as a graph for each of
    them and another for clipping and the optimizer (`whole` is then off).

    `compute` returns a batch's loss and leaves its gradients, `finish` uses them up and returns their norm;
    `follow` runs outside the graph: it refreshes the bf16 copies where weights were changed, e.g. by loading.
    The first shape of all is computed as usual when it is met, which lets kernels compile themselves and the
    optimizer make its state. Every other one is recorded at once, or, where that fails, computed as usual and
    recorded when it is met again.
    """

    compute: Callable[[Batch], Tensor]
    finish: Callable[[], Tensor]
    follow: Callable[[], None]
    scale: Tensor
    whole: bool
    parameters: list[nn.Parameter]  # all that `compute` leaves gradients on
    graphs: dict[Any, tuple[Any, Batch, Tensor, Tensor | None]] = field(default_factory=dict)
    met: set[Any] = field(default_factory=set)
    end: tuple[Any, Tensor] | None = None
    norm: Tensor | None = None  # of the whole step just taken
    ended: bool = False
    failed: str = ""  # why no graph could be recorded
    pool: Any = None

    def backward(self, batch: Batch, scale: float) -> Tensor:
        """The loss of a batch, in the computer's memory, times `scale`. A whole step is then taken."""
        self.scale.fill_(scale)
        self.follow()
        key = shapes_of(batch)
        if key not in self.graphs:
            static, recorded = batch.to(self.scale.device), None
            if self.met and not self.failed and len(self.graphs) < MOST_GRAPHS:
                recorded = self._record(lambda: self._take(static))
                if recorded is None and key not in self.met:
                    self.failed = ""
            self.met.add(key)
            if recorded is None:
                loss, self.norm = self._take(static)
                return loss
            graph, (loss, norm) = recorded
            self.graphs[key] = graph, static, loss, norm
        graph, static, loss, norm = self.graphs[key]
        copy_batch(batch, static)
        graph.replay()
        self.norm = None if norm is None else norm.clone()
        return loss.clone()

    def step(self) -> Tensor:
        """The norm of the gradients, which are clipped and used up unless that is done."""
        if self.whole:
            assert self.norm is not None
            return self.norm
        if not self.ended or not self.graphs or self.failed:  # as usual once: the optimizer makes its state
            self.ended = True
            return self.finish()
        self.end = self.end or self._record(self.finish)
        if self.end is None:
            return self.finish()
        graph, norm = self.end
        graph.replay()
        return norm.clone()

    def _take(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        loss = self.compute(batch)
        return loss, self.finish() if self.whole else None

    def _record(self, work: Callable[[], Any]) -> Any:
        """(the graph, what `work` returned), or None where that fails, with the gradients as they were. A
        model may wait for the device in the middle of a step, which no graph can."""
        before = [parameter.grad for parameter in self.parameters]
        try:
            graph = torch.cuda.CUDAGraph()
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            torch.cuda.synchronize()
            # "relaxed": a kernel that is met for the first time may be loaded meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="relaxed"):
                result = work()
            return graph, result
        except RuntimeError as error:
            self.failed = str(error).strip().splitlines()[0]
            for parameter, grad in zip(self.parameters, before, strict=True):
                parameter.grad = grad
            self._forget()
            return None

    def _forget(self) -> None:
        """After a recording that failed: the graphs there are draw from a random number generator that is
        given up with it, so they are recorded again."""
        if self.pool is not None:
            end_failed_recording(self.scale.device, self.pool)
        self.graphs, self.end, self.pool = {}, None, None


def shapes_of(batch: Batch) -> tuple[Any, ...]:
    tensors = {**batch.inputs, **batch.targets}
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())


def copy_batch(batch: Batch, static: Batch) -> None:
    """The batch's numbers into the tensors a graph was recorded with."""
    for mine, theirs in ((batch.inputs, static.inputs), (batch.targets, static.targets)):
        for name, tensor in mine.items():
            theirs[name].copy_(pinned(tensor, theirs[name].device), non_blocking=True)
