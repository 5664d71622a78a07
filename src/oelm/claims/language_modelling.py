"""Language modelling on the page of findings: the perplexity and cost of each arm, and whether a cheap arm is
near `baseline`.

An arm is cheap if it keeps Q and K, all that `oelm` freezes, frozen in nearly all steps and adds few learned
parameters.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from oelm.study.decide import LEVEL, combine
from oelm.study.records import mean_of
from oelm.study.report import numbers
from oelm.study.result_types import Analysis, ArmResult, Comparison, Group
from oelm.study.statistics import holm

METHOD, REFERENCE = "oelm", "baseline"
NEAR = 5.0  # per cent of baseline's perplexity
EXTRA = 0.05  # parameters that a cheap arm may learn beyond `oelm`'s, as a share of those of Q and K
FROZEN = 0.8  # the share of the steps in which a cheap arm has Q and K frozen
BITS = ("test", "metrics", "bits_per_byte")

Setting = tuple[Analysis, Group]


def language_settings(analyses: Iterable[Analysis]) -> list[Setting]:
    """The complete settings that are measured by perplexity, the shortest training first."""
    settings = [(a, g) for a in analyses for g in a.groups if g.kind == "perplexity" and a.complete(g)]
    return sorted(settings, key=lambda setting: (setting[1].task, setting[1].model, _steps(setting[1])))


def sentences(settings: Sequence[Setting]) -> list[str]:
    """For each setting with a verdict the cheapest arm near baseline, or how far the best is; then how the
    gap of `oelm` changes with the length of training."""
    decided = [(a, g) for a, g in settings if any(c.verdict != "void" for c in a.of_group(g))]
    texts = [sentence for a, g in decided if (sentence := _nearest(a, g))]
    gaps: dict[tuple[str, str], dict[int, Comparison]] = {}
    for analysis, group in settings:
        if (comparison := _comparison(analysis, group, METHOD)) is not None:
            by_length = gaps.setdefault((group.task, group.model), {})
            known = by_length.get(_steps(group))
            if known is None or len(known.differences) < len(comparison.differences):
                by_length[_steps(group)] = comparison
    for (task, model), by_length in gaps.items():
        if len(by_length) > 1:
            what = f"Perplexity of `{METHOD}` above that of `{REFERENCE}` on {task} ({model})"
            parts = [
                f"{_above(c)} after {n:,} steps (n = {len(c.differences)})" for n, c in by_length.items()
            ]
            texts.append(f"{what}: {'; '.join(parts)}.")
    return texts


def table_rows(settings: Sequence[Setting]) -> list[dict[str, str]]:
    rows = []
    for analysis, group in settings:
        for arm in group.arms.values():
            if not arm.values:
                continue
            comparison = _comparison(analysis, group, arm.method)
            trained = _trained(arm)
            rows.append(
                {
                    "task": group.name, "model": group.model, "steps": f"{_steps(group):,}",
                    "method": arm.method, "perplexity": numbers.fixed(fmean(arm.values), 2),
                    "bits": numbers.fixed(mean_of(arm.finished, *BITS), 3), "n": str(len(arm.values)),
                    "above": _above(comparison) if comparison else numbers.NOTHING,
                    "trained": numbers.count(None if trained is None else round(trained)),
                    "time": numbers.time_of(arm.step_time()), "title": analysis.title,
                }
            )  # fmt: skip
    return rows


def _comparison(analysis: Analysis, group: Group, method: str) -> Comparison | None:
    comparison = analysis.comparison(group, method, REFERENCE)
    return comparison if comparison and comparison.combined else None


def _excess(comparison: Comparison) -> float:
    """The excess of the perplexity over the reference arm's, in per cent."""
    assert comparison.combined is not None
    return -comparison.group.shown(comparison.combined.mean)


def _above(comparison: Comparison) -> str:
    assert comparison.combined is not None
    interval = comparison.group.shown_interval(comparison.combined)
    low, high = (None if end is None else -end for end in (interval.high, interval.low))
    return numbers.with_interval(-interval.mean, low, high, " %")


