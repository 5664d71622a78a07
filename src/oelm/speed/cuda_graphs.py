"""The fast paths: no padding, blocks compiled, and a step as one CUDA graph. They compute the same sums.

A small step on a large GPU is a queue of short kernels, and starting each takes longer than running it. A
CUDA graph starts them all at once. It wants the same tensors at the same addresses every time, so batches
are filled up to a few shapes (`data.assemble.filled`), and each shape has a graph that is recorded once.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.data.tasks.base import Batch, Objective, pinned
from oelm.models.attention import SelfAttention
from oelm.models.gpt import OelmGPTPreTrainedModel
from oelm.models.gpt_block import FeedForward, Norm
from oelm.speed.own import have_own_kernels
from oelm.training.parallel import DTYPES

MOST_GRAPHS = 48  # shapes; a run with more of them goes on without graphs
# Tokens. On an H200 compiling takes 10 to 35 s and saves 0.02 to 0.08 us a token: `ours` and `ours-short-run`
# in benchmarks/h200.json.
COMPILE_FROM = 300_000_000
# All blocks share one code, which is compiled anew for the first, the last and the others, with gradients and
# without; past the limit PyTorch would go on uncompiled.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class Paths:
    """Which fast paths a run takes; where it does not, why."""

    padded: str | None
    eager: str | None
    compiled: bool
    own_kernels: bool = False
    own_adamw: bool = False
    rows: tuple[int, int] | None = None  # of the embedding: in use, of all
    table: int | None = None  # of those in use, the most that train at a time

    def __str__(self) -> str:
        texts = "texts are packed end to end" if self.padded is None else f"texts are padded ({self.padded})"
        steps = "a step is a CUDA graph" if self.eager is None else f"no CUDA graphs ({self.eager})"
        blocks = f"blocks are {'compiled' if self.compiled else 'not compiled'}"
        blocks += "; attention, norms and GELU by kernels of our own" if self.own_kernels else ""
        rows = f"; {self.rows[0]:,} of {self.rows[1]:,} rows of the embedding are in use" if self.rows else ""
        rows += f", {self.table:,} at a time" if self.table else ""
        optimizer = "; AdamW is one kernel for all weights" if self.own_adamw else ""
        return f"{texts}; {steps}; {blocks}{optimizer}{rows}"


def why_padded(config: RunConfig, objective: Objective, model: nn.Module, device: torch.device) -> str | None:
    """Why texts are padded in this run; None where they are packed end to end."""
    if not config.training.fast:
        return "training.fast is off"
    if not objective.kind.packable or not isinstance(model, OelmGPTPreTrainedModel):
        return "only classifiers of the reference GPT are packed"
    if device.type != "cuda":
        return "without a GPU padding to similar lengths is as fast"
    if model.config.attention_dropout:
        return f"attention dropout {model.config.attention_dropout:g} needs padded attention"
    return None


def why_eager(
    config: RunConfig, model: nn.Module, processes: int, device: torch.device, precision: str
) -> str | None:
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
    if any(getattr(module, "layerdrop", 0) for module in model.modules()):
        return "layers are dropped anew at every step"
    return None


def use_own_kernels(model: nn.Module, config: RunConfig, device: torch.device, precision: str) -> bool:
    """Have a reference GPT's attention, norms and GELU computed by our own kernels, where they are faster."""
    if not config.training.fast or not isinstance(model, OelmGPTPreTrainedModel):
        return False
    dtype = DTYPES.get(precision, torch.float32)
    if not have_own_kernels(device, dtype, model.config.d_model, model.config.num_heads):
        return False
    for module in model.modules():
        if isinstance(module, SelfAttention | Norm | FeedForward):
            module.own_kernels = True
    return True


