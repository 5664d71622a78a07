"""From records to comparisons: what each method reached at its own best rate, and how sure the difference is.

Everything here is computed from the records alone, so a report can be made anywhere and at any time. Runs
are compared within a setting (same data, model and recipe), paired by seed. Differences are in points (per
cent of the items) or, for perplexity, in per cent; a positive difference is always an improvement.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from oelm.errors import UserError
from oelm.study import statistics
from oelm.study.design import Study
from oelm.study.folder import StudyFolder
from oelm.study.items import ItemDifference, McNemarSeeds, item_bootstrap, mcnemar_seeds
from oelm.study.matrix import Cell, Matrix, rate_means, unfold
from oelm.study.records import Record, find_records
from oelm.study.result_types import (
    FEWEST_SEEDS,
    Across,
    Analysis,
    Arm,
    Comparison,
    Failure,
    Group,
)
from oelm.system.messages import Notice, notice
from oelm.training.predictions import item_scores


def analyse(folder: Path) -> Analysis:
    """Analyse a study's folder, or any folder with runs below."""
    damaged: list[Notice] = []
    if (folder / "study.toml").is_file():
        study_folder = StudyFolder(folder)
        study: Study | None = study_folder.read()
        records, left_out = study_folder.records(damaged)
        changes = study_folder.changes()
    elif folder.is_dir():
        _refuse_studies_below(folder)
        study, left_out, changes = None, 0, []
        records = list(find_records(folder, damaged))
    else:
        raise UserError(
            f"{folder} is a file, not a folder" if folder.exists() else f"{folder}: no such folder"
        )
    if not any(record.completed or record.results["status"] == "failed" for record in records):
        why = f": {damaged[0]}" if damaged else ""
        raise UserError(f"{folder} holds no run that has ended{why}")
    found = analyse_records(records, study, left_out, folder.resolve().name)
    return replace(found, damaged=damaged, changes=changes)


def _refuse_studies_below(folder: Path) -> None:
    """Without its study.toml nobody could tell how the rates of a study's runs were chosen."""
    below = [path.parent for path in sorted(folder.rglob("study.toml"))]
    studies = [str(study) for study in below if any(study.rglob("results.json"))]
    if studies:
        more = f" (or one of {len(studies) - 5} more)" if len(studies) > 5 else ""
        raise UserError(
            f"{folder} is no study, but there are studies below: report on {' or '.join(studies[:5])}{more}"
        )


def analyse_records(
    records: Sequence[Record], study: Study | None, left_out: int = 0, title: str = ""
) -> Analysis:
    unique = {(r.identity.key, r.method): r for r in reversed(records)}  # of copies, the first
    by_setting: dict[str, list[Record]] = defaultdict(list)
    for record in reversed(unique.values()):
        by_setting[record.identity.setting].append(record)
    by_setting = {setting: _one_path(runs) for setting, runs in by_setting.items()}
    groups = [_group(setting, runs, study) for setting, runs in by_setting.items()]
    groups.sort(key=lambda group: (group.task, group.model, group.setting))
    margin = study.table.margin if study else 1.0
    comparisons = [
        _compare(group, method, margin, study)
        for group in groups
        for method in group.arms
        if method != group.reference
    ]
    used = {id(record) for group in groups for record in group.records}
    tested = [record for record in unique.values() if record.test is not None]
    return Analysis(
        title=study.title if study and study.title else title,
        study=study,
        groups=groups,
        comparisons=_corrected(comparisons),
        across=_across(comparisons),
        left_out=left_out,
        copies=len(records) - len(unique),
        unused=len([record for record in tested if id(record) not in used]),
        mixtures=_mixtures(records),
    )


def _corrected(comparisons: list[Comparison]) -> list[Comparison]:
    """Holm over one family: every comparison of the study, named by its matrix before it was run.

    One that nothing may be concluded from counts as if it had failed, so that no fault in the data makes
    the others look better.
    """
    may = [c.paired is not None and c.paired.p is not None and not c.problems for c in comparisons]
    p_values = [c.paired.p if ok and c.paired else 1.0 for c, ok in zip(comparisons, may, strict=True)]
    adjusted = statistics.holm(p_values)
    return [replace(c, p_holm=p if ok else None) for c, p, ok in zip(comparisons, adjusted, may, strict=True)]


