"""From records to comparisons: what each arm reached at its own best learning rate, and how certain it is.

Everything is computed from the records alone, so a report can be made anywhere and at any time. Runs are
compared within a setting (same data, model and recipe), paired by seed and by test item. Differences are in
points (per cent of the items) or, for a perplexity, 100 times that of its logarithm, shown as per cent; a
positive difference is always an improvement.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oelm.errors import OUTCOMES, UserError
from oelm.study import decide, statistics
from oelm.study.design import Study
from oelm.study.folder import StudyFolder, check_folder, no_runs, records_below
from oelm.study.item_values import ItemValues, agrees, item_values, stand_in_values
from oelm.study.matrix import Cell, Matrix, lr_mean
from oelm.study.records import Record, baselines_of
from oelm.study.result_types import Across, Analysis, ArmResult, Comparison, Group
from oelm.study.two_way import Overall, by_items, overall


def analyse(folder: Path) -> Analysis:
    """Analyse a study's folder, or any folder with runs below it."""
    study: Study | None = None
    plan: dict[str, Any] | None = None
    if (folder / "study.toml").is_file():
        study, plan = StudyFolder(folder).read(), StudyFolder(folder).plan()
    else:
        check_folder(folder)
        # Without its study.toml a report could not tell how a study's learning rates were chosen.
        study_folders = [path.parent for path in sorted(folder.rglob("study.toml"))]
        if studies := [str(study) for study in study_folders if any(study.rglob("results.json"))]:
            more = f" (or one of {len(studies) - 5} more)" if len(studies) > 5 else ""
            names = " or ".join(studies[:5])
            raise UserError(f"{folder} is not a study, but studies are below it: report on {names}{more}")
    records, left_out, damaged = records_below(folder)
    if not any(record.completed or record.results["status"] == "failed" for record in records):
        raise no_runs(folder, damaged)
    planned = StudyFolder(folder).planned() if study else None
    analysis = analyse_records(records, planned, left_out, folder.resolve().name)
    if study and plan is not None and study.plan != plan:  # the verdicts are those of the plan
        changed = analyse_records(records, study, left_out)
        analysis = replace(analysis, changed=changed, changes=_changes(plan, study.plan))
    return replace(analysis, damaged=damaged, unplanned=study is not None and plan is None)


def more_seeds_useless(analysis: Analysis) -> bool:
    """Whether further seeds cannot change a verdict: every comparison is decided, or its few test items
    leave it undecided with any number of seeds."""
    return all(
        c.verdict in ("better", "worse", "equivalent") or _cannot_be_decided(c) for c in analysis.comparisons
    )


def unfinished(analysis: Analysis) -> bool:
    """Whether a study still needs runs, by its records alone."""
    study = analysis.study
    if study is None:
        return False
    if len(analysis.groups) < len(study.tasks):
        return True
    for group in analysis.groups:
        runs = [*group.records, *(record for arm in group.arms.values() for record in arm.failures)]
        done = {record.cell for record in runs if record.evaluated}
        if group.matrix is None or not done.issuperset(group.matrix.needed):
            return True
    return (
        study.table.until_decided and study.table.seeds < study.looks[-1] and not more_seeds_useless(analysis)
    )


def _cannot_be_decided(comparison: Comparison) -> bool:
    """Whether any number of seeds would leave this difference undecided on these test items."""
    interval = comparison.overall
    if comparison.verdict != "open" or interval is None:
        return False
    mean, width = abs(interval.mean), interval.half_width()
    return mean < width and mean + width > comparison.group.bound(comparison.margin)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return [{"key": key, "from": before.get(key), "to": now.get(key)} for key in differing]


