"""How many times higher a method's best learning rate is than the reference arm's: ratios, counted.

A grid determines the best learning rate to one of its steps only, so ratios are coarse and often equal. They
are not averaged for a verdict but counted: a sign test says whether most are at least the claimed one.
"""

import math
from collections.abc import Sequence
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
from oelm.study.result_types import Group
from oelm.system.messages import notice

SIGN_TEST_FROM = 6  # ratios: with fewer a two-sided sign test cannot reach 5 %


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
    """The ratio of each seed whose trials are complete and leave one best learning rate to each method."""
    arms, ratios = arms_of(claim, group), []
    for seed in sorted({trial.seed for arm in arms for trial in arm.trials}):
        best = []
        for arm in arms:
            scores = {trial.lr: trial.validation for trial in arm.trials if trial.seed == seed}
            usable = [score for lr in grid if (score := scores.get(lr)) is not None]  # None: it failed
            if usable and set(grid) <= scores.keys():
                top = max(usable) if group.larger_is_better else min(usable)
                tied = [lr for lr in grid if scores[lr] == top]
                best += tied if len(tied) == 1 else []
        if len(best) == 2:
            ratios.append(best[0] / best[1])
    return ratios


def judge_ratios(
    claim: Claim, ratios: Sequence[float]
) -> tuple[str, float | None, Interval | None, list[Sentence]]:
    """Whether most of the ratios are at least the claimed one: the verdict, their geometric mean with its
    interval, and the reason."""
    from scipy import stats

    if not ratios:
        return NOT_DECIDED, None, None, [sentence("rates_nothing")]
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
    return verdict, number, interval, sentences