def _group(setting: str, records: list[Record], study: Study | None) -> Group:
    first = records[0]
    methods = list(dict.fromkeys(record.method for record in records))
    if study:
        methods = [m for m in study.methods if m in methods]
    else:
        methods.sort(key=lambda m: (m != "baseline", m))
    matrix = _matrix(records, study) if study else None
    arms = {m: _arm(m, [r for r in records if r.method == m], matrix, study) for m in methods}
    return Group(
        setting=setting,
        task=first.task,
        model=str(first.results["model"]),
        metric=first.metric,
        precision=str(first.results.get("precision")),
        kind="share" if first.larger_is_better else "perplexity",
        reference=study.reference if study and study.reference in arms else methods[0],
        arms=arms,
        matrix=matrix,
    )


def _one_path(records: list[Record]) -> list[Record]:
    """Without the runs by the fast path of seeds for which it gave out in one arm: the study has made all
    of that seed's runs again by the plain path, so that pairs have the same arithmetic."""
    again = {(r.seed, r.choosing) for r in records if r.fell_back}
    kept = [r for r in records if (r.seed, r.choosing) not in again or not r.config.training.fast]
    return kept or records


def _matrix(records: Iterable[Record], study: Study) -> Matrix:
    scores = {
        Cell(record.method, record.lr, record.seed, record.choosing): record.validation
        for record in records
        if record.evaluated
    }
    first = next(iter(records))
    return unfold(
        list(study.methods), study.table.lrs, study.choice_seeds, study.seeds, study.table.widen, scores,
        first.larger_is_better, partial=True,
    )  # fmt: skip


def _arm(method: str, records: list[Record], matrix: Matrix | None, study: Study | None) -> Arm:
    trials = [record for record in records if record.choosing]
    measured = [record for record in records if not record.choosing]
    unevaluated: tuple[Cell, ...] = ()
    if matrix is not None and study is not None:
        unevaluated = tuple(cell for cell in matrix.unevaluated if cell.method == method)
        trials = [r for r in trials if r.lr in matrix.grid and r.seed in study.choice_seeds]
        measured = [r for r in measured if r.seed in study.seeds]
    if matrix is not None and not unevaluated:
        lr = matrix.chosen.get(method)
        measured = [r for r in measured if r.lr == lr]
        chosen = len(matrix.grid) > 1 and lr is not None
    else:  # nobody can tell whether the rate it was measured at is its best
        rates = {record.lr for record in measured}
        lr, chosen = (rates.pop() if len(rates) == 1 else None), False
    failures = tuple(
        _failure(r) for r in (*trials, *measured) if (r.validation if r.choosing else r.test) is None
    )
    complete = sorted((r for r in measured if r.test is not None), key=lambda r: (r.seed, r.lr))
    return Arm(
        method, lr, chosen, tuple(complete), tuple(trials), failures, _rates(method, trials), unevaluated
    )  # fmt: skip


def _failure(record: Record) -> Failure:
    """Why a run gave no number. One that ended with a metric that is not finite diverged as well."""
    status, reason = str(record.results["status"]), record.reason
    if record.completed:
        status, reason = "failed", notice("run.metric_not_finite", metric=record.metric)
    kind = "diverged" if record.completed else record.failure_kind
    return Failure(record.method, record.lr, record.seed, status, reason, kind)


def _rates(method: str, trials: list[Record]) -> dict[float, float | None]:
    scores = {Cell(method, r.lr, r.seed, True): r.validation for r in trials}
    found: dict[float, float | None] = {}
    for lr in sorted({r.lr for r in trials}):
        seeds = [cell.seed for cell in scores if cell.lr == lr]
        found |= rate_means(method, [lr], seeds, scores)
    return found


def _compare(group: Group, method: str, margin: float, study: Study | None) -> Comparison:
    arm, reference = group.arms[method], group.arms[group.reference]
    pairs = pair_runs(arm, reference)
    seeds = tuple(ours.seed for ours, _ in pairs)
    differences = tuple(
        group.points(ours.test) - group.points(theirs.test)  # type: ignore[arg-type]
        for ours, theirs in pairs
    )
    items, mcnemar = _by_item(group, [ours for ours, _ in pairs], [theirs for _, theirs in pairs])
    return Comparison(
        group, method, seeds, differences,
        statistics.paired(differences) if seeds else None,
        statistics.equivalence(differences, margin) if seeds else None,
        items, mcnemar,
        find_problems(arm, reference, study),
    )  # fmt: skip


