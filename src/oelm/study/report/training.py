"""Tables on the course of training, arm by arm, with the published figures of the same experiment."""

from collections.abc import Sequence
from typing import Any

from oelm.study.history import ArmHistory, Row, arm_histories, with_improvement
from oelm.study.report import numbers
from oelm.study.report.document import Block, Paragraph, Table, TableCell, make_table, with_note
from oelm.study.report.tables import name_cell
from oelm.study.report.view import View
from oelm.study.result_types import Group
from oelm.system.progress import figure

Cells = Sequence[str | TableCell]
MOST_POINTS = 12  # of a history, evenly spread, with its first, best and last; the JSON has all of them


def training(view: View) -> list[Block]:
    """Every table of every setting, each with a note where one is needed."""
    words, blocks = view.words, list[Block]()
    for group in view.analysis.groups:
        arms = arm_histories(group)
        if not arms:
            continue
        for arm in (arm for arm in arms if arm.published):
            blocks += [_recipe(view, arm.published), _beside(view, arm.published)]
        histories = [_history(view, group, arm) for arm in arms if arm.history]
        blocks += with_note(histories, words("training.history_note"))
        blocks += with_note([_at_steps(view, group, arms)], words("training.at_steps_note"))
        blocks += [_last_phase(view, group, arm) for arm in arms if arm.last_phase]
        blocks += with_note([_fit(view, group, arms)], words("training.fit_note"))
        blocks += with_note([_time(view, group, arms)], words("training.time_note"))
        ratios = words("training.efficiency_note") if _scored(group) == "perplexity" else ""
        blocks += with_note([_parameters(view, group, arms)], ratios)
    return blocks


def _recipe(view: View, published: Row) -> Paragraph:
    keys = view.words.items(published["differs_in"])
    name = "training.recipe_differs" if keys else "training.recipe_same"
    return Paragraph(view.words(name, id=published["experiment"], keys=keys))


def _beside(view: View, published: Row) -> Table:
    """Every published figure that the runs have too."""
    head = [published["experiment"], view.words("training.as_published"), view.words("training.here")]
    rows = [
        [name, *(figure(row[side]) for side in ("published", "here"))]
        for name, row in published.get("beside", {}).items()
    ]
    return make_table(head, rows)


def _scored(group: Group) -> str:
    """The metric that stands beside the loss; "" where the loss itself decides."""
    return "" if group.metric == "loss" else group.metric


def _title(view: View, group: Group, what: str, arm: ArmHistory | None = None) -> str:
    parts = [view.words(f"training.{what}"), *([_label(group, arm)] if arm else []), view.title(group)]
    return view.words.items(part for part in parts if part)


def _label(group: Group, arm: ArmHistory) -> str:
    """The method, with its learning rate where the arm has several."""
    several = len([other for other in arm_histories(group) if other.method == arm.method]) > 1
    return f"{arm.method} @ {numbers.learning_rate(arm.lr)}" if several else arm.method


def _named(view: View, arm: ArmHistory) -> TableCell:
    runs = view.words("table.runs", lr=numbers.learning_rate(arm.lr), n=len(arm.records))
    return name_cell(view, arm.method, runs)


def _step(row: Row, key: str = "step") -> str:
    return numbers.count(int(row[key]))


def _loss(value: float | None) -> str:
    return numbers.fixed(value, 4)


def _score(view: View, group: Group, value: float | None) -> str:
    return view.value(group, value, 2 if group.kind == "share" else 1)


def _per_cent(value: float | None) -> str:
    return numbers.signed(None if value is None else 100 * value, 2)


def _history(view: View, group: Group, arm: ArmHistory) -> Table:
    words, metric, published = view.words, _scored(group), arm.published.get("history", {})
    head = [words("figure.step"), words("metric.loss")]
    head += [_metric_head(view, group)] if metric else []
    head.append(words("training.improvement"))
    beside = [name for name in ("loss", metric) if any(name in row for row in published.values())]
    head += [words("training.published", name=words.name("metric", name)) for name in beside]
    rows = []
    for row in with_improvement(_spread(arm.history, published)):
        cells = [_step(row), _loss(row.get("loss"))]
        cells += [_score(view, group, row.get(metric))] if metric else []
        cells.append(_per_cent(row.get("improvement")))
        published_values = published.get(row["step"], {})
        cells += [_published(view, group, name, published_values.get(name)) for name in beside]
        rows.append(cells)
    title, test = _title(view, group, "history", arm), arm.split != "validation"
    title = view.with_detail(title, words.name("split", arm.split) if test else "")
    return make_table(head, rows, title, left=())


def _published(view: View, group: Group, name: str, value: float | None) -> str:
    return _loss(value) if name == "loss" else _score(view, group, value)


def _metric_head(view: View, group: Group) -> str:
    return view.metric(group) + (view.words("unit.percent") if group.kind == "share" else "")


