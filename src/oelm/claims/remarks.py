"""Remarks on a verdict: the setting, trivial baselines, controls, growth with the corpus."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean

from scipy import stats

from oelm.claims import data
from oelm.claims.cases import Case, Setting, make_case
from oelm.claims.data import Claim, Sentence, join, sentence
from oelm.study import statistics
from oelm.study.decide import LEVEL
from oelm.study.result_types import Group


def describe_setting(claim: Claim, setting: Setting) -> Sentence:
    """The setting as a sentence: task, model, recipe and learning rates."""
    arm, reference = setting.arms_of(claim)
    if arm.chosen and reference.chosen:
        key = "rates_chosen"
    else:
        key = "rates_same" if arm.lr and arm.lr == reference.lr else "rates_unclear"
    rates = sentence(key, **claim.names, lr=arm.lr, reference_lr=reference.lr)
    model, size = setting.model, setting.published_size
    known = sentence("published_size" if model == size else "other_size", model=model, published=size)
    values = {"task": setting.group.task, "recipe": _recipe(setting.group), "rates": rates}
    return sentence("where", model=known if size else model, **values)


def _recipe(group: Group) -> Sentence:
    record = group.records[0]
    training, model = record.config.training, asdict(record.config.model)
    values = {"epochs": training.epochs, "steps": training.steps}
    values["samples"] = record.results.get("samples")  # the data may be a part of the original
    values |= {"batch": training.batch_size, "batch_tokens": training.batch_tokens}
    values["length"] = record.config.task.max_length
    texts = [sentence(key, value=value) for key, value in values.items() if value]
    plain = [training.schedule, group.precision]
    plain += [f"{key} {value}" for key, value in model.items() if key != "name" and value is not None]
    return join([*texts, *((text, text) for text in plain)], (", ", "，"))


def behind_sentences(claim: Claim, setting: Setting) -> list[Sentence]:
    """The trivial baselines that are better than an arm."""
    group, sentences = setting.group, []
    for arm in reversed(setting.arms_of(claim)):
        for name in group.behind(arm):
            score, baseline = fmean(arm.values), group.trivial_baselines[name][group.metric]
            values = {"method": arm.method, "score": f"{score:.4g}", "baseline": f"{baseline:.4g}"}
            sentences.append(sentence("behind", name=name, **values))
    return sentences


def control_sentence(claim: Claim, case: Case, gains: bool) -> Sentence:
    """The comparison of the method with the control arm. The control explains the gain only if it is better,
    or equivalent within the claim's margin."""
    control, setting = case.part.control, case.setting
    assert control is not None and setting is not None
    templates = data.claim_data()["controls"][control]
    if control not in setting.group.arms:
        return data.fill(templates["absent"])
    control_case = make_case(claim, setting, control)
    if control_case.problem or control_case.mean is None:
        return data.fill(templates["void"], problems=control_case.problem or sentence("nothing"))
    p, p_within = control_case.p(0.0), control_case.decisive_p()
    differs = p is not None and p < LEVEL
    equivalent = (
        p_within is not None and p_within < LEVEL and control_case.ahead and not control_case.collapsed
    )
    key = "better" if differs else "open"
    if equivalent or (differs and control_case.mean < 0):
        key = "other"
    template = templates.get(key if gains else "plain", templates["plain"])
    return data.fill(template, what=control_case.what, margin=control_case.show(case.part.control_margin))


def growth_sentence(tasks: Sequence[str], cases: Sequence[Case]) -> Sentence:
    """Whether the measure rises from task to task; the verdict does not depend on it."""
    usable = [case for case in cases if not case.problem and case.task in tasks]
    names = data.listed(tasks)
    if sorted(case.task for case in usable) != sorted(tasks):
        return sentence("growth_few", tasks=names)
    usable.sort(key=lambda case: tasks.index(case.task))
    # Welch's test: the seeds of different corpora are not pairs.
    losses = [[100 * (score / reference - 1) for score, reference in case.scores] for case in usable]
    tests = [stats.ttest_ind(b, a, equal_var=False) for a, b in pairwise(losses)]
    adjusted = statistics.holm([float(test.pvalue) for test in tests])
    clear = [p is not None and p < LEVEL for p in adjusted]
    for (a, b), test, significant, p in zip(pairwise(usable), tests, clear, adjusted, strict=True):
        if significant and test.statistic < 0:
            falls = {"first": a.task, "second": b.task, "p": data.format_p(p)}
            return sentence("growth_no", tasks=names, **falls)
    return sentence("growth_yes" if all(clear) else "growth_open", tasks=names)
