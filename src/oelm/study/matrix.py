"""Which runs a study needs next, as a function of what is known so far: nothing to remember, nothing to lose.

Phase one tries every rate of the grid with every method and looks at validation only. While a method is best
at an edge of the grid, the grid grows there by one rate, for all methods. Phase two measures each method at
its own best rate, with fresh seeds, on the test split.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean


@dataclass(frozen=True, order=True)
class Cell:
    """One run of a task's matrix. `choosing` runs never see the test split."""

    method: str
    lr: float
    seed: int
    choosing: bool


# What is known of a cell: its validation score; None where its training diverged or stayed at chance level.
# A cell that was never evaluated (not run yet, or ended by a fault of the machine) is not there.
Scores = dict[Cell, float | None]


@dataclass
class Matrix:
    """The state of one task's part of a study."""

    grid: list[float]
    chosen: dict[str, float] = field(default_factory=dict)  # method -> rate, once the choice is made
    needed: list[Cell] = field(default_factory=list)  # every cell of the phases that have begun
    at_edge: list[str] = field(default_factory=list)  # methods best at an edge that may not grow any more
    failed: list[str] = field(default_factory=list)  # methods that no rate works for
    unevaluated: list[Cell] = field(default_factory=list)  # trials whose scores are not known

    @property
    def decided(self) -> bool:
        return bool(self.chosen or self.failed)


def unfold(
    methods: Sequence[str],
    lrs: Sequence[float],
    choice_seeds: Sequence[int],
    seeds: Sequence[int],
    widen: int,
    scores: Scores,
    larger_is_better: bool,
    partial: bool = False,
) -> Matrix:
    """The matrix as far as it can be known from these scores.

    A study waits for every trial before it chooses. `partial` is for a report on what there is: methods whose
    trials are all evaluated choose without the others, which choose nothing and ask for no wider grid.
    """
    matrix = Matrix(grid=sorted(lrs))
    measured: Callable[[str, float], list[Cell]] = lambda m, lr: [Cell(m, lr, s, False) for s in seeds]  # noqa: E731
    if len(matrix.grid) == 1:  # nothing to choose
        matrix.chosen = dict.fromkeys(methods, matrix.grid[0])
        matrix.needed = [cell for m in methods for cell in measured(m, matrix.grid[0])]
        return matrix
    room = {"low": widen, "high": widen}
    while True:
        matrix.needed = [Cell(m, lr, s, True) for s, lr, m in product(choice_seeds, matrix.grid, methods)]
        matrix.unevaluated = [cell for cell in matrix.needed if cell not in scores]
        if matrix.unevaluated and not partial:
            return matrix
        whole = [m for m in methods if all(cell.method != m for cell in matrix.unevaluated)]
        best = {m: best_rate(m, matrix.grid, choice_seeds, scores, larger_is_better) for m in whole}
        edges = {
            "low": [m for m in whole if best[m] == matrix.grid[0]],
            "high": [m for m in whole if best[m] == matrix.grid[-1]],
        }
        growing = [side for side in edges if edges[side] and room[side] > 0]
        if not growing:
            break
        for side in growing:
            room[side] -= 1
            matrix.grid = grown(matrix.grid, side)
    matrix.at_edge = sorted({*edges["low"], *edges["high"]})
    matrix.failed = [m for m in whole if best[m] is None]
    matrix.chosen = {m: lr for m, lr in best.items() if lr is not None}
    matrix.needed += [cell for m, lr in matrix.chosen.items() for cell in measured(m, lr)]
    return matrix


def best_rate(
    method: str, grid: Sequence[float], seeds: Sequence[int], scores: Scores, larger_is_better: bool
) -> float | None:
    """The rate with the best mean validation score, the lower one of equals; one that diverged is out."""
    means = rate_means(method, grid, seeds, scores)
    usable = {lr: mean for lr, mean in means.items() if mean is not None}
    if not usable:
        return None
    sign = -1 if larger_is_better else 1
    return min(usable, key=lambda lr: (sign * usable[lr], lr))


def rate_means(
    method: str, grid: Sequence[float], seeds: Sequence[int], scores: Scores
) -> dict[float, float | None]:
    """Rate -> mean validation score over the choice's seeds; None where a run diverged."""
    means: dict[float, float | None] = {}
    for lr in grid:
        values = [scores[Cell(method, lr, seed, True)] for seed in seeds]
        known = [value for value in values if value is not None]
        means[lr] = fmean(known) if len(known) == len(values) else None
    return means


def grown(grid: Sequence[float], side: str) -> list[float]:
    """The grid with one more rate at a side, in its own steps: 1e-4, 3e-4, 1e-3 goes on with 3e-3, 1e-2."""
    rates = sorted(grid)
    if side == "low":
        rates = [1 / rate for rate in reversed(rates)]
    step = rates[-2] / rates[-3] if len(rates) > 2 else rates[-1] / rates[-2]
    added = 1 / (rates[-1] * step) if side == "low" else rates[-1] * step
    round_to = lambda rate, digits: float(f"{rate:.{digits}g}")  # noqa: E731
    digits = 1 if all(round_to(rate, 1) == rate for rate in grid) else 2  # as round as the rates given
    return sorted({*grid, round_to(added, digits)})