def _spread(history: Sequence[Row], published: dict[int, Any]) -> list[Row]:
    """About MOST_POINTS evenly spread rows of a history, with its best, its last, and those with a published
    figure."""
    best = min(history, key=lambda row: float(row.get("loss", 0)))
    gap = -(-len(history) // MOST_POINTS)
    kept = {id(row) for index, row in enumerate(history) if index % gap == 0 or row["step"] in published}
    kept |= {id(best), id(history[-1])}
    return [row for row in history if id(row) in kept]


def _at_steps(view: View, group: Group, arms: list[ArmHistory]) -> Table | None:
    """The metric of every arm at the same steps; a detail says where the evaluation was made earlier."""
    name = _scored(group) or "loss"
    columns = [{row["at"]: row for row in arm.at_steps} for arm in arms]
    steps = sorted({at for column in columns for at in column})
    if not steps:
        return None
    rows: list[Cells] = []
    for at in steps:
        cells = []
        for column in columns:
            row = column.get(at, {})
            early = bool(row) and row["step"] != at
            detail = view.words("training.evaluated", step=_step(row)) if early else ""
            cells.append(TableCell(_published(view, group, name, row.get(name)), detail))
        rows.append([numbers.count(int(at)), *cells])
    head = [view.words("figure.step"), *(_label(group, arm) for arm in arms)]
    what = view.words.items([_title(view, group, "at_steps"), _metric_head(view, group)])
    return make_table(head, rows, what, left=())


def _last_phase(view: View, group: Group, arm: ArmHistory) -> Table:
    words, published_values = view.words, arm.published.get("last_training_loss")
    head = [words("figure.step"), words("training.training_loss"), words("figure.learning_rate")]
    rows = [[_step(row), _loss(row["loss"]), _rate(row.get("lr"))] for row in arm.last_phase]
    rows += [[words("training.as_published"), _loss(published_values), ""]] if published_values else []
    return make_table(head, rows, _title(view, group, "last_phase", arm), left=())


def _rate(value: float | None) -> str:
    """A small number with three figures: a schedule's learning rates have many."""
    return numbers.learning_rate(None if value is None else float(f"{value:.3g}"))


def _fit(view: View, group: Group, arms: list[ArmHistory]) -> Table | None:
    words, perplexity = view.words, _scored(group) == "perplexity"
    measure = "perplexity" if perplexity else "loss"
    name = words(f"metric.{measure}")
    head = [words("table.method"), words("training.on_training", name=name)]
    head += [words("training.on_validation", name=name), *map(words, ("training.best_step", "training.word"))]
    rows: list[Cells] = []
    for arm in arms:
        fit = arm.fit
        if "best_step" not in fit:
            continue
        values = [fit.get(f"{split}_{measure}") for split in ("training", "validation")]
        texts = [_score(view, group, value) if perplexity else _loss(value) for value in values]
        word = words(f"training.fit_{fit['overfitting']}", rise=_per_cent(fit["rise"]))
        rows.append([_named(view, arm), *texts, _step(fit, "best_step"), word])
    return make_table(head, rows, _title(view, group, "fit"), left=(0, -1)) if rows else None


TIMES = ("total_s", "step_mean_s", "step_median_s", "validation_s")


def _time(view: View, group: Group, arms: list[ArmHistory]) -> Table:
    head = [view.words("table.method"), *(view.words(f"training.{name}") for name in TIMES)]
    rows: list[Cells] = []
    for arm in arms:
        time = arm.time
        cells = [TableCell(numbers.time_of(time[name])) for name in TIMES]
        if not time["every_step"] and time["step_median_s"] is not None:
            cells[2] = TableCell(cells[2].text, view.words("training.of_means"))
        rows.append([_named(view, arm), *cells])
        if published_values := arm.published.get("time"):
            times = [numbers.time_of(published_values.get(name)) for name in TIMES]
            rows.append([_as_published(view, arm), *times])
    return make_table(head, rows, _title(view, group, "time"))


def _as_published(view: View, arm: ArmHistory) -> TableCell:
    words = view.words
    return TableCell(words("training.as_published"), arm.published["experiment"], tone="quiet")


def _parameters(view: View, group: Group, arms: list[ArmHistory]) -> Table:
    """Parameters and, of a perplexity, the reports' two ratios."""
    ratios = ("perplexity", "per_parameter", "per_hour") if _scored(group) == "perplexity" else ()
    head = [view.words(f"table.{name}") for name in ("method", "total", "trainable", "frozen")]
    head += [view.words("training.frozen_share"), *(view.words(f"training.ratio_{name}") for name in ratios)]
    rows: list[Cells] = []
    for arm in arms:
        rows.append([_named(view, arm), *_sizes(arm.parameters, arm.efficiency, ratios)])
        published_values = arm.published
        if "parameters" in published_values or (ratios and "efficiency" in published_values):
            sizes = _sizes(
                published_values.get("parameters", {}), published_values.get("efficiency", {}), ratios
            )
            rows.append([_as_published(view, arm), *sizes])
    return make_table(head, rows, _title(view, group, "parameters"))


def _sizes(counts: Row, efficiency: Row, ratios: Sequence[str]) -> list[str]:
    texts = [numbers.count(counts.get(name)) for name in ("total", "trainable", "frozen")]
    texts.append(numbers.fixed(100 * counts["frozen_share"], 1) if counts else numbers.NOTHING)
    show = {
        "perplexity": lambda v: numbers.fixed(v, 2),
        "per_parameter": _rate,
        "per_hour": numbers.significant,
    }
    return texts + [show[name](efficiency.get(name)) for name in ratios]
