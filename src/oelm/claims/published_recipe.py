"""The published recipe on the page of findings: whether repeats show the published gap, and what changes it.

A study repeats a recipe if it gives an arm a learning rate of its own. It decides nothing; its differences
and their intervals are listed beside the published one.
"""

from collections.abc import Iterable

from oelm.claims import data
from oelm.claims.language_modelling import METHOD, REFERENCE
from oelm.study.report import numbers
from oelm.study.result_types import Analysis, Comparison, Group


def difference(comparison: Comparison) -> str:
    assert comparison.combined is not None
    interval = comparison.group.shown_interval(comparison.combined)
    return numbers.with_interval(interval.mean, interval.low, interval.high)


def repeats_recipe(analysis: Analysis) -> bool:
    study = analysis.study
    return study is not None and any(arm.lr for arm in study.arms.values())


def recipe_sentences(analyses: Iterable[Analysis]) -> list[str]:
    """For each setting that repeats a recipe: the difference as published, then those of other arms."""
    sentences = []
    for analysis in analyses:
        for group in analysis.groups if repeats_recipe(analysis) else ():
            known = [c for c in analysis.of_group(group) if _compares_methods(c)]
            if analysis.complete(group) and known:
                sentences += _sentences(group, known)
    return sentences


def _compares_methods(comparison: Comparison) -> bool:
    """Whether it compares METHOD with REFERENCE, by the arms' methods instead of their names."""
    arms = (comparison.arm, comparison.reference_arm)
    methods = [arm.records[0].config.method.name if arm.records else None for arm in arms]
    return methods == [METHOD, REFERENCE] and comparison.combined is not None


def _sentences(group: Group, known: list[Comparison]) -> list[str]:
    claim = next(claim for claim in data.claim_data()["claims"] if claim["id"] == "C1")
    published = claim["parts"].get(group.task, {}).get("published")
    beside = f"; published: {published:+g}" if published else ""
    first, others = known[0], known[1:]
    n = len(first.differences)
    lines = [
        f"On {group.task} ({group.model}), with the published recipe, `{first.method}` minus "
        f"`{first.reference}` is {difference(first)} points (n = {n}{beside})."
    ]
    if others:
        parts = [f"`{c.method}` minus `{c.reference}` {difference(c)}" for c in others]
        lines.append(f"Between other arms of the two methods: {'; '.join(parts)}.")
    return lines
