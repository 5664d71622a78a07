"""One optimizer step: what it needs, how that is made from a configuration, and the step itself.

Training is many of these with a folder around them (`session.py`); a benchmark is some of them with a clock.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn

from oelm.config import RunConfig
from oelm.data import Epoch
from oelm.data.read_ahead import read_whole
from oelm.data.tasks.base import Batch, Layout, Objective
from oelm.models.fit import takes_segments
from oelm.speed import cuda_graphs as fast
from oelm.speed.adamw import OwnAdamW, can_be_own
from oelm.speed.bf16_copies import HalfWeights
from oelm.speed.live_rows import live_weights, set_aside
from oelm.speed.plain import plain_path
from oelm.speed.row_windows import RowWindows, make_windows
from oelm.speed.watch import Watch, compare, has_dropout, numbers, why_unwatched, yardstick
from oelm.training import parallel
from oelm.training.schedule import (
    clip_in_step,
    learning_rate,
    make_optimizer,
    seed_step,
    set_rate,
    total_steps,
)

AHEAD = 8  # steps between asking for a batch's tokens and using them, where they are not all in memory


@dataclass(kw_only=True)
class Stepper:
    """A model, its optimizer and the way they are used, on one process."""

    config: RunConfig
    objective: Objective
    state: PartialState
    raw: Any  # the model
    model: nn.Module  # the model as it is called: perhaps wrapped
    optimizer: torch.optim.Optimizer
    scaler: Any
    autocast: Any
    precision: str
    paths: fast.Paths
    total: int  # steps of the run
    layout: Layout  # of its batches
    parameters: list[nn.Parameter]
    graphed: fast.GraphedStep | None = None  # the step as CUDA graphs, where it is
    windows: RowWindows | None = None  # that the embedding trains through, where it does
    # Whether the data is too large for memory, so that batches are asked for in time.
    reads_ahead: bool = False
    plain: bool = False  # PyTorch's own operations and nothing else
    watch: Watch = field(default_factory=Watch)

    def take_step(self, number: int, batches: Epoch, k: int) -> tuple[Tensor, Tensor, int]:
        """Step `number` of the run, on batch k of an epoch.

        Returns the global batch's mean loss (on this process: its part), the gradients' norm, and the tokens.
        """
        with plain_path(self.plain):
            return self._take_step(number, batches, k)

    def take_watched_step(self, number: int, batches: Epoch, k: int) -> tuple[Tensor, Tensor, int]:
        """The same, compared with the plain path where that is due."""
        if why_unwatched(self) or not self.watch.due(number):
            return self.take_step(number, batches, k)
        try:
            right = yardstick(self, batches, k)  # before the weights move
        except torch.OutOfMemoryError:  # what is trained fits; it must not fail for being watched
            torch.cuda.empty_cache()
            self.watch.skip()
            return self.take_step(number, batches, k)
        found = numbers(self, batches, k, plain=False) if has_dropout(self.raw) else None
        loss, norm, tokens = self.take_step(number, batches, k)
        found = found or {"loss": float(loss), "grad_norm": float(norm)}
        self.watch.add(compare(found, right, self.precision, number + 1))
        return loss, norm, tokens

    def _take_step(self, number: int, batches: Epoch, k: int) -> tuple[Tensor, Tensor, int]:
        training, state = self.config.training, self.state
        world = state.num_processes
        if self.reads_ahead and k + AHEAD < len(batches):
            self.objective.expect("train", batches.batch(k + AHEAD))
        if self.windows is not None:
            self.windows.prepare(batches, k)
        count = self.objective.count("train", batches.batch(k))
        rate = learning_rate(training, number, self.total)
        set_rate(self.optimizer, rate)
        summed: Tensor = torch.zeros((), device=state.device)
        tokens = 0
        for micro in range(training.accumulate):
            part = micro * world + state.process_index
            items = batches.share(k, part, world * training.accumulate)
            batch = self.objective.batch("train", items, self.layout)
            tokens += batch.tokens
            seed_step(training.seed, number, part, state.device)
            if self.graphed is not None:
                summed += self.graphed.backward(batch, 1 / count)
                continue
            batch = batch.to(state.device)
            with parallel.accumulating(self.model, micro == training.accumulate - 1):
                with self.autocast():
                    loss = self.objective.loss(self.model, batch)
                # DDP and FSDP2 average over processes; times their number that is the sum.
                self.scaler.scale(loss * (world / count)).backward()
            summed += loss.detach() / count
        norm = self._finish() if self.graphed is None else self.graphed.step()
        if self.windows is not None:
            self.windows.count(rate)
        return summed, norm, tokens

    def _finish(self) -> Tensor:
        """Clip the gradients, use them up, and return their norm."""
        training = self.config.training
        if self.scaler.is_enabled() or training.fsdp or not self.optimizer.defaults.get("fused"):
            self.scaler.unscale_(self.optimizer)
            trained = [p for p in self.parameters if p.grad is not None]
            norm = parallel.norm_of(trained, training.clip)
        else:
            norm = clip_in_step(self.optimizer, self.parameters, training.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def make_stepper(config: RunConfig, objective: Objective, raw: Any, state: PartialState) -> Stepper:
    """Place the model, choose the fast paths it can take, wrap it, and give it an optimizer."""
    training = config.training
    precision, _ = parallel.resolve_precision(training.precision, state.device)
    # Masked cuDNN attention gives NaN gradients (attention.MASKED_KERNELS); this is for other models.
    torch.backends.cuda.enable_cudnn_sdp(False)
    rows = None
    if training.fast and not training.fsdp and not objective.kind.stream:
        rows = set_aside(raw, objective.store.used_tokens())
    raw.to(state.device)
    if training.gradient_checkpointing:
        raw.gradient_checkpointing_enable({"use_reentrant": False})
    plan = objective.plan("train", training.batch_size, training.batch_tokens, training.seed)
    total = total_steps(training, plan)
    eager = fast.why_eager(config, raw, state.num_processes, state.device, precision)
    paths = fast.Paths(
        padded=fast.why_padded(config, objective, raw, state.device),
        eager=eager,
        own_adamw=eager is None and precision == "bf16" and can_be_own(raw.parameters()),
        own_kernels=fast.use_own_kernels(raw, config, state.device, precision),
        compiled=fast.compile_blocks(raw, total * plan.mean_tokens, config, state.device),
        rows=rows,
    )
    layout = Layout(paths.padded is None, round_widths=paths.eager is None, segments=takes_segments(raw))
    model = parallel.wrap(raw, state, training.fsdp)  # sharding replaces parameters: before the optimizer
    stepper = Stepper(
        config=config,
        objective=objective,
        state=state,
        raw=raw,
        model=model,
        optimizer=make_optimizer(raw, training, graphed=paths.eager is None),
        scaler=torch.amp.GradScaler(state.device.type, enabled=precision == "fp16"),
        autocast=parallel.autocast_of(precision, state.device),
        precision=precision,
        paths=paths,
        total=total,
        layout=layout,
        plain=not training.fast,
        parameters=list(raw.parameters()),
        reads_ahead=not read_whole(objective.store["train"].tokens),
    )
    short = list(live_weights(raw).values())
    # fp16 may skip a step, an encoder-decoder reads other tokens than its texts', and where tokens do not fit
    # into memory they are better read as they are needed.
    plain = precision != "fp16" and not objective.kind.writes and not stepper.reads_ahead
    if short and plain and state.num_processes == 1:
        stepper.windows = make_windows(short[0], stepper.optimizer, objective.store, plan)
    if stepper.windows is not None:
        stepper.parameters.append(stepper.windows.weight)
        stepper.paths = replace(paths, table=stepper.windows.capacity)
    if paths.eager is None:
        stepper.graphed = _graphed_step(stepper)
    return stepper


def _graphed_step(stepper: Stepper) -> fast.GraphedStep:
    """The step as it is recorded."""
    parameters = [p for p in stepper.parameters if p.requires_grad]
    scale = torch.zeros((), device=stepper.state.device)
    whole = stepper.config.training.accumulate == 1
    clip, optimizer = stepper.config.training.clip, stepper.optimizer
    half = HalfWeights(stepper.raw, torch.bfloat16) if stepper.precision == "bf16" else None
    assert isinstance(optimizer, OwnAdamW)
    if half is not None:
        optimizer.clip = clip
        optimizer.copies = {id(own): copy for own, copy in half.trained}

    def compute(batch: Batch) -> Tensor:
        with half.installed() if half is not None else nullcontext():
            with stepper.autocast():
                loss = stepper.objective.loss(stepper.model, batch) * scale
            loss.backward()
        if half is not None:
            half.collect(optimizer.rooms)
            optimizer.gather()
        return loss.detach()

    def finish() -> Tensor:
        if optimizer.together:
            optimizer.step()
            norm = optimizer.norm
        else:
            norm = clip_in_step(optimizer, parameters, clip)
            optimizer.step()
            if half is not None:
                half.refresh()
        # What is written anew need not be zero before; what is added to must keep its place.
        optimizer.zero_grad(set_to_none=whole)
        return norm

    copies = [] if half is None else [copy for _, copy in half.trained]
    follow = (lambda: None) if half is None else half.follow
    return fast.GraphedStep(compute, finish, follow, scale, whole, [*parameters, *copies])