def analyse_records(
    records: Sequence[Record], study: Study | None, left_out: int = 0, title: str = ""
) -> Analysis:
    """Analyse records; those of a study are chosen and compared as the study planned."""
    records = [record.with_metric(study.table.metric if study else None) for record in records]
    unique = {(r.identity.key, r.method): r for r in reversed(records)}  # of copies, the first
    by_setting: dict[str, list[Record]] = defaultdict(list)
    for record in reversed(unique.values()):
        by_setting[record.identity.setting].append(record)
    by_setting = {setting: _drop_unpaired_fast_runs(runs) for setting, runs in by_setting.items()}
    groups = [_group(setting, runs, study) for setting, runs in by_setting.items()]
    groups.sort(key=lambda group: (group.task, group.model, group.setting))
    margin = study.table.margin if study else 1.0
    pairs = [(group, *pair) for group in groups for pair in _contrasts(group, study)]
    planned = max(len(pairs), len(study.contrasts) * len(study.tasks) if study else 0)
    comparisons = [_compare(*pair, margin, study, planned) for pair in pairs]
    used = {id(record) for group in groups for record in group.records}
    tested = [record for record in unique.values() if record.test is not None]
    return Analysis(
        title=study.title if study and study.title else title,
        study=study,
        groups=groups,
        comparisons=_corrected(comparisons, planned),
        planned=planned,
        across=_across(comparisons),
        left_out=left_out,
        copies=len(records) - len(unique),
        remade=len([r for r in records if r.score != unique[r.identity.key, r.method].score]),
        unused=len([record for record in tested if id(record) not in used]),
        mixtures=_mixtures(records),
    )


def _contrasts(group: Group, study: Study | None) -> list[tuple[str, str]]:
    """The pairs of arms that are compared in a setting."""
    if study is None:
        return [(name, group.reference_arm) for name in group.arms if name != group.reference_arm]
    return [pair for pair in study.contrasts if set(pair) <= group.arms.keys()]


def _corrected(comparisons: list[Comparison], planned: int) -> list[Comparison]:
    """Correct p (Holm) for all planned comparisons, differences and equivalences each in a family of their
    own. One with problems, or without runs, counts as p = 1."""
    usable = [c.combined if c.combined and not c.problems else None for c in comparisons]
    corrected = [
        statistics.holm([getattr(one, name, None) for one in usable], planned - len(comparisons))
        for name in ("p", "margin_p")
    ]
    return [
        replace(c, p_holm=p, margin_p_holm=margin_p)
        for c, p, margin_p in zip(comparisons, *corrected, strict=True)
    ]


def _group(setting: str, records: list[Record], study: Study | None) -> Group:
    first, records = records[0], _with_stand_ins(records)
    methods = list(dict.fromkeys(record.method for record in records))
    if study:
        methods = [m for m in study.arms if m in methods]
    else:
        methods.sort(key=lambda m: (m != "baseline", m))
    scores = {record.cell: record.validation for record in records if record.evaluated}
    matrix = study.matrix(scores, first.larger_is_better, partial=True) if study else None
    arms = {m: _arm(m, [r for r in records if r.method == m], matrix, study) for m in methods}
    return Group(
        setting=setting,
        task=first.task,
        model=str(first.results["model"]),
        metric=first.metric,
        precision=str(first.results.get("precision")),
        kind="share" if first.larger_is_better else "perplexity",
        reference_arm=study.reference_arm if study and study.reference_arm in arms else methods[0],
        arms=arms,
        matrix=matrix,
    )


def _with_stand_ins(records: list[Record]) -> list[Record]:
    """Give measured runs that diverged, or stopped at chance level, the test score of the worst trivial
    baseline: they are results of their method and must count."""
    metric, sign = records[0].metric, 1 if records[0].larger_is_better else -1
    baselines = baselines_of((r for r in records if r.test is not None), metric)
    if not baselines:
        return records
    worst = min(baselines, key=lambda name: sign * baselines[name][metric])
    score = {"test": {"baseline": worst, "metrics": baselines[worst]}}
    return [
        replace(r, results=r.results | score, stand_in=True)
        if not r.choosing and r.failure_kind in OUTCOMES
        else r
        for r in records
    ]


def _drop_unpaired_fast_runs(records: list[Record]) -> list[Record]:
    """Leave out fast-path runs where the fast path failed in another arm at the same seed.

    The study has made these runs again by the plain path, so that both runs of a pair have the same
    arithmetic.
    """
    fell_back = {r.cell.pairing for r in records if r.fell_back}
    kept = [r for r in records if r.cell.pairing not in fell_back or not r.config.training.fast]
    return kept or records


