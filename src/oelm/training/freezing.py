"""Freeze and unfreeze a model while it trains, by its method's schedule, in any training loop.

    freezing = oelm.Freezing(model, total_steps=1000, optimizer=optimizer)
    for step in range(1000):
        freezing.before_step(step)
        ...                                                       # forward, backward, optimizer.step()

`freezing.trainer_callback()` does it in Hugging Face's Trainer, `freezing.lightning_callback()` in Lightning.
What is frozen at a step depends only on the step and the number of steps, so a run that resumes needs nothing
but the number of its next step.
"""

import bisect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

from oelm.audit import at_of, frozen_digest, method_of, record_of
from oelm.errors import UserError
from oelm.method import HEAD_ROLES, Method
from oelm.models.families import Site, block_gain, find_sites
from oelm.models.freeze_schedule import Timeline
from oelm.models.frozen_state import At, frozen_by, timeline_of, unfreezing_groups
from oelm.orthogonal import polar_factor, to_blocks, to_weight
from oelm.system.files import read_json
from oelm.system.private_torch import unwrap, with_weight
from oelm.system.shards import gathered
from oelm.training.parallel import reshard


class Freezing:
    """Applies the freeze schedule of a converted model step by step.

    The optimizer must hold every parameter that trains at any time. One without a gradient is not touched,
    not decayed and has no state; clear gradients with `zero_grad(set_to_none=True)`, PyTorch's default.
    """

    def __init__(
        self,
        model: nn.Module,
        total_steps: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """`total_steps` of training; callbacks get it from their trainer. With `optimizer` the learning rates
        of unfrozen layers are warmed up if the schedule has a warm-up."""
        self.model: nn.Module = unwrap(model)
        self.method = method_of(self.model)
        self.groups = unfreezing_groups(self.model, self.method) if self.method.schedule else {}
        self.optimizer: torch.optim.Optimizer | None = None
        self._own_groups: list[dict[str, Any]] | None = None  # the optimizer's own, while they are split
        self.step: int | None = None  # the last step that was begun
        self.timeline = Timeline(0, (), None, 0)
        self.total_steps = 0
        if total_steps is not None:
            self.plan(total_steps)
        if optimizer is not None:
            self.attach(optimizer)

    def plan(self, total_steps: int) -> None:
        """Set the number of training steps. Raises UserError where the schedule does not fit it."""
        self.total_steps = total_steps
        if (schedule := self.method.schedule) is None:
            return
        schedule.check(len({*self.groups.values()}), total_steps)
        self.timeline = timeline_of(schedule, self.groups.values(), total_steps)
        for step in self.timeline.borders:
            if not self.trained_at(step):
                raise UserError(f"freeze_schedule freezes all of the model at step {step:,}: nothing trains")

    def trained_at(self, step: int) -> int:
        """The number of parameters that train at a step."""
        frozen = frozen_by(self.timeline, self.groups, step)
        trains = {name: name not in frozen for name in self.groups}
        named = self.model.named_parameters()
        return sum(p.numel() for name, p in named if trains.get(name, p.requires_grad))

    def stages(self) -> dict[str, list[dict[str, int]]]:
        """{"stages": [{"step", "trainable", "frozen"}, ...]}: the first step of every stage and the numbers
        of parameters from it on; empty without a schedule."""
        if not self.groups:
            return {}
        total = sum(parameter.numel() for parameter in self.model.parameters())
        trained = {step: self.trained_at(step) for step in self.timeline.borders if step < self.total_steps}
        return {"stages": [{"step": n, "trainable": t, "frozen": total - t} for n, t in trained.items()]}

    def before_step(self, step: int) -> bool:
        """Freeze and unfreeze by the schedule; call it before the optimizer's step 0, 1, ...

        Returns whether the set of trained parameters has changed: DDP must then wrap the model again (unless
        it was wrapped after `prepare()` and with find_unused_parameters=True), and a CUDA graph be recorded
        again. Calling it again for the same step, as with several micro-batches, changes nothing.
        """
        self._restore_groups()
        if not self.groups or step == self.step:
            return False
        if not self.total_steps:
            raise UserError(
                "freeze_schedule needs the number of training steps: Freezing(model, total_steps=...)"
            )
        last, self.step = self.step, step
        record = record_of(self.model)
        record["at"] = [step, self.total_steps]
        if last is not None and self._stage(last) == self._stage(step):
            return False
        reshard(self.model)
        frozen = frozen_by(self.timeline, self.groups, step)
        first_new = step if last is None else last + 1  # weights frozen before it are orthonormal already
        self._orthonormalise({name for name, since in frozen.items() if since and since >= first_new})
        changed = self._set_trained(frozen)
        record["digest"] = frozen_digest(self.model, self.method, At(step, self.total_steps))
        return changed

    def _stage(self, step: int) -> int:
        return bisect.bisect_right(self.timeline.borders, step)

    def _set_trained(self, frozen: Mapping[str, int]) -> bool:
        changed = False
        for name, parameter in self.model.named_parameters():
            if name not in self.groups:
                continue
            changed |= parameter.requires_grad == (name in frozen)
            parameter.requires_grad_(name not in frozen)
            if name in frozen:
                parameter.grad = None  # even a gradient of zeros would let AdamW apply weight decay
        if self.optimizer is not None:
            self.drop_moments(self.optimizer)
        return changed

    def drop_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Delete the optimizer's state of the parameters that are frozen now."""
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                optimizer.state.pop(parameter, None)

    @property
    def record(self) -> dict[str, Any]:
        """The values that a checkpoint must hold besides the step; empty without a schedule."""
        return {key: record_of(self.model)[key] for key in ("at", "digest")} if self.step is not None else {}

    def restore(self, record: Mapping[str, Any]) -> bool:
        """Restore the frozen state of a `record`, after its weights were restored. Returns as
        `before_step`."""
        record_of(self.model).update(record)
        at = at_of(self.model)
        self.step = at.step
        return self._set_trained(frozen_by(self.timeline, self.groups, at.step))

    @torch.no_grad()
    def _orthonormalise(self, names: set[str]) -> None:
        """Replace q and k that are about to be frozen by their polar factors, if the schedule is `polar`."""
        assert self.method.schedule is not None
        for site in find_sites(self.model) if self.method.schedule.polar else ():
            if site.role in HEAD_ROLES and f"{site.path}.weight" in names:
                _orthonormalise(site, self.method)

    def prepare(self) -> None:
        """Unfreeze all parameters that train at any stage. To be called before an optimizer is built that
        takes only parameters that train (as Hugging Face's Trainer does), and before DDP wraps the model once
        for all stages."""
        for name, parameter in self.model.named_parameters():
            if name in self.groups:
                parameter.requires_grad_(True)

    def attach(self, optimizer: Any) -> None:
        """Check that the optimizer holds all parameters that train at any stage, and prepare the warm-up of
        their learning rates in it."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wraps it
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [n for n, p in self.model.named_parameters() if n in self.groups and id(p) not in held]
        if missing:
            raise UserError(
                f"the optimizer does not hold {missing[0]} and {len(missing) - 1} more, which train in the "
                "course of the schedule: build it over model.parameters(), or after Freezing.prepare()"
            )
        if optimizer is not self.optimizer and self.groups:
            self.optimizer = optimizer
            if self.method.schedule and self.method.schedule.warmup:
                self._warm_up(optimizer)

    def _warm_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Split the optimizer's groups during each of its steps, so that layers that warm up have a smaller
        learning rate. Between steps schedulers and checkpoints see the original groups, even after a step
        that raised an error."""

        def split(optimizer: Any, *_: Any) -> None:
            self._restore_groups()
            factors = {
                id(p): self.timeline.lr_factor(self.groups[name], self.step or 0)
                for name, p in self.model.named_parameters()
                if name in self.groups
            }
            self._own_groups = optimizer.param_groups
            optimizer.param_groups = [part for group in self._own_groups for part in _parts(group, factors)]

        optimizer.register_step_pre_hook(split)
        optimizer.register_step_post_hook(lambda *_: self._restore_groups())
        optimizer.register_state_dict_pre_hook(lambda *_: self._restore_groups())

    def _restore_groups(self) -> None:
        """Restore the optimizer's own groups."""
        if self._own_groups is not None and self.optimizer is not None:
            self.optimizer.param_groups, self._own_groups = self._own_groups, None

    def trainer_callback(self) -> Any:
        """A `TrainerCallback` for the `callbacks` of Hugging Face's Trainer, given when it is made."""
        from transformers import TrainerCallback

        freezing = self

        class FreezingCallback(TrainerCallback):
            def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                freezing.prepare()  # the Trainer's optimizer takes the parameters that train when it is built

            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                freezing.plan(state.max_steps)
                freezing.attach(given["optimizer"])

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                freezing.before_step(state.global_step)

            def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if freezing.groups and args.load_best_model_at_end and state.best_model_checkpoint:
                    # The best checkpoint's weights may be of another stage.
                    saved = read_json(Path(state.best_model_checkpoint) / "config.json")["oelm"]
                    freezing.restore({key: saved[key] for key in ("at", "digest")})

        return FreezingCallback()

    def lightning_callback(self) -> Any:
        """A `Callback` for Lightning's Trainer, whose DDP strategy is "ddp_find_unused_parameters_true"."""
        from lightning.pytorch import Callback

        freezing = self

        class FreezingCallback(Callback):
            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                freezing.prepare()

            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                freezing.plan(int(trainer.estimated_stepping_batches))
                freezing.attach(trainer.optimizers[0])

            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                freezing.before_step(trainer.global_step)

        return FreezingCallback()


def _parts(group: dict[str, Any], factors: Mapping[int, float]) -> list[dict[str, Any]]:
    """Split an optimizer's group into groups with equal factors of the learning rate."""
    parts: dict[float, list[Any]] = {}
    for parameter in group["params"]:
        parts.setdefault(factors.get(id(parameter), 1.0), []).append(parameter)
    return [
        group | {"params": held, "lr": group["lr"] * factor if factor != 1 else group["lr"]}
        for factor, held in parts.items()
    ]


def _orthonormalise(site: Site, method: Method) -> None:
    """Replace the block of every head of q or k by its polar factor, times the method's gain."""
    weight = site.module.weight
    assert isinstance(weight, nn.Parameter)
    full = gathered(weight).clone()
    if not full.isfinite().all():
        return  # the run has diverged, which its loop reports
    plain = replace(site, module=with_weight(site.module, full))
    blocks_before = to_blocks(plain.weight, site.heads)
    blocks = polar_factor(blocks_before) * block_gain(site, method, blocks_before)[:, None, None]
    plain.write(torch.from_numpy(to_weight(blocks)).to(full.device, full.dtype))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(full, 0)  # processes on unequal machines may round differently
    if hasattr(weight, "full_tensor"):
        full = distribute_tensor(full, weight.device_mesh, weight.placements)  # type: ignore[attr-defined]
    weight.copy_(full)
