"""The parameters of a model that are frozen at a step of training; without a schedule, always the same."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from oelm.method import Method
from oelm.models.families import depths_from_top, frozen_names
from oelm.models.freeze_schedule import FreezeSchedule, Timeline


class At(NamedTuple):
    """A moment in a run: its step, and the run's total number of steps."""

    step: int = 0
    total: int = 1  # has no effect at step 0


START = At()


def unfreezing_groups(model: nn.Module, method: Method) -> dict[str, int]:
    """Every parameter that the method freezes at any time, by name, with its group 0, 1, ...; groups are
    unfrozen one after another. Layers of an encoder and a decoder go in pairs, from the top."""
    names = frozen_names(model, method)
    order = method.schedule.order if method.schedule else "together"
    if order == "together":
        return dict.fromkeys(names, 0)
    depths = {name: max(1, depth) for name, depth in depths_from_top(model).items() if name in names}
    turns = sorted({*depths.values()}, reverse=order == "bottom-up")
    return {name: turns.index(depth) for name, depth in depths.items()}


def timeline_of(schedule: FreezeSchedule, groups: Iterable[int], total: int) -> Timeline:
    return schedule.resolve(len({*groups}), total)


def frozen_at(model: nn.Module, method: Method, at: At) -> dict[str, int]:
    """The parameters that the method has frozen at a step: name -> the step since which they are frozen."""
    if not method.schedule:
        return dict.fromkeys(frozen_names(model, method), 0)
    groups = unfreezing_groups(model, method)
    return frozen_by(timeline_of(method.schedule, groups.values(), at.total), groups, at.step)


def frozen_by(timeline: Timeline, groups: Mapping[str, int], step: int) -> dict[str, int]:
    """The parameters that a timeline has frozen at a step: name -> the step since which they are frozen."""
    since = {name: timeline.frozen_since(group, step) for name, group in groups.items()}
    return {name: first for name, first in since.items() if first is not None}
