"""Schedules that freeze and unfreeze parameters by the training step. No model is touched here.

As only the step decides, a run that resumes freezes what an unbroken run does, and an audit knows at every
step which weights must be unchanged. Points in training are steps, or shares of all steps if below 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from oelm.errors import UserError

ORDERS = ("together", "top-down", "bottom-up")


@dataclass(frozen=True)
class FreezeSchedule:
    """When the parameters that `Method.freeze` names are frozen.

    freeze_at    when they are frozen; 0: from the start. Before it they train.
    polar        q and k that were trained become orthonormal when they are frozen: each head's polar factor.
    unfreeze_at  when they train again; None: never. A list unfreezes some layers at each of its points.
    order        "together": all at once; "top-down": the top layer first, embeddings last; "bottom-up".
    every        the time between one layer and the next. Without it and without a list, layers follow each
                 other evenly until the end, or until `refreeze_at`.
    refreeze_at  when all of them are frozen again.
    warmup       for how long the learning rate of what was unfrozen rises to its full value.
    """

    freeze_at: float = 0
    polar: bool = False
    unfreeze_at: float | Sequence[float] | None = None
    order: str = "together"
    every: float | None = None
    refreeze_at: float | None = None
    warmup: float = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UserError(f"unknown freeze_schedule.order {self.order!r}; known: {', '.join(ORDERS)}")
        if not isinstance(self.polar, bool):
            raise UserError(f"freeze_schedule.polar must be true or false, not {self.polar!r}")
        for name in ("freeze_at", "every", "refreeze_at", "warmup"):
            value = getattr(self, name)
            zero = name in ("freeze_at", "warmup")
            if value is not None and not _is_point(value, zero=zero):
                above = "" if zero else ", above 0"
                raise UserError(
                    f"freeze_schedule.{name} must be a number of steps or a share{above}, not {value!r}"
                )
        if not all(_is_point(point) for point in self.unfreeze_points):
            raise UserError(
                "freeze_schedule.unfreeze_at must be a number of steps or a share of them, above 0, or a "
                f"list of such, not {self.unfreeze_at!r}"
            )
        self._check_combination()

    def _check_combination(self) -> None:
        unfreezes, listed = self.unfreeze_at is not None, isinstance(self.unfreeze_at, Sequence)
        if not unfreezes and not self.freeze_at:
            raise UserError("freeze_schedule needs freeze_at or unfreeze_at: without them nothing changes")
        if listed and not self.unfreeze_points:
            raise UserError("freeze_schedule.unfreeze_at is an empty list: leave it out, or name a point")
        for name in ("order", "every", "refreeze_at", "warmup"):
            if not unfreezes and getattr(self, name) != getattr(FreezeSchedule, name):
                raise UserError(f"freeze_schedule.{name} needs unfreeze_at")
        if self.order == "together" and (listed or self.every):
            raise UserError(
                "freeze_schedule: layers that are unfrozen in turn need order = 'top-down' or 'bottom-up'"
            )
        if listed and self.every:
            raise UserError("freeze_schedule.unfreeze_at is a list, which freeze_schedule.every contradicts")
        if self.polar and not self.freeze_at and self.refreeze_at is None:
            raise UserError("freeze_schedule.polar needs freeze_at or refreeze_at: nothing is frozen later")

    @classmethod
    def from_dict(cls, values: Any) -> "FreezeSchedule":
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise UserError(f"unknown key freeze_schedule.{key}; known: {', '.join(known)}")
        return cls(**values)

    @property
    def unfreeze_points(self) -> tuple[float, ...]:
        if self.unfreeze_at is None:
            return ()
        return tuple(self.unfreeze_at) if isinstance(self.unfreeze_at, Sequence) else (self.unfreeze_at,)

    def resolve(self, groups: int, total: int) -> "Timeline":
        """The schedule in steps, for a run of `total` steps that unfreezes `groups` groups of layers in
        turn."""
        refreeze = None if self.refreeze_at is None else _steps(self.refreeze_at, total)
        points = [_steps(point, total) for point in self.unfreeze_points]
        if len(points) > groups:
            raise UserError(
                f"freeze_schedule.unfreeze_at has {len(points)} points, but only {groups} layers are frozen"
            )
        if len(points) == 1 and groups > 1:
            end = total if refreeze is None else refreeze
            gap = (end - points[0]) / groups if self.every is None else _steps(self.every, total)
            unfreeze = [points[0] + int(number * gap) for number in range(groups)]
        else:
            unfreeze = [points[number * len(points) // groups] for number in range(groups) if points]
        freeze, warmup = (_steps(p, total) if p else 0 for p in (self.freeze_at, self.warmup))
        return Timeline(freeze, tuple(unfreeze), refreeze, warmup)

    def check(self, groups: int, total: int) -> None:
        """Refuse a run in which a point is never reached, or which reaches them in another order."""
        timeline = self.resolve(groups, total)
        if list(timeline.unfreeze) != sorted(timeline.unfreeze):
            raise UserError("freeze_schedule.unfreeze_at must be a list of growing points")
        named = {
            "freeze_at": timeline.freeze,
            "unfreeze_at": timeline.unfreeze[0] if timeline.unfreeze else None,
        }
        reached = -1
        for name, step in (named | {"refreeze_at": timeline.refreeze}).items():
            if step is None:
                continue
            given = f"freeze_schedule.{name} = {getattr(self, name)} is step {step:,}"
            if step >= total:
                raise UserError(f"{given}, but the run ends after {total:,}")
            if step <= reached:
                raise UserError(f"{given} of {total:,}, which is not after the point before it")
            reached = step
        self._check_last(timeline, total)

    def _check_last(self, timeline: "Timeline", total: int) -> None:
        """Refuse a run whose last layers are never unfrozen."""
        end = total if timeline.refreeze is None else timeline.refreeze
        late = [step for step in timeline.unfreeze if step >= end]
        if not late:
            return
        what = "the run ends" if timeline.refreeze is None else "freeze_schedule.refreeze_at freezes them all"
        given = f"freeze_schedule.unfreeze_at = {self.unfreeze_at}"
        if self.every is not None:
            given += f", every = {self.every}"
        raise UserError(
            f"{given}: the last of {len(timeline.unfreeze)} layers is due at step {late[-1]:,}, but {what} "
            f"after {end:,}; {len(late)} would never train"
        )


@dataclass(frozen=True)
class Timeline:
    """A schedule in steps, which count from 0."""

    freeze: int
    unfreeze: tuple[int, ...]  # of each group; empty: never
    refreeze: int | None
    warmup: int

    def frozen_since(self, group: int, step: int) -> int | None:
        """The step since which a group of parameters is frozen at this step; None if it trains."""
        again = self.refreeze is not None and step >= self.refreeze
        was_unfrozen = bool(self.unfreeze) and step >= self.unfreeze[group]
        if step < self.freeze or (was_unfrozen and not again):
            return None
        between = self.unfreeze and self.refreeze is not None and self.unfreeze[group] < self.refreeze
        return self.refreeze if again and between else self.freeze

    def trained_for(self, group: int, step: int) -> int:
        """For how many steps a group that trains at this step has been unfrozen, including this one."""
        if not self.unfreeze or step < self.unfreeze[group] or self.frozen_since(group, step) is not None:
            return 0
        return step - self.unfreeze[group] + 1

    def trained_steps(self, group: int, step: int) -> int:
        """The number of steps up to and including this one in which a group has trained."""
        if not self.unfreeze:
            return min(step + 1, self.freeze)
        end = step + 1 if self.refreeze is None else min(step + 1, self.refreeze)
        return min(step + 1, self.freeze) + max(0, end - self.unfreeze[group])

    def lr_factor(self, group: int, step: int) -> float:
        """The factor of a group's learning rate: below 1 while it warms up."""
        trained = self.trained_for(group, step)
        return trained / self.warmup if 0 < trained < self.warmup else 1.0

    @property
    def borders(self) -> tuple[int, ...]:
        """The first step of every stage, 0 among them."""
        return tuple(
            sorted({0, self.freeze, *self.unfreeze, *([] if self.refreeze is None else [self.refreeze])})
        )


def _is_point(value: Any, zero: bool = False) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return (value == 0 and zero) or 0 < value < 1 or (value >= 1 and value == int(value))


def _steps(point: float, total: int) -> int:
    """A point in steps, at least 1, so that what is frozen at step 0 never depends on the run's length."""
    return max(1, round(point * total)) if point < 1 else int(point)
