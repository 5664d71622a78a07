"""How many times higher a method's best learning rate is than the reference arm's: ratios, counted.

A grid determines the best learning rate to one of its steps only, so ratios are coarse and often equal. They
are not averaged for a verdict but counted: a sign test says whether most are at least the claimed one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from oelm.claims.cases import arms_of
from oelm.claims.data import (
    NOT_DECIDED,
    REFUTED,
    SUPPORTED,
    Claim,
    Interval,
    Sentence,
    format_p,
    format_problems,
    sentence,
    with_unit,
)
from oelm.study import statistics
from oelm.study.decide import LEVEL
from oelm.study.matrix import Cell, Scores, best_lr
from oelm.study.result_types import Group
from oelm.system.messages import notice

SIGN_TEST_FROM = 6  # ratios: with fewer a two-sided sign test cannot reach 5 %


@dataclass(frozen=True)
class RatioVerdict:
    """A verdict on some ratios; the number is their geometric mean."""

    verdict: str
    number: float | None
    interval: Interval | None
    sentences: list[Sentence]


def lr_ratios(claim: Claim, group: Group) -> tuple[list[float], list[Sentence]]:
    """One ratio for each seed of the trials; and why there are none, or what they mean."""
    arm, reference = arms_of(claim, group)
    if not (group.matrix and arm.chosen and reference.chosen and arm.lr and reference.lr):
        return [], [sentence("rates_none")]
    grid = group.matrix.grid
    step = max(high / low for low, high in pairwise(grid))
    if {arm.lr, reference.lr} & {grid[0], grid[-1]}:
        return [], [sentence("rates_edge")]
    if step > claim.ratio[1]:
        return [], [sentence("rates_coarse", step=step, low=claim.ratio[0], high=claim.ratio[1])]
    at_chance = {
        a.method: [r.seed for r in a.trials if r.lr == a.lr and r.results.get("at_chance")]
        for a in (arm, reference)
    }
    if any(at_chance.values()):
        runs = [notice("study.seeds", method=name, seeds=seeds) for name, seeds in at_chance.items() if seeds]
        problem = notice("problem.at_chance", runs=runs)
        return [], [sentence("problems", problems=format_problems([problem]))]
    sentences = [sentence("rates_step", step=step)]
    best, at_reference = arm.lr_scores.get(arm.lr), arm.lr_scores.get(reference.lr)
    if best is not None and at_reference is not None and arm.lr != reference.lr:
        loss = group.points(best) - group.points(at_reference)
        lost = with_unit(loss, "points" if group.kind == "share" else "%", False)
        sentences.append(sentence("rates_cost", lost=lost, **claim.names))
    return _by_seed(claim, group, grid), sentences


def _by_seed(claim: Claim, group: Group, grid: Sequence[float]) -> list[float]:
    scores = {r.cell: r.validation for arm in arms_of(claim, group) for r in arm.trials}
    methods = (claim.method, claim.reference_arm)
    ratios = []
    for seed in sorted({cell.seed for cell in scores}):
        if all(Cell(method, lr, seed, True) in scores for method in methods for lr in grid):
            high, low = (_unique_best(m, grid, seed, scores, group.larger_is_better) for m in methods)
            if high is not None and low is not None:
                ratios.append(high / low)
    return ratios


def _unique_best(method: str, grid: Sequence[float], seed: int, scores: Scores, larger: bool) -> float | None:
    """The best learning rate of a seed; None if all trials failed, or if several are equally good."""
    best = best_lr(method, grid, [seed], scores, larger)
    if best is None:
        return None
    top = scores[Cell(method, best, seed, True)]
    tied = [lr for lr in grid if scores[Cell(method, lr, seed, True)] == top]
    return best if len(tied) == 1 else None


def judge_ratios(claim: Claim, ratios: Sequence[float]) -> RatioVerdict:
    """Whether most of the ratios are at least the claimed one."""
    from scipy import stats

    if not ratios:
        return RatioVerdict(NOT_DECIDED, None, None, [sentence("rates_nothing")])
    logs = statistics.interval([math.log(ratio) for ratio in ratios])
    number = math.exp(logs.mean)
    interval = None if logs.low is None or logs.high is None else (math.exp(logs.low), math.exp(logs.high))
    least, n = claim.ratio[0], len(ratios)
    k = sum(ratio > 0.99 * least for ratio in ratios)  # 3e-4 / 1e-4 is not quite 3
    p = float(stats.binomtest(k, n).pvalue)
    verdict = NOT_DECIDED if p >= LEVEL else SUPPORTED if 2 * k > n else REFUTED
    span = sentence("rates_interval", low=interval[0], high=interval[1]) if interval else ("", "")
    counts = {"number": number, "k": k, "n": n, "low": least, "p": format_p(p), "interval": span}
    sentences = [sentence("rates_found", **claim.names, **counts)]
    if n < SIGN_TEST_FROM:
        sentences.append(sentence("rates_few", n=SIGN_TEST_FROM))
    return RatioVerdict(verdict, number, interval, sentences)