def _nearest(analysis: Analysis, group: Group) -> str | None:
    """The sentence on the cheapest arm within NEAR per cent of baseline; None where nothing was compared."""
    cheap = [
        c for arm in _cheap(group) if (c := _comparison(analysis, group, arm.method)) and c.verdict != "void"
    ]
    if not cheap:
        return None
    within = f"within {NEAR:g} % of `{REFERENCE}`'s perplexity"
    what = (
        f"On {group.task} ({group.model}, {_steps(group):,} steps), of the methods with Q and K frozen for "
        f"at least {FROZEN:.0%} of the steps and at most {EXTRA:.0%} as many parameters learned beside them"
    ).replace("%", " %")
    near = [c for c in _shown_near(analysis) if c in cheap]
    if near:
        first = min(near, key=lambda c: (_trained(c.arm) or 0.0, _excess(c)))
        return f"{what}, the cheapest shown to be {within} is {_perplexities(first)}."
    best = min(cheap, key=_excess)
    shown = "" if all(_beyond(c) for c in cheap) else "shown to be "
    return f"{what}, none is {shown}{within}; the best is {_perplexities(best)}."


def _shown_near(analysis: Analysis) -> list[Comparison]:
    """The comparisons that are significantly within NEAR per cent, corrected (Holm) for all planned ones:
    several arms are tried, and the mean of one that is just beyond is within as often as not."""
    looks = len(analysis.study.looks) if analysis.study else 1
    p = [
        combine(c.combined.tables, c.group.bound(NEAR), looks).margin_p
        if c.combined and c.verdict != "void"
        else None
        for c in analysis.comparisons
    ]
    corrected = holm(p, analysis.planned - len(p))
    return [c for c, p in zip(analysis.comparisons, corrected, strict=True) if p is not None and p < LEVEL]


def _beyond(comparison: Comparison) -> bool:
    """Whether the whole interval is beyond NEAR per cent."""
    assert comparison.combined is not None
    high = comparison.combined.high  # of a difference that is positive where the method is better
    return high is not None and -comparison.group.shown(high) > NEAR


def _perplexities(comparison: Comparison) -> str:
    perplexities = [numbers.fixed(fmean(arm.values), 2) for arm in (comparison.arm, comparison.reference_arm)]
    return f"`{comparison.method}`: {perplexities[0]} against {perplexities[1]}, {_above(comparison)}"


def _cheap(group: Group) -> list[ArmResult]:
    """The arms that have Q and K frozen in nearly all steps and add few learned parameters."""
    if METHOD not in group.arms or not group.arms[METHOD].values:
        return []
    reference = _stages(group.arms[METHOD])
    if not reference:
        return []
    qk, most = reference[0]["frozen"], reference[0]["trainable"]
    cheap = []
    for arm in group.arms.values():
        stages = _stages(arm) if arm.values else []
        frozen = _mean(stages, "frozen", _steps(group))
        # Parameters that a schedule unfreezes are counted by the steps in which they are frozen.
        extra = min((stage["trainable"] for stage in stages), default=0) - most
        if frozen is not None and frozen >= round(FROZEN * qk) and extra <= EXTRA * qk:
            cheap.append(arm)
    return cheap


def _trained(arm: ArmResult) -> float | None:
    """The number of parameters that train, on average over the steps."""
    return _mean(_stages(arm), "trainable", arm.records[0].results.get("steps") or 1)


def _stages(arm: ArmResult) -> list[dict[str, Any]]:
    """The first step of every stage, and the numbers of trainable and frozen parameters from it on."""
    parameters = arm.records[0].results.get("parameters") or {}
    return list(parameters.get("stages") or ([{"step": 0, **parameters}] if parameters else []))


def _mean(stages: Sequence[dict[str, Any]], key: str, steps: int) -> float | None:
    if not stages:
        return None
    ends = [*(stage["step"] for stage in stages[1:]), steps]
    spans = zip(stages, ends, strict=True)
    return sum(stage[key] * max(0, end - stage["step"]) for stage, end in spans) / steps


def _steps(group: Group) -> int:
    """The number of steps of a setting's runs."""
    return next((steps for record in group.records if (steps := record.results.get("steps"))), 1)
