"""How many times higher a method's best learning rate is than the reference's: ratios, counted.

A grid knows a best rate to one of its steps, so ratios are coarse and often all the same. They are not
averaged for a verdict but counted: a sign test says whether most are at least the claimed one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from oelm.claims.data import (
    NOT_DECIDED,
    REFUTED,
    SUPPORTED,
    Claim,
    Interval,
    Said,
    say,
    show,
    show_p,
    show_problems,
)
from oelm.study import statistics
from oelm.study.matrix import Cell, Scores, best_rate
from oelm.study.result_types import LEVEL, Arm, Group
from oelm.system.messages import notice

SIGN_TEST_FROM = 6  # ratios: with fewer a two-sided sign test cannot go below 5 %


@dataclass(frozen=True)
class Counted:
    """A verdict on some ratios; the number is their geometric mean."""

    verdict: str
    number: float | None
    interval: Interval | None
    said: list[Said]


def rate_ratios(claim: Claim, group: Group) -> tuple[list[float], list[Said]]:
    """One ratio for each seed of the choice in a setting; and why there are none, or what they mean."""
    ours, theirs = group.arms[claim.method], group.arms[claim.reference]
    if not (group.matrix and ours.chosen and theirs.chosen and ours.lr and theirs.lr):
        return [], [say("rates_none")]
    grid = group.matrix.grid
    step = max(high / low for low, high in pairwise(grid))
    if {ours.lr, theirs.lr} & {grid[0], grid[-1]}:
        return [], [say("rates_edge")]
    if step > claim.ratio[1]:
        return [], [say("rates_coarse", step=step, low=claim.ratio[0], high=claim.ratio[1])]
    unlearned = {
        arm.method: [r.seed for r in arm.trials if r.lr == arm.lr and r.results.get("at_chance")]
        for arm in (ours, theirs)
    }
    if any(unlearned.values()):
        runs = [notice("study.seeds", method=name, seeds=seeds) for name, seeds in unlearned.items() if seeds]
        return [], [say("problems", problems=show_problems([notice("problem.at_chance", runs=runs)]))]
    said = [say("rates_step", step=step)]
    own, there = ours.rates.get(ours.lr), ours.rates.get(theirs.lr)
    if own is not None and there is not None and ours.lr != theirs.lr:
        lost = show(
            group.points(own) - group.points(there), "points" if group.kind == "share" else "%", False
        )
        said.append(say("rates_cost", lost=lost, method=claim.method, reference=claim.reference))
    return _by_seed(group, ours, theirs, grid), said


def _by_seed(group: Group, ours: Arm, theirs: Arm, grid: Sequence[float]) -> list[float]:
    scores = {Cell(r.method, r.lr, r.seed, True): r.validation for r in (*ours.trials, *theirs.trials)}
    ratios = []
    for seed in sorted({cell.seed for cell in scores}):
        if all(Cell(arm.method, lr, seed, True) in scores for arm in (ours, theirs) for lr in grid):
            high = _only_best(ours.method, grid, seed, scores, group.larger_is_better)
            low = _only_best(theirs.method, grid, seed, scores, group.larger_is_better)
            if high is not None and low is not None:
                ratios.append(high / low)
    return ratios


def _only_best(method: str, grid: Sequence[float], seed: int, scores: Scores, larger: bool) -> float | None:
    """The best rate of a seed; None where all failed, or several are equally good: which is then chance."""
    best = best_rate(method, grid, [seed], scores, larger)
    if best is None:
        return None
    top = scores[Cell(method, best, seed, True)]
    tied = [lr for lr in grid if scores[Cell(method, lr, seed, True)] == top]
    return best if len(tied) == 1 else None


def count_ratios(claim: Claim, ratios: Sequence[float]) -> Counted:
    """Whether most of the ratios are at least the claimed one."""
    from scipy import stats

    if not ratios:
        return Counted(NOT_DECIDED, None, None, [say("rates_nothing")])
    logs = statistics.interval([math.log(ratio) for ratio in ratios])
    number = math.exp(logs.mean)
    interval = None if logs.low is None or logs.high is None else (math.exp(logs.low), math.exp(logs.high))
    least, n = claim.ratio[0], len(ratios)
    k = sum(ratio > 0.99 * least for ratio in ratios)  # 3e-4 / 1e-4 is not quite 3
    p = float(stats.binomtest(k, n).pvalue)
    verdict = NOT_DECIDED if p >= LEVEL else SUPPORTED if 2 * k > n else REFUTED
    spread = say("rates_interval", low=interval[0], high=interval[1]) if interval else ("", "")
    said = [say("rates_found", method=claim.method, reference=claim.reference, number=number, k=k, n=n,
                low=least, p=show_p(p), interval=spread)]  # fmt: skip
    if n < SIGN_TEST_FROM:
        said.append(say("rates_few", n=SIGN_TEST_FROM))
    return Counted(verdict, number, interval, said)
