"""A training step as a CUDA graph.

A small step on a large GPU is a queue of short kernels, and launching each takes longer than running it. A
CUDA graph launches them all at once. It needs the same tensors at the same addresses every time, so batches
are padded to a few shapes (`data.assemble.fill_to_round_sizes`), and each shape's graph is recorded once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oelm.data.assemble import Batch, pinned
from oelm.system.private_torch import end_failed_recording

MOST_GRAPHS = 48  # recorded shapes; further ones are computed without a graph


@dataclass(eq=False)
class GraphedStep:
    """A step as one graph per shape of its batch; with several batches to a step, as a graph for each of
    them and another for clipping and the optimizer (`whole` is then off).

    `compute` returns a batch's loss and leaves its gradients, `finish` consumes them and returns their norm.
    `refresh_if_changed` runs outside the graph: it refreshes the bf16 copies of weights that were changed,
    e.g. by loading. The very first shape is computed without a graph the first time, so that kernels are
    compiled and the optimizer makes its state. Every other shape is recorded at once or, if that fails,
    computed without a graph and recorded when it occurs again.
    """

    compute: Callable[[Batch], Tensor]
    finish: Callable[[], Tensor]
    refresh_if_changed: Callable[[], None]
    scale: Tensor
    whole: bool
    parameters: list[nn.Parameter]  # all that `compute` leaves gradients on
    graphs: dict[Any, tuple[Any, Batch, Tensor, Tensor | None]] = field(default_factory=dict)
    met: set[Any] = field(default_factory=set)  # shapes that occurred
    end: tuple[Any, Tensor] | None = None  # the graph of `finish`, and its result
    norm: Tensor | None = None  # of the whole step just taken
    ended: bool = False
    failed: str = ""  # why no graph could be recorded
    pool: Any = None

    def backward(self, batch: Batch, scale: float) -> Tensor:
        """The loss of a batch in CPU memory, times `scale`; with `whole` the optimizer's step is taken,
        too."""
        self.scale.fill_(scale)
        self.refresh_if_changed()
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
        """The norm of the gradients; without `whole`, this clips them and takes the optimizer's step."""
        if self.whole:
            assert self.norm is not None
            return self.norm
        # Once without a graph: makes the optimizer's state.
        if not self.ended or not self.graphs or self.failed:
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
        """(graph, result of `work`), or None if recording fails, with gradients unchanged. It fails, for
        example, if a model synchronises with the device within a step."""
        before = [parameter.grad for parameter in self.parameters]
        try:
            graph = torch.cuda.CUDAGraph()
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            torch.cuda.synchronize()
            # "relaxed": kernels may be loaded during the recording.
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
        """Drop all graphs after a failed recording: they draw from a random number generator that is lost
        with it, so they are recorded again."""
        if self.pool is not None:
            end_failed_recording(self.scale.device, self.pool)
        self.graphs, self.end, self.pool = {}, None, None


def shapes_of(batch: Batch) -> tuple[Any, ...]:
    tensors = {**batch.inputs, **batch.targets}
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())


def copy_batch(batch: Batch, static: Batch) -> None:
    """Copy a batch into the tensors that a graph was recorded with."""
    for sources, targets in ((batch.inputs, static.inputs), (batch.targets, static.targets)):
        for name, tensor in sources.items():
            targets[name].copy_(pinned(tensor, targets[name].device), non_blocking=True)
