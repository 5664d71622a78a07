"""One optimizer step, its model and its optimizer, by PyTorch's own operations: the plain path.

Training takes many of these and records them in a folder (`run.py`); a benchmark times some of them. `speed/`
takes the same step faster; without it, this one is used.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn

from oelm.data import Epoch
from oelm.data.assemble import Batch, Layout
from oelm.data.tasks.base import Objective
from oelm.models.fit import takes_segments
from oelm.training import parallel
from oelm.training.checkpoint import (
    Checkpoint,
    LiveEmbeddings,
    TensorCopies,
    Tensors,
    capture,
    copy_state,
    restore,
)
from oelm.training.freezing import Freezing
from oelm.training.resolve import ResolvedRun
from oelm.training.schedule import learning_rate, make_optimizer, seed_step, set_learning_rate


@dataclass
class Watch:
    """How far the fast path was from the plain one at the steps where they were compared; recorded."""

    checks: int = 0
    skipped: int = 0  # because the plain path needs more memory than there is
    largest: dict[str, float] = field(default_factory=dict)  # relative deviations of loss and grad_norm
    again: bool = True  # compare at the next step: the first one, or after a change of hardware or software


class PlainStep:
    """A model, its optimizer and how they take a step, in one process. Subclasses override the `_`
    methods."""

    plain = True
    why_plain = "training.fast is off"

    def __init__(self, resolved: ResolvedRun, objective: Objective, raw: Any, state: PartialState) -> None:
        """Place the model `raw` on its device, wrap it and give it an optimizer."""
        self.resolved, self.objective, self.state, self.raw = resolved, objective, state, raw
        self.config, self.precision = resolved.config, resolved.precision
        training = self.config.training
        self.autocast: Callable[[], Any] = parallel.autocast_of(self.precision, state.device)
        self.scaler = torch.amp.GradScaler(state.device.type, enabled=self.precision == "fp16")
        self.layout = Layout(segments=takes_segments(raw))
        # Masked cuDNN attention gives NaN gradients (models.gpt_block.MASKED_KERNELS), in other models, too.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._prepare_model()
        raw.to(state.device)
        if training.gradient_checkpointing:
            raw.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = parallel.wrap(raw, state, training.fsdp)  # replaces parameters: before the optimizer
        self.parameters = list(raw.parameters())
        self.freezing = Freezing(raw, resolved.total_steps)
        self.optimizer = self._make_optimizer()

    def _prepare_model(self) -> None:
        """Change the model before it is placed and wrapped."""

    def _make_optimizer(self) -> torch.optim.AdamW:
        return make_optimizer(self.raw, self.config.training, freezing=self.freezing)

    def _begin(self, number: int) -> None:
        """Freeze and unfreeze by the method's schedule before step `number`."""
        if self.freezing.before_step(number):
            self._rebuild()

    def _rebuild(self) -> None:
        """Adapt to a changed set of parameters that train. DDP waits for the gradients of the parameters that
        trained when it wrapped the model, so it must wrap it again; FSDP2 checks at every step."""
        self.freezing.drop_moments(self.optimizer)
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            # Replacing the old wrapper frees its gradient hooks.
            training, self.model = self.model.training, self.raw
            self.model = parallel.wrap(self.raw, self.state, False).train(training)

    def take(self, number: int, batches: Epoch, k: int) -> tuple[Tensor, Tensor, int]:
        """Take step `number` of the run, on batch k of an epoch. Returns this process's part of the global
        batch's mean loss, the gradients' norm, and the number of tokens."""
        training, state, world = self.config.training, self.state, self.state.num_processes
        self._begin(number)
        count = self.objective.count("train", batches.batch(k))
        set_learning_rate(
            self.optimizer, learning_rate(self.resolved, number), self.freezing.timeline, number
        )
        loss: Tensor = torch.zeros((), device=state.device)
        tokens = 0
        for micro in range(training.accumulate):
            part = micro * world + state.process_index
            items = batches.share(k, part, world * training.accumulate)
            batch = self.objective.batch("train", items, self.layout)
            tokens += batch.tokens
            seed_step(training.seed, number, part, state.device)
            loss += self._backward(batch, count, micro == training.accumulate - 1)
        return loss, self._use_gradients(), tokens

    def _backward(self, batch: Batch, count: int, last: bool) -> Tensor:
        """The loss of a micro-batch, `last` of its step, divided by `count`; its gradients are added."""
        batch = batch.to(self.state.device)
        with parallel.accumulating(self.model, last):
            with self.autocast():
                loss = self.objective.loss(self.model, batch)
            # DDP and FSDP2 average over processes; multiplied by their number, that is the sum.
            self.scaler.scale(loss * (self.state.num_processes / count)).backward()
        return loss.detach() / count

    def _use_gradients(self) -> Tensor:
        """Clip the gradients, take the optimizer's step, and return the gradients' norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        trained = [p for p in self.parameters if p.grad is not None]
        norm = parallel.norm_of(trained, self.config.training.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def sync(self) -> None:
        """Bring the model's weights up to date, before they are evaluated or saved."""

    def copy_state(self) -> tuple[TensorCopies, TensorCopies]:
        """The weights and moments as they are now, for a checkpoint."""
        self.sync()
        return copy_state(self.raw, self.optimizer, self._live_embeddings())

    def capture(self) -> tuple[Tensors, Tensors]:
        self.sync()
        return capture(self.raw, self.optimizer, self._live_embeddings())

    def _live_embeddings(self) -> LiveEmbeddings:
        """The embeddings of which only some rows train, by the name of their weight."""
        return {}

    def restore(self, checkpoint: Checkpoint, moments: bool = True) -> None:
        restore(checkpoint, self.raw, self.optimizer if moments else None, self._live_embeddings())
        self._restore_frozen(checkpoint)

    def _restore_frozen(self, checkpoint: Checkpoint) -> None:
        """Restore what was frozen when the checkpoint was made."""
        if (record := checkpoint.state.get("freezing")) and self.freezing.restore(record):
            self._rebuild()

    def hand_over(self, steps: int) -> tuple[Tensors, Tensors]:
        """The state for a PlainStep that goes on after `steps` steps: as `capture`, with the weight decay
        that unused rows of an embedding missed."""
        return self.capture()

    def finish(self, steps: int) -> None:
        """Restore the unused rows of the embedding, before the model is tested and saved."""

    def close(self) -> None:
        """Restore the model's own forward methods."""

    def why_unwatched(self) -> str | None:
        """Why the fast path is not compared with the plain one; None if it is."""
        return "the run takes the plain path"

    def paths(self) -> dict[str, Any]:
        """Which fast paths the run takes, for its record."""
        return {"padded": self.why_plain, "eager": self.why_plain}

    def __str__(self) -> str:
        return "the plain path: texts are padded, no CUDA graphs, no kernels of our own"


def speed_package() -> Any:
    """The package `oelm.speed`; None if it is not installed."""
    try:
        import oelm.speed
    except ModuleNotFoundError as error:
        if error.name != "oelm.speed":
            raise
        return None
    return oelm.speed


def fast_forward(model: Any, precision: str) -> contextlib.AbstractContextManager[bool]:
    """A context in which a model that is not trained computes by the fast paths; its value is whether the
    model takes packed texts."""
    speed = speed_package()
    return speed.fast_forward(model, precision) if speed else contextlib.nullcontext(False)


def make_step(
    resolved: ResolvedRun, objective: Objective, raw: Any, state: PartialState, watch: Watch | None = None
) -> PlainStep:
    """The step that a run takes: the fast one unless `training.fast` is off or `speed/` is not installed.
    With `watch` the fast path is compared with the plain one now and then."""
    if resolved.config.training.fast and (speed := speed_package()):
        return speed.FastStep(resolved, objective, raw, state, watch=watch)
    step = PlainStep(resolved, objective, raw, state)
    if resolved.config.training.fast:
        step.why_plain = "oelm.speed is not installed"
    return step