def pair_runs(arm: Arm, reference: Arm) -> list[tuple[Record, Record]]:
    """The measured runs of two arms that share a seed and their arithmetic, in the order of the seeds."""
    return [(a, b) for a, b in _same_seed(arm, reference) if a.arithmetic == b.arithmetic]


def _same_seed(arm: Arm, reference: Arm) -> list[tuple[Record, Record]]:
    ours = {r.seed: r for r in arm.records}
    theirs = {r.seed: r for r in reference.records}
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def find_problems(arm: Arm, reference: Arm, study: Study | None) -> tuple[str, ...]:
    """Why nothing may be concluded from two arms of a group: codes of PROBLEMS, none if all is well."""
    return tuple(_problems(arm, reference, len(pair_runs(arm, reference)), study))


def _problems(arm: Arm, reference: Arm, pairs: int, study: Study | None) -> Iterable[str]:
    wanted = len(study.seeds) if study else max(len(arm.seeds), len(reference.seeds))
    if arm.unevaluated or reference.unevaluated:
        yield "unevaluated"
    measured_failures = [
        f for a in (arm, reference) for f in a.failures if f.lr == a.lr and f.of_method
        and f.seed not in {r.seed for r in a.trials}
    ]  # fmt: skip
    if measured_failures:
        yield "failed"
    elif len(_same_seed(arm, reference)) < wanted:
        yield "unfinished"
    if pairs < len(_same_seed(arm, reference)):
        yield "other_arithmetic"
    if pairs < FEWEST_SEEDS:
        yield "few_seeds"
    if not (arm.chosen and reference.chosen) and (arm.lr is None or arm.lr != reference.lr):
        yield "other_rates"
    if arm.chosen and reference.chosen and arm.rates.keys() != reference.rates.keys():
        yield "unequal_trials"
    if arm.at_chance or reference.at_chance:
        yield "at_chance"
    if any(r.config.training.choose_on == "test" for r in (*arm.records, *reference.records)):
        yield "chosen_on_test"


def _by_item(
    group: Group, ours: list[Record], theirs: list[Record]
) -> tuple[ItemDifference | None, McNemarSeeds | None]:
    """The same difference over test items: from what was saved for each of them, where anything was."""
    a, b = _item_scores(group.metric, ours), _item_scores(group.metric, theirs)
    if a is None or b is None or a.shape != b.shape:
        return None, None
    right_or_wrong = bool(np.isin([a, b], [0, 1]).all())
    return item_bootstrap(100.0 * a, 100.0 * b), mcnemar_seeds(a, b) if right_or_wrong else None


def _item_scores(metric: str, records: list[Record]) -> np.ndarray | None:
    """The score of every run and item, items in one order; None where items do not count alike."""
    rows = []
    for record in records:
        arrays = record.predictions()
        found = None if arrays is None else item_scores(metric, arrays)
        if found is None or (found.weights != 1).any():
            return None
        rows.append(found.scores)
    return np.array(rows) if rows and len({len(row) for row in rows}) == 1 else None


def _across(comparisons: Sequence[Comparison]) -> list[Across]:
    """Over tasks, where there are several."""
    by_method: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        if comparison.differences:
            by_method[comparison.method].append(comparison)
    found = []
    for method, several in by_method.items():
        if len(several) < 2:
            continue
        points = [c.group.points for c in several]
        ours = [[p(v) for v in c.arm.values] for p, c in zip(points, several, strict=True)]
        theirs = [[p(v) for v in c.reference.values] for p, c in zip(points, several, strict=True)]
        found.append(
            Across(
                method,
                len(several),
                statistics.interquartile_mean([c.differences for c in several]),
                statistics.probability_of_improvement(ours, theirs),
            )
        )
    return found


def _mixtures(records: Sequence[Record]) -> dict[str, list[str]]:
    """What the runs of a study do not share and a reader should know."""
    seen: dict[str, set[str]] = defaultdict(set)
    for record in records:
        environment = record.environment
        seen["commit"].add(str(environment.get("commit")))
        seen["oelm"].add(str(environment.get("oelm")))
        seen["hardware"].add(str(environment.get("gpu") or environment.get("cpu")))
        seen["python"].add(str(environment.get("python")))
        for package, version in environment.get("packages", {}).items():
            seen[package].add(str(version))
    return {name: sorted(values) for name, values in seen.items() if len(values) > 1}
