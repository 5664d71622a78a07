"""The runs a study needs next, computed from the scores known so far, so that no state has to be kept.

Phase one tries every learning rate of the grid with every method, on the validation split only. While a
method's best learning rate is at an edge of the grid, the grid grows there by one, for all methods. Phase two
measures each method at its own best learning rate, and at those that could as well be the best, with fresh
seeds, on the test split. It goes seed by seed, so that pairs are complete whenever a study is interrupted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean

from oelm.study.decide import MOST_NEAR_TIES, choice_noise, near_ties


@dataclass(frozen=True, order=True)
class Cell:
    """One run of a task: a trial (`choosing`), which never sees the test split, or a measured run."""

    method: str
    lr: float
    seed: int
    choosing: bool

    @property
    def pairing(self) -> tuple[int, float | None]:
        """A key shared by the runs of several arms that are compared, which must have the same arithmetic."""
        return self.seed, self.lr if self.choosing else None


# Run -> validation score; None if it diverged or stayed at chance level. A run that was never evaluated (not
# started yet, or ended by a fault of the machine) is not in it.
Scores = dict[Cell, float | None]


@dataclass
class Matrix:
    """The runs of one task of a study, and the learning rates chosen so far."""

    grid: list[float]
    chosen: dict[str, float] = field(default_factory=dict)  # method -> learning rate, once chosen
    near_ties: dict[str, list[float]] = field(default_factory=dict)  # method -> all that could be the best
    measured: dict[str, list[float]] = field(default_factory=dict)  # method -> the chosen one, then others
    needed: list[Cell] = field(default_factory=list)  # every run of the phases that have begun
    at_edge: list[str] = field(default_factory=list)  # methods best at an edge that may not grow further
    failed: list[str] = field(default_factory=list)  # methods with a failed trial at every learning rate
    unevaluated: list[Cell] = field(default_factory=list)  # trials without a score


def plan_runs(
    methods: Sequence[str],
    lrs: Sequence[float],
    choice_seeds: Sequence[int],
    seeds: Sequence[int],
    widen: int,
    scores: Scores,
    larger_is_better: bool,
    partial: bool = False,
    measure: str = "near-ties",
    own: Mapping[str, float] | None = None,
) -> Matrix:
    """The matrix as far as these scores determine it. `own`: method -> its own learning rate, allowed only
    with a grid of one.

    A study waits for every trial before it chooses. With `partial`, for a report on an unfinished study,
    the learning rate is chosen for methods whose trials are all evaluated; the others do not widen the grid.
    """
    matrix = Matrix(grid=sorted(lrs))
    if len(matrix.grid) == 1:  # nothing to choose
        matrix.chosen = dict.fromkeys(methods, matrix.grid[0]) | dict(own or {})
        _measure(matrix, seeds)
        return matrix
    widenings = {"low": widen, "high": widen}
    while True:
        matrix.needed = [Cell(m, lr, s, True) for s, lr, m in product(choice_seeds, matrix.grid, methods)]
        matrix.unevaluated = [cell for cell in matrix.needed if cell not in scores]
        if matrix.unevaluated and not partial:
            return matrix
        evaluated = [m for m in methods if all(cell.method != m for cell in matrix.unevaluated)]
        best = {m: best_lr(m, matrix.grid, choice_seeds, scores, larger_is_better) for m in evaluated}
        edges = {
            "low": [m for m in evaluated if best[m] == matrix.grid[0]],
            "high": [m for m in evaluated if best[m] == matrix.grid[-1]],
        }
        growing = [side for side in edges if edges[side] and widenings[side] > 0]
        if not growing:
            break
        for side in growing:
            widenings[side] -= 1
            matrix.grid = widen_grid(matrix.grid, side)
    matrix.at_edge = sorted({*edges["low"], *edges["high"]})
    matrix.failed = [m for m in evaluated if best[m] is None]
    matrix.chosen = {m: lr for m, lr in best.items() if lr is not None}
    matrix.near_ties = _near_ties(matrix, choice_seeds, scores, larger_is_better)
    further: dict[str, list[float]] = {}
    if measure == "near-ties":
        further = {method: lrs[:MOST_NEAR_TIES] for method, lrs in matrix.near_ties.items()}
    elif measure == "all":
        further = {
            m: [lr for lr in matrix.grid if lr_mean(m, lr, choice_seeds, scores) is not None]
            for m in evaluated
        }
    _measure(matrix, seeds, further)
    return matrix


def _measure(
    matrix: Matrix, seeds: Sequence[int], further: Mapping[str, Sequence[float]] | None = None
) -> None:
    """Add the measured runs of every method at its best learning rate and at `further` ones."""
    more = further or {}
    matrix.measured = {m: list(dict.fromkeys([lr, *more.get(m, ())])) for m, lr in matrix.chosen.items()}
    matrix.needed += [
        Cell(m, lr, seed, False) for seed in seeds for m, lrs in matrix.measured.items() for lr in lrs
    ]


def _near_ties(
    matrix: Matrix, choice_seeds: Sequence[int], scores: Scores, larger_is_better: bool
) -> dict[str, list[float]]:
    """The learning rates of every method that could be the best, by the noise of all methods' trials."""
    sign = 1 if larger_is_better else -1
    trials: dict[str, dict[float, list[float]]] = {}
    for method in matrix.chosen:
        by_lr = {lr: [scores[Cell(method, lr, seed, True)] for seed in choice_seeds] for lr in matrix.grid}
        trials[method] = {
            lr: [sign * value for value in values if value is not None]
            for lr, values in by_lr.items()
            if None not in values
        }
    noise, df = choice_noise(list(trials.values()))
    return {method: near_ties(by_lr, noise, df) for method, by_lr in trials.items()}


def best_lr(
    method: str, grid: Sequence[float], seeds: Sequence[int], scores: Scores, larger_is_better: bool
) -> float | None:
    """The learning rate with the best mean validation score, the lowest of equals; None if all failed."""
    means = {lr: lr_mean(method, lr, seeds, scores) for lr in grid}
    usable = {lr: mean for lr, mean in means.items() if mean is not None}
    sign = -1 if larger_is_better else 1
    return min(usable, key=lambda lr: (sign * usable[lr], lr), default=None)


def lr_mean(method: str, lr: float, seeds: Sequence[int], scores: Scores) -> float | None:
    """The mean validation score of the trials at a learning rate; None if one of them failed."""
    values = [scores[Cell(method, lr, seed, True)] for seed in seeds]
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def widen_grid(grid: Sequence[float], side: str) -> list[float]:
    """The grid with one more learning rate at the "low" or "high" side, in the grid's own steps:
    1e-4, 3e-4, 1e-3 continues with 3e-3, 1e-2."""
    lrs = sorted(grid)
    if side == "low":
        lrs = [1 / lr for lr in reversed(lrs)]
    step = lrs[-2] / lrs[-3] if len(lrs) > 2 else lrs[-1] / lrs[-2]
    added = 1 / (lrs[-1] * step) if side == "low" else lrs[-1] * step
    digits = 1 if all(float(f"{lr:.1g}") == lr for lr in grid) else 2  # as round as the given ones
    return sorted({*grid, float(f"{added:.{digits}g}")})
