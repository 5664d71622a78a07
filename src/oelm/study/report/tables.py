"""The tables of a report: results, how sure they are, rates, cost, raw values."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from oelm.study.catalogue import Experiment
from oelm.study.records import Record
from oelm.study.report import numbers
from oelm.study.report.document import Cell, Table
from oelm.study.report.view import View, bits
from oelm.study.result_types import Arm, Comparison, Group

TONES = {"better": "good", "worse": "bad", "equivalent": "", "open": "quiet", "void": "quiet"}
NOTHING = Cell(numbers.NOTHING)
SIDE_BY_SIDE = 3  # comparisons; more are rows of a wide table


def name_cell(view: View, method: str) -> Cell:
    return Cell(method, colour=view.colours[method])


def results(view: View, group: Group) -> Table:
    """What every method reached on the test split, with trivial references and published figures below."""
    words = view.words
    unit = " (%)" if group.kind == "share" else ""
    perplexity = group.metric == "perplexity"
    head = [
        words("table.method"),
        words("table.mean", metric=view.metric(group)) + unit,
        *([words("metric.bits_per_byte")] if perplexity else []),
        words("table.difference", unit=view.unit(group)),
        words("table.verdict"),
    ]
    rows = [_result(view, group, arm) for arm in group.arms.values()]
    for name, metrics in group.references.items():
        if group.metric in metrics:
            rows.append(_trivial(view, group, name, metrics))
    rows += [_published(view, group, experiment, value) for experiment, value in view.published(group)]
    return Table(head, rows, "l" + "r" * (perplexity + 2) + "l", _title(view, group))


def _title(view: View, group: Group) -> str:
    return view.label(group) if len(view.analysis.groups) > 1 else ""


def _result(view: View, group: Group, arm: Arm) -> list[Cell]:
    runs = view.words("table.runs", rate=numbers.rate(arm.lr), n=len(arm.values))
    cells = [Cell(arm.method, runs, colour=view.colours[arm.method]), _mean_cell(view, group, arm)]
    if group.metric == "perplexity":
        cells.append(Cell(numbers.fixed(bits(arm.records, "test"), 3)))
    comparison = view.comparison(group, arm.method)
    if comparison is None:
        return [*cells, Cell(""), Cell(view.words("verdict.reference"), tone="quiet")]
    p = f"p {numbers.equals(comparison.p_holm)}" if comparison.p_holm is not None else ""
    verdict = Cell(view.verdict(comparison), p, tone=TONES[comparison.verdict])
    if comparison.paired is None:
        return [*cells, NOTHING, verdict]
    paired, digits = comparison.paired, view.digits(comparison)
    span = "" if paired.low is None else view.span(paired.low, paired.high, digits)
    return [*cells, Cell(numbers.signed(paired.mean, digits), span), verdict]


def _mean_cell(view: View, group: Group, arm: Arm) -> Cell:
    """The mean over the seeds, and its interval below."""
    interval = view.interval(group, arm)
    if interval is None:
        return NOTHING
    digits = view.arm_digits(group, interval)
    mean = view.value(group, interval.mean, digits)
    if interval.low is None or interval.high is None:
        return Cell(mean)
    ends = [interval.low, interval.high]
    if group.kind == "share":  # a t interval knows nothing of 0 and 1
        ends = [min(max(end, 0.0), 1.0) for end in ends]
    return Cell(mean, view.words.range(*(view.value(group, end, digits) for end in ends)))


def _trivial(view: View, group: Group, name: str, metrics: dict[str, Any]) -> list[Cell]:
    values = [view.value(group, metrics[group.metric])]
    if group.metric == "perplexity":
        values.append(numbers.fixed(metrics.get("bits_per_byte"), 3))
    first = Cell(view.words.name("trivial", name), view.words("table.trivial"), tone="quiet")
    return [first, *(Cell(text, tone="quiet") for text in (*values, "", ""))]


def _published(view: View, group: Group, experiment: Experiment, value: float) -> list[Cell]:
    """A published figure: one run of another recipe, and it says so."""
    config, words = experiment.config, view.words
    note = words(
        "table.published_note",
        id=experiment.id,
        rate=numbers.rate(config["training"]["lr"]),
        split=words.name("split", str(experiment.published.get("split"))),
    )
    values = [view.value(group, value, 2 if group.kind == "share" else 1)]
    if group.metric == "perplexity":
        values.append(numbers.NOTHING)  # of how many bytes was not reported
    first = Cell(words("table.published", method=config["method"]["name"]), note, tone="quiet")
    return [first, *(Cell(text, tone="quiet") for text in (*values, "", ""))]


def certainty(view: View) -> Table | None:
    """Every test and interval of every comparison; few comparisons stand side by side."""
    words = view.words
    comparisons = [c for c in view.analysis.comparisons if c.paired is not None]
    if not comparisons:
        return None
    several = len(view.analysis.groups) > 1
    head = [
        "n", words("table.mean_difference"), words("table.interval"), words("table.p_plain"),
        words("table.p_holm"), words("table.margin"), words("table.interval90"),
        words("table.p_equivalence"), words("table.items"), words("table.mcnemar"),
    ]  # fmt: skip
    rows = [_tests(view, comparison) for comparison in comparisons]
    if len(comparisons) <= SIDE_BY_SIDE:
        names = [f"{view.label(c.group)}: {c.method}" if several else c.method for c in comparisons]
        turned = [[Cell(name), *row] for name, row in zip(head, zip(*rows, strict=True), strict=True)]
        return Table(["", *names], turned, "l" + "r" * len(names))
    named = [
        [*([Cell(view.label(c.group))] if several else []), name_cell(view, c.method), *row]
        for c, row in zip(comparisons, rows, strict=True)
    ]
    first = [*([words("table.task")] if several else []), words("table.method")]
    return Table([*first, *head], named, "l" * len(first) + "r" * len(head))


def _tests(view: View, comparison: Comparison) -> list[Cell]:
    paired, equivalence, items = comparison.paired, comparison.equivalence, comparison.items
    assert paired is not None
    digits = view.digits(comparison)
    texts = [
        str(paired.n),
        view.amount(comparison.group, numbers.signed(paired.mean, digits)),
        view.span(paired.low, paired.high, digits),
        numbers.p_value(paired.p),
        numbers.p_value(comparison.p_holm),
        f"±{equivalence.margin:g}" if equivalence else numbers.NOTHING,
        view.span(equivalence.low, equivalence.high, digits) if equivalence else numbers.NOTHING,
        numbers.p_value(equivalence.p) if equivalence else numbers.NOTHING,
        view.span(items.low, items.high, digits) if items else numbers.NOTHING,
        numbers.p_value(comparison.mcnemar.p) if comparison.mcnemar else numbers.NOTHING,
    ]
    return [Cell(text) for text in texts]


def across(view: View) -> Table:
    words = view.words
    head = [words("table.method"), words("table.tasks"), words("table.iqm"), words("table.improvement")]
    rows = []
    for entry in view.analysis.across:
        iqm, chance = entry.interquartile_mean, entry.probability_of_improvement
        digits = numbers.digits_for(iqm.low, iqm.high)
        percent = [None if end is None else 100 * end for end in (chance.low, chance.high)]
        ends = words.range(*(numbers.fixed(end, 0) for end in percent))
        rows.append(
            [
                name_cell(view, entry.method),
                Cell(str(entry.tasks)),
                Cell(_with(view, numbers.signed(iqm.value, digits), view.span(iqm.low, iqm.high, digits))),
                Cell(_with(view, f"{100 * chance.value:.0f} %", ends if percent[0] is not None else "")),
            ]
        )
    return Table(head, rows, "lrrr")


def _with(view: View, text: str, detail: str) -> str:
    if not detail or detail == numbers.NOTHING:
        return text
    return view.words("list.with", name=text, detail=detail)


def rates(view: View, group: Group) -> Table | None:
    """The mean validation score of every rate, how wide the good range is, and how fast it was learned."""
    words = view.words
    grid = sorted({lr for arm in group.arms.values() for lr in arm.rates})
    if not grid and not any(arm.area() for arm in group.arms.values()):
        return None
    head = [
        words("table.method"), *map(numbers.rate, grid), *([words("table.range")] if len(grid) > 1 else []),
        *([words("table.lost", unit=view.unit(group))] if len(grid) > 1 else []), words("table.area"),
    ]  # fmt: skip
    rows = []
    for arm in group.arms.values():
        row = [name_cell(view, arm.method)]
        for lr in grid:
            text = _trial(view, group, arm, lr)
            row.append(Cell(f"{text}\u00a0✓" if arm.chosen and lr == arm.lr else text))
        if len(grid) > 1:
            row += _robustness(view, group, arm)
        row.append(Cell(view.value(group, arm.area(), 1)))
        rows.append(row)
    title = view.label(group) if len(view.analysis.groups) > 1 else ""
    return Table(head, rows, "l" + "r" * (len(head) - 1), title)


def _trial(view: View, group: Group, arm: Arm, lr: float) -> str:
    if lr not in arm.rates:
        return numbers.NOTHING
    score = arm.rates[lr]
    if any(cell.lr == lr for cell in arm.unevaluated):
        return view.words("table.unevaluated")
    if score is None:
        return view.words("table.failed")
    text = view.value(group, score, 1)
    if group.metric != "perplexity":
        return text
    own = bits(tuple(record for record in arm.trials if record.lr == lr), "best")
    return _with(view, text, numbers.fixed(own, 3))


def _robustness(view: View, group: Group, arm: Arm) -> list[Cell]:
    found = arm.robustness(group.larger_is_better, group.tolerance)
    if found is None:
        return [NOTHING, NOTHING]
    span = view.words.range(numbers.rate(found.low), numbers.rate(found.high))
    if found.low == found.high:
        span = numbers.rate(found.low)
    if found.lost is None:
        return [Cell(span), Cell(view.words.name("unknown", str(found.lost_unknown)), tone="quiet")]
    # A perplexity's loss is told in per cent of the best, as every other difference of it is.
    lost = found.lost if group.kind == "share" else found.lost / found.best_score
    return [Cell(span), Cell(numbers.fixed(100 * lost, 1))]


def cost(view: View, group: Group) -> Table | None:
    """Parameters, time and memory of the measured runs (of the trials, where nothing is measured yet)."""
    words = view.words
    head = [
        words("table.method"), words("table.total"), words("table.trainable"), words("table.frozen"),
        words("table.step_time"), words("table.train_time"), words("table.memory"),
    ]  # fmt: skip
    rows = []
    for arm in group.arms.values():
        runs = arm.records or tuple(r for r in arm.trials if r.completed)
        if not runs:
            continue
        parameters = runs[0].results.get("parameters") or {}
        frozen, total = parameters.get("frozen"), parameters.get("total")
        share = _with(view, numbers.count(frozen), f"{100 * frozen / total:.1f} %") if frozen else "0"
        rows.append(
            [
                name_cell(view, arm.method),
                Cell(numbers.count(total)),
                Cell(numbers.count(parameters.get("trainable"))),
                Cell(share),
                Cell(numbers.time_of(arm.step_time())),
                Cell(numbers.time_of(_mean(runs, "train_time_s"))),
                Cell(numbers.memory(_memory(runs))),
            ]
        )
    return Table(head, rows, "l" + "r" * 6, _title(view, group)) if rows else None


def _memory(records: Sequence[Record]) -> float | None:
    """On a CPU a record knows only the most its process ever took, and a process trains many runs."""
    if any(record.environment.get("device") == "cpu" for record in records):
        return None
    return _mean(records, "peak_memory_bytes")


def _mean(records: Iterable[Record], name: str) -> float | None:
    found = [value for record in records if (value := record.results.get(name)) is not None]
    return fmean(found) if found else None


def raw(view: View, group: Group) -> Table | None:
    """The test score of every seed and method, and the differences the comparison rests on."""
    arms = [arm for arm in group.arms.values() if arm.records]
    if not arms:
        return None
    comparisons = [c for arm in arms if (c := view.comparison(group, arm.method)) is not None]
    head = [
        view.words("table.seed"), *(arm.method for arm in arms),
        *(view.words("table.minus", method=c.method, reference=group.reference) for c in comparisons),
    ]  # fmt: skip
    rows = []
    for seed in sorted({seed for arm in arms for seed in arm.seeds}):
        row = [Cell(str(seed)), *(Cell(_of_seed(view, group, arm, seed)) for arm in arms)]
        for c in comparisons:
            by_seed = dict(zip(c.seeds, c.differences, strict=True))
            row.append(Cell(numbers.signed(by_seed.get(seed), 2)))
        rows.append(row)
    return Table(head, rows, "r" * len(head), _title(view, group))


def _of_seed(view: View, group: Group, arm: Arm, seed: int) -> str:
    texts = []
    for record in arm.records:
        if record.seed != seed:
            continue
        text = view.value(group, record.test, 2)
        if group.metric == "perplexity":
            text = _with(view, text, numbers.fixed(bits((record,), "test"), 3))
        texts.append(text if arm.lr is not None else f"{text} @ {numbers.rate(record.lr)}")
    return view.words.items(texts) or numbers.NOTHING


def trials(view: View, group: Group) -> Table | None:
    """Every trial of the choice, where a rate was tried with more than one seed."""
    grid = sorted({lr for arm in group.arms.values() for lr in arm.rates})
    if all(len({r.seed for r in arm.trials}) < 2 for arm in group.arms.values()):
        return None
    rows = []
    for arm in group.arms.values():
        cells = []
        for lr in grid:
            scores = [r.validation for r in sorted(arm.trials, key=lambda r: r.seed) if r.lr == lr]
            cells.append(Cell(view.words.items(view.value(group, score, 2) for score in scores)))
        rows.append([name_cell(view, arm.method), *cells])
    return Table([view.words("table.method"), *map(numbers.rate, grid)], rows, "l" + "r" * len(grid))
