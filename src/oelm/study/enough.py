"""How small a difference a study's seeds and test items can show, estimated before its runs are measured."""

import math
from pathlib import Path

import numpy as np

from oelm.study.decide import LEVEL, choice_noise
from oelm.study.folder import Setting, StudyFolder
from oelm.study.two_way import half_width_of_answers, seeds_for_noise
from oelm.training.resolve import objective_of

DISAGREE = 0.1  # the share of test items on which two runs are taken to disagree
MEANS = ("accuracy", "exact_match", "f1")  # of items between 0 and 1


def expected_precision(setting: Setting, out: Path) -> str:
    """One sentence on the half-width of a task's intervals: by its number of test items and, once the trials
    are done, by their noise. Of several looks the last one is described."""
    table, share, looks = setting.study.table, setting.larger_is_better, setting.study.looks
    seeds, level = looks[-1], 1 - LEVEL / len(looks)
    unit = "points" if share else "%"
    bound = table.margin if share else 100 * math.log1p(table.margin / 100)
    items = len(np.unique(objective_of(setting.config, setting.store).groups("test")))
    if items < 2:
        return (
            f"{setting.task}: all test items belong together, so there is no verdict with any number of seeds"
        )
    by_chance, worst = half_width_of_answers(DISAGREE, seeds, items, level)
    is_mean, never_enough = setting.metric in MEANS, worst > bound
    never = f"; then no number of seeds is enough for the margin of {table.margin:g}" if never_enough else ""
    noise, df = choice_noise(_trials(setting, out))
    if not df:
        start = f"{setting.task}: {items:,} test items"
        if not is_mean:
            return f"{start}; what they can show by {setting.metric} is known once runs have been tested"
        return (
            f"{start}; where two runs disagree on {DISAGREE:.0%} of them, {seeds} seeds show a "
            f"difference of ±{by_chance:.2g} {unit} at best, ±{worst:.2g} if it is always on the same "
            f"items{never or f' (the margin is {table.margin:g})'}"
        )
    width, needed = seeds_for_noise(noise, seeds, bound, level)
    count = f"{needed} seeds" if needed else "more than 999 seeds"
    shown_width = width if share else 100 * math.expm1(width / 100)
    text = (
        f"{setting.task}: by the noise of the trials {seeds} seeds show a difference of about "
        f"±{shown_width:.2g} {unit}, and the margin of {table.margin:g} takes {count}"
    )
    if not is_mean:
        return f"{text}; {items:,} test items add to it"
    both = math.hypot(width, worst)
    return (
        f"{text}; ±{both:.2g} if runs always disagree on the same {DISAGREE:.0%} of the {items:,} test "
        f"items{never}"
    )


def _trials(setting: Setting, out: Path) -> list[dict[float, list[float]]]:
    """For each arm, by learning rate: the scores of the trials, where all are there, on the scale of
    differences."""
    arms: dict[str, dict[float, list[float]]] = {}
    for record in StudyFolder(out).records()[0] if out.exists() else ():
        record = record.with_metric(setting.metric)
        if record.choosing and record.identity.setting == setting.key and record.validation is not None:
            value = record.validation if setting.larger_is_better else -math.log(record.validation)
            arms.setdefault(record.method, {}).setdefault(record.lr, []).append(100 * value)
    count = setting.study.table.choose_seeds
    return [{lr: v for lr, v in by_lr.items() if len(v) == count} for by_lr in arms.values()]