def _arm(method: str, records: list[Record], matrix: Matrix | None, study: Study | None) -> ArmResult:
    trials = [record for record in records if record.choosing]
    measured = [record for record in records if not record.choosing]
    unevaluated: tuple[Cell, ...] = ()
    if matrix is not None and study is not None:
        unevaluated = tuple(cell for cell in matrix.unevaluated if cell.method == method)
        trials = [r for r in trials if r.lr in matrix.grid and r.seed in study.choice_seeds]
        measured = [r for r in measured if r.seed in study.seeds]
    near_ties: dict[float, tuple[Record, ...]] = {}
    if matrix is not None and not unevaluated:
        lr, *further = matrix.measured.get(method, [None])
        near_ties = {tied: _tested(r for r in measured if r.lr == tied) for tied in further if tied}
        measured = [r for r in measured if r.lr in (lr, *further)]
        chosen = len(matrix.grid) > 1 and lr is not None
    else:  # whether the learning rate of the measured runs is the best one is not known
        lrs = {record.lr for record in measured}
        lr, chosen = (lrs.pop() if len(lrs) == 1 else None), False
    failures = tuple(r for r in (*trials, *measured) if r.score is None or r.stand_in)
    scores = {r.cell: r.validation for r in trials}
    means = {
        lr: lr_mean(method, lr, [cell.seed for cell in scores if cell.lr == lr], scores)
        for lr in sorted({cell.lr for cell in scores})
    }
    tested = _tested(r for r in measured if r.lr not in near_ties)
    return ArmResult(method, lr, chosen, tested, tuple(trials), failures, means, unevaluated, near_ties)


def _tested(records: Iterable[Record]) -> tuple[Record, ...]:
    return tuple(sorted((r for r in records if r.test is not None), key=lambda r: (r.seed, r.lr)))


def _compare(
    group: Group, method: str, reference: str, margin: float, study: Study | None, planned: int
) -> Comparison:
    """Compare two arms over seeds and items, at all combinations of their near-tied learning rates."""
    arm, other = group.arms[method], group.arms[reference]
    pairs = pair_runs(arm.records, other.records)
    seeds = tuple(run.seed for run, _ in pairs)
    differences = tuple(
        group.points(run.test) - group.points(reference_run.test)  # type: ignore[arg-type]
        for run, reference_run in pairs
    )
    ties = near_tied_pairs(arm, other)
    tables = [table_of(group, tie) for tie in ties]
    looks = len(study.looks) if study else 1
    level = 1 - decide.LEVEL / looks
    intervals: list[Overall] = [overall(*table, level=level) for table in tables if table is not None]
    bound = group.bound(margin)
    problems = find_problems(arm, other, study, planned)
    if any(tie and table is None for tie, table in zip(ties, tables, strict=True)):
        problems = (*problems, "no_items")
    if one_group(tables):
        problems = (*problems, "one_group")
    return Comparison(
        group, method, reference, margin, seeds, differences,
        overall=intervals[0] if tables[0] is not None else None,
        combined=decide.combine(intervals, bound, looks) if len(intervals) == len(ties) else None,
        by_seeds=statistics.interval(differences) if seeds else None,
        by_items=by_items(*tables[0]) if tables[0] is not None else None,
        problems=problems,
        pairs=min(map(len, ties)),
    )  # fmt: skip


def table_of(group: Group, pairs: Sequence[tuple[Record, Record]]) -> tuple[np.ndarray, np.ndarray] | None:
    """The differences of pairs of runs, (seeds, clusters of test items), and the clusters' sizes; None if a
    run did not record its items."""
    rows, sizes = [], []
    sign = 100.0 if group.larger_is_better else -100.0
    finished = next((run for pair in pairs for run in pair if not run.stand_in), None)
    for pair in pairs:
        values = [_values(group.metric, run, finished) for run in pair]
        if values[0] is None or values[1] is None or len(values[0].values) != len(values[1].values):
            return None
        rows.append(sign * (values[0].values - values[1].values))
        sizes.append(values[0].sizes)
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    return np.array(rows), sizes[0]