def compile_blocks(model: nn.Module, tokens: float, config: RunConfig, device: torch.device) -> bool:
    """Compile every block of a reference GPT in place, where the run's tokens are enough to earn it back."""
    if not config.training.fast or device.type != "cuda" or tokens < COMPILE_FROM:
        return False
    if not isinstance(model, OelmGPTPreTrainedModel):
        return False
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    final: Any = model.base_model.ln_f
    for module in (*model.base_model.h, *(() if final.own_kernels else (final,))):  # type: ignore[misc]
        module.compile(dynamic=True)
    return True


class GraphedStep:
    """A step as one graph per shape of its batch; with several batches to a step, as a graph for each of
    them and another for clipping and the optimizer (`whole` is then off).

    `compute` returns a batch's loss and leaves its gradients, `finish` uses them up and returns their norm;
    `follow` is never recorded: it looks whether weights were changed by someone else.
    The first time a shape is met it is computed as usual, which also lets kernels tune themselves and the
    optimizer make its state; the second time it is recorded.
    """

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],
        finish: Callable[[], Tensor],
        follow: Callable[[], None],
        scale: Tensor,
        whole: bool,
        parameters: list[nn.Parameter],
    ) -> None:
        self.compute, self.finish, self.follow = compute, finish, follow
        self.scale, self.whole = scale, whole
        self.parameters = parameters  # all that `compute` leaves gradients on
        self.device = scale.device
        self.graphs: dict[Any, tuple[Any, Batch, Tensor, Tensor | None]] = {}
        self.met: set[Any] = set()
        self.end: tuple[Any, Tensor] | None = None
        self.norm: Tensor | None = None  # of the whole step just taken
        self.ended = False
        self.failed = ""  # why no graph could be recorded
        self.pool: Any = None

    def backward(self, batch: Batch, scale: float) -> Tensor:
        """The loss of a batch, in the computer's memory, times `scale`. A whole step is then taken."""
        self.scale.fill_(scale)
        self.follow()
        key = shapes_of(batch)
        if key not in self.graphs:
            if key not in self.met or self.failed or len(self.graphs) >= MOST_GRAPHS:
                self.met.add(key)
                loss, self.norm = self._take(batch.to(self.device))
                return loss
            if (recorded := self._attempt(lambda: self._record(batch.to(self.device)))) is None:
                return self.backward(batch, scale)
            self.graphs[key] = recorded
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
        if self.end is None:
            self.end = self._attempt(self._record_end)
            if self.end is None:
                return self.finish()
        graph, norm = self.end
        graph.replay()
        return norm.clone()

    def _take(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        loss = self.compute(batch)
        return loss, self.finish() if self.whole else None

    def _attempt(self, record: Callable[[], Any]) -> Any:
        """What is recorded, or None where that fails, with the gradients as they were.

        A model may wait for the device in the middle of a step, which no graph can.
        """
        before = [parameter.grad for parameter in self.parameters]
        try:
            return record()
        except RuntimeError as error:
            self.failed = str(error).strip().splitlines()[0]
            for parameter, grad in zip(self.parameters, before, strict=True):
                parameter.grad = grad
            return None

    def _record_end(self) -> tuple[Any, Tensor]:
        with self._recording() as graph:
            norm = self.finish()
        return graph, norm

    def _record(self, batch: Batch) -> tuple[Any, Batch, Tensor, Tensor | None]:
        with self._recording() as graph:
            loss, norm = self._take(batch)
        return graph, batch, loss, norm

    @contextlib.contextmanager
    def _recording(self) -> Iterator[Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self.pool):
            yield graph
        self.pool = self.pool or graph.pool()


def shapes_of(batch: Batch) -> tuple[Any, ...]:
    tensors = {**batch.inputs, **batch.targets}
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())


def copy_batch(batch: Batch, static: Batch) -> None:
    """The batch's numbers into the tensors a graph was recorded with."""
    for mine, theirs in ((batch.inputs, static.inputs), (batch.targets, static.targets)):
        for name, tensor in mine.items():
            theirs[name].copy_(pinned(tensor, theirs[name].device), non_blocking=True)