def one_group(tables: Iterable[tuple[np.ndarray, np.ndarray] | None]) -> bool:
    """Whether all test items belong together: then nothing tells how a difference varies with items."""
    return any(table is not None and len(table[1]) < 2 for table in tables)


def _values(metric: str, run: Record, finished: Record | None) -> ItemValues | None:
    source = finished if run.stand_in else run
    arrays = source.predictions() if source else None
    if arrays is None or source is None or source.test is None or run.test is None:
        return None
    if run.stand_in:
        return stand_in_values(metric, arrays, source.test, run.test)
    values = item_values(metric, arrays)
    return values if values is None or agrees(metric, values, run.test) else None


def near_tied_pairs(arm: ArmResult, other: ArmResult) -> list[list[tuple[Record, Record]]]:
    """`pair_runs` at every combination of the arms' near-tied learning rates, their best ones first."""
    return [pair_runs(runs, others) for runs in arm.by_lr for others in other.by_lr]


def pair_runs(runs: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The pairs of runs with the same seed and arithmetic, in the order of the seeds. A run that diverged is
    paired whatever its arithmetic: its score is a trivial baseline's."""
    return [
        (a, b)
        for a, b in _same_seed(runs, others)
        if a.stand_in or b.stand_in or a.arithmetic == b.arithmetic
    ]


def _same_seed(runs: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    left, right = ({r.seed: r for r in side} for side in (runs, others))
    return [(left[seed], right[seed]) for seed in sorted(left.keys() & right.keys())]


def find_problems(
    arm: ArmResult, reference_arm: ArmResult, study: Study | None, comparisons: int = 1
) -> tuple[str, ...]:
    """Codes of PROBLEMS: why no conclusion may be drawn from two arms. `comparisons` is how many the study
    planned."""
    arms = (arm, reference_arm)
    same_seed = min(len(_same_seed(a, b)) for a in arm.by_lr for b in reference_arm.by_lr)
    pairs = min(map(len, near_tied_pairs(*arms)))
    planned = study.next_look if study else max(len(a.seeds) for a in arms)
    failures = [r for a in arms for r in a.failures if r.lr in (a.lr, *a.near_ties) and not r.choosing]
    failed = any(r.failed_by_method and not r.stand_in for r in failures)
    both_chosen, measured = arm.chosen and reference_arm.chosen, all(a.records for a in arms)
    problems = {
        "unevaluated": any(a.unevaluated for a in arms),
        "failed": failed,
        "unfinished": not failed and same_seed < planned,
        "other_arithmetic": pairs < same_seed,
        "few_seeds": pairs < decide.fewest_seeds(comparisons),
        "other_rates": measured and not both_chosen and (arm.lr is None or arm.lr != reference_arm.lr),
        "unequal_trials": both_chosen and arm.lr_scores.keys() != reference_arm.lr_scores.keys(),
        "at_chance": any(a.at_chance for a in arms),
        "chosen_on_test": any(r.config.training.choose_on == "test" for a in arms for r in a.records),
    }
    return tuple(code for code, applies in problems.items() if applies)


def _across(comparisons: Sequence[Comparison]) -> list[Across]:
    """One entry for every method that was compared with the reference arm on several tasks."""
    by_method: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        if comparison.differences and comparison.reference == comparison.group.reference_arm:
            by_method[comparison.method].append(comparison)
    return [
        Across(
            method,
            len(several),
            statistics.interquartile_mean([list(map(c.group.shown, c.differences)) for c in several]),
            statistics.probability_of_improvement(
                [list(map(c.group.points, c.arm.values)) for c in several],
                [list(map(c.group.points, c.reference_arm.values)) for c in several],
            ),
        )
        for method, several in by_method.items()
        if len(several) > 1
    ]


def _mixtures(records: Sequence[Record]) -> dict[str, list[str]]:
    """The values of what differs between the runs: versions, commits, hardware."""
    seen: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for name, value in record.made_with.items():
            seen[name].add(value)
    return {name: sorted(values) for name, values in seen.items() if len(values) > 1}
