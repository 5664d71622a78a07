"""The tables of a report: results, certainty, learning rates, cost, raw values."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oelm.study.records import mean_of
from oelm.study.report import numbers
from oelm.study.report.document import Table, TableCell, make_table
from oelm.study.report.view import View
from oelm.study.result_types import ArmResult, Comparison, Group

MOST_BADGES = 12
MOST_KEYS = 4  # in which a published recipe differs; the JSON has all
TONES = {"better": "good", "worse": "bad", "equivalent": "", "open": "quiet", "void": "quiet"}
Row = Sequence[str | TableCell]


def name_cell(view: View, method: str, detail: str = "") -> TableCell:
    return TableCell(method, detail, colour=view.colours[method])


def results(view: View, group: Group, most_keys: int = MOST_KEYS) -> Table:
    """The test score of every method, with trivial baselines and published figures below."""
    words, perplexity = view.words, group.metric == "perplexity"
    head = [
        words("table.method"),
        words("table.mean", metric=view.metric(group))
        + (words("unit.percent") if group.kind == "share" else ""),
        *([words("metric.bits_per_byte")] if perplexity else []),
        words("table.difference", unit=view.unit(group)),
        words("table.verdict"),
    ]
    rows: list[Row] = [_result(view, group, arm) for arm in group.arms.values()]
    # Rows without a comparison: label, detail, score, bits per byte, and the score's split unless it is test.
    beside = [(*row, "") for row in _without_collapsed(view, group)]
    for name, metrics in group.trivial_baselines.items():
        bits, value = numbers.fixed(metrics.get("bits_per_byte"), 3), view.value(group, metrics[group.metric])
        beside.append((words.name("trivial", name), words("table.trivial"), value, bits, ""))
    for experiment, score in view.published(group):
        lr = numbers.learning_rate(experiment.config["training"]["lr"])
        split = words.name("split", str(experiment.published.get("split")))
        differing = view.differs(experiment, group)
        keys = words.items([*differing[:most_keys], *["..."] * (len(differing) > most_keys)])
        key = "table.published_note" if differing else "table.published_exact"
        note = words(key, id=experiment.id, lr=lr, split=split, keys=keys)
        label = words("table.published", method=experiment.config["method"]["name"])
        value = view.value(group, score, 2 if group.kind == "share" else 1)
        elsewhere = "" if experiment.published.get("split") == "test" else split
        beside.append((label, note, value, numbers.NOTHING, elsewhere))
    for label, detail, value, bits, split in beside:
        quiet = [TableCell(text, tone="quiet") for text in (*([bits] if perplexity else []), "", "")]
        rows.append([TableCell(label, detail, tone="quiet"), TableCell(value, split, tone="quiet"), *quiet])
    return replace(make_table(head, rows, view.title(group), left=(0, -1)), verdict_last=True)


def _without_collapsed(view: View, group: Group) -> Iterator[tuple[str, str, str, str]]:
    """The arms with collapsed runs: how many, and the mean of the others."""
    for arm in group.arms.values():
        if (collapses := group.collapses(arm)) is not None:
            rate = view.words.range(*(numbers.significant(100 * end, 2) for end in collapses.rate))
            counts = {"count": len(collapses.seeds), "n": len(arm.records), "rate": rate}
            left = [record for record in arm.records if record.seed not in collapses.seeds]
            name = view.words("table.without", method=arm.method)
            detail, value = view.words("table.collapsed", **counts), view.value(group, collapses.mean_without)
            yield name, detail, value, view.bits(left)


def _result(view: View, group: Group, arm: ArmResult) -> Row:
    runs = view.words("table.runs", lr=numbers.learning_rate(arm.lr), n=len(arm.values))
    runs = view.words.items(filter(None, (runs, view.differing(arm))))
    row: list[str | TableCell] = [name_cell(view, arm.method, runs), _mean_cell(view, group, arm)]
    if group.metric == "perplexity":
        row.append(view.bits(arm.records))
    comparison = view.analysis.comparison(group, arm.method, group.reference_arm)
    if comparison is None:
        return [*row, "", TableCell(view.words("verdict.reference_arm"), tone="quiet")]
    decisive = comparison.margin_p_holm if comparison.verdict == "equivalent" else comparison.p_holm
    p = f"p {numbers.equals(decisive)}" if decisive is not None else ""
    verdict = TableCell(view.verdict(comparison), p, tone=TONES[comparison.verdict])
    if comparison.combined is None:
        return [*row, numbers.NOTHING, verdict]
    interval, digits = group.shown_interval(comparison.combined), view.digits(comparison)
    span = "" if interval.low is None else view.span(interval.low, interval.high, digits)
    return [*row, TableCell(numbers.signed(interval.mean, digits), span), verdict]


def _mean_cell(view: View, group: Group, arm: ArmResult) -> str | TableCell:
    """The mean over the seeds, and its interval below."""
    interval = arm.interval
    if interval is None:
        return numbers.NOTHING
    digits = 1
    ends = [end for end in (interval.low, interval.high) if end is not None]
    if group.kind == "share" and ends:  # as many decimals as the interval supports
        digits = numbers.digits_for(*(100 * end for end in ends))
        ends = [min(max(end, 0.0), 1.0) for end in ends]  # a t interval is not limited to 0 and 1
    detail = view.words.range(*(view.value(group, end, digits) for end in ends)) if ends else ""
    return TableCell(view.value(group, interval.mean, digits), detail)


def badges(view: View) -> list[TableCell]:
    """The verdict of each comparison: better, worse, equivalent, undecided or no verdict."""
    cells = []
    for c in view.analysis.comparisons[:MOST_BADGES]:
        name = view.words("table.minus", method=c.method, reference_arm=c.reference)
        text = view.words("table.badge", name=name, verdict=view.verdict(c))
        cells.append(TableCell(text, view.title(c.group), tone=TONES[c.verdict]))
    return cells


def certainty(view: View) -> Table | None:
    """Every test and interval of every comparison."""
    words = view.words
    comparisons = [c for c in view.analysis.comparisons if c.overall is not None]
    if not comparisons:
        return None
    several = len(view.analysis.groups) > 1
    names = (
        "seeds", "clusters", "interval", "by_seeds", "by_items", "share_items", "p_plain", "p_holm", "margin",
        "p_equivalence",
    )  # fmt: skip
    head = [words(f"table.{name}") for name in names]
    rows: list[Row] = [
        [*([view.label(c.group)] if several else []), _pair_cell(view, c), *_tests(view, c)]
        for c in comparisons
    ]
    first = [*([words("table.task")] if several else []), words("table.comparison")]
    return make_table([*first, *head], rows, left=range(len(first)))


def _pair_cell(view: View, comparison: Comparison) -> TableCell:
    name = view.words("table.minus", method=comparison.method, reference_arm=comparison.reference)
    ties = len(comparison.arm.by_lr) * len(comparison.reference_arm.by_lr)
    detail = view.words("table.combinations", count=ties) if ties > 1 else ""
    return TableCell(name, detail, colour=view.colours[comparison.method])


def _tests(view: View, comparison: Comparison) -> list[str]:
    overall, combined = comparison.overall, comparison.combined
    assert overall is not None
    digits, share = view.digits(comparison), overall.share_items
    shown_interval = comparison.group.shown_interval
    intervals = (
        combined and shown_interval(combined),
        *(i and shown_interval(i) for i in (comparison.by_seeds, comparison.by_items)),
    )
    return [
        str(overall.seeds),
        numbers.count(overall.items),
        *(view.span(one.low, one.high, digits) if one else numbers.NOTHING for one in intervals),
        numbers.NOTHING if share is None else f"{100 * share:.0f} %",
        numbers.p_value(combined.p if combined else None),
        numbers.p_value(comparison.p_holm),
        f"±{comparison.margin:g}",
        numbers.p_value(comparison.margin_p_holm),
    ]


def across(view: View) -> Table:
    head = [view.words(f"table.{name}") for name in ("method", "tasks", "iqm", "improvement")]
    rows: list[Row] = []
    for entry in view.analysis.across:
        iqm, chance = entry.interquartile_mean, entry.probability_of_improvement
        digits = numbers.digits_for(iqm.low, iqm.high)
        ends = ""
        if chance.low is not None and chance.high is not None:
            ends = view.words.range(*(numbers.fixed(100 * end, 0) for end in (chance.low, chance.high)))
        mean = view.with_detail(numbers.signed(iqm.value, digits), view.span(iqm.low, iqm.high, digits))
        share = view.with_detail(f"{100 * chance.value:.0f} %", ends)
        rows.append([name_cell(view, entry.method), str(entry.tasks), mean, share])
    return make_table(head, rows)


def learning_rates(view: View, group: Group) -> Table | None:
    """The mean validation score of every learning rate, the good range, and the area under the curve."""
    words, grid = view.words, group.tried_lrs
    if not grid and not any(arm.area() for arm in group.arms.values()):
        return None
    head = [words("table.method"), *map(numbers.learning_rate, grid)]
    if len(grid) > 1:
        head += [words("table.range"), words("table.lost", unit=view.unit(group))]
    rows: list[Row] = []
    for arm in group.arms.values():
        row: list[str | TableCell] = [name_cell(view, arm.method)]
        for lr in grid:
            text = _trial(view, group, arm, lr)
            row.append(f"{text}\u00a0✓" if arm.chosen and lr == arm.lr else text)
        if len(grid) > 1:
            row += _robustness(view, group, arm)
        rows.append([*row, view.value(group, arm.area(), 1)])
    return make_table([*head, words("table.area")], rows, view.title(group))


def _trial(view: View, group: Group, arm: ArmResult, lr: float) -> str:
    if lr not in arm.lr_scores:
        return numbers.NOTHING
    score = arm.lr_scores[lr]
    if any(cell.lr == lr for cell in arm.unevaluated):
        return view.words("table.unevaluated")
    if score is None:
        return view.words("table.failed")
    text = view.value(group, score, 1)
    if group.metric != "perplexity":
        return text
    return view.with_detail(text, view.bits([r for r in arm.trials if r.lr == lr], "best"))


def _robustness(view: View, group: Group, arm: ArmResult) -> Row:
    robustness = group.robustness(arm)
    if robustness is None:
        return [numbers.NOTHING, numbers.NOTHING]
    low, high = numbers.learning_rate(robustness.low), numbers.learning_rate(robustness.high)
    span = low if robustness.low == robustness.high else view.words.range(low, high)
    if robustness.lost is None:
        return [span, TableCell(view.words.name("unknown", str(robustness.lost_unknown)), tone="quiet")]
    # For a perplexity in per cent of the best, as all its differences.
    lost = robustness.lost if group.kind == "share" else robustness.lost / robustness.best_score
    return [span, numbers.fixed(100 * lost, 1)]


def cost(view: View, group: Group) -> Table | None:
    """Parameters, time and memory of the measured runs (of the trials, if nothing is measured yet)."""
    names = ("method", "total", "trainable", "frozen", "step_time", "train_time", "memory")
    rows: list[Row] = []
    for arm in group.arms.values():
        runs = arm.finished or tuple(r for r in arm.trials if r.completed)
        if not runs:
            continue
        parameters = runs[0].results.get("parameters") or {}
        frozen, total = parameters.get("frozen"), parameters.get("total")
        details = [f"{100 * frozen / total:.1f} %"] if frozen else []
        details += _stages(view, parameters)
        share = view.with_detail(numbers.count(frozen or 0), view.words("list.semicolon").join(details))
        # On a CPU a record holds only the peak of its process, and a process trains many runs.
        on_cpu = any(record.environment.get("device") == "cpu" for record in runs)
        sizes = [numbers.count(total), numbers.count(parameters.get("trainable")), share]
        times = [numbers.time_of(arm.step_time()), numbers.time_of(mean_of(runs, "train_time_s"))]
        memory = numbers.memory(None if on_cpu else mean_of(runs, "peak_memory_bytes"))
        rows.append([name_cell(view, arm.method), *sizes, *times, memory])
    head = [view.words(f"table.{name}") for name in names]
    return make_table(head, rows, view.title(group)) if rows else None


def _stages(view: View, parameters: dict[str, Any]) -> list[str]:
    """For a schedule of unfreezing, how many parameters are frozen from which step on; of more than two
    stages the first and the last."""
    later = (parameters.get("stages") or [])[1:]
    shown = later if len(later) < 3 else [later[0], later[-1]]
    words = [
        view.words("table.from_step", step=f"{stage['step']:,}", count=numbers.count(stage["frozen"]))
        for stage in shown
    ]
    return words if len(shown) == len(later) else [words[0], "…", words[1]]


def raw(view: View, group: Group) -> Table | None:
    """The test score of every seed and method, and the differences that are compared."""
    arms = [arm for arm in group.arms.values() if arm.records]
    if not arms:
        return None
    comparisons = [c for c in view.analysis.of_group(group) if c.arm in arms]
    columns = {arm.method: arm for arm in arms}
    for arm in arms:  # and columns for runs at near-tied learning rates
        ties = [replace(arm, records=runs, lr=lr, near_ties={}) for lr, runs in arm.near_ties.items()]
        columns |= {f"{arm.method} @ {numbers.learning_rate(tie.lr)}": tie for tie in ties}
    head = [
        view.words("table.seed"), *columns,
        *(view.words("table.minus", method=c.method, reference_arm=c.reference) for c in comparisons),
    ]  # fmt: skip
    differences = [dict(zip(c.seeds, c.differences, strict=True)) for c in comparisons]
    rows = [
        [
            str(seed),
            *(_of_seed(view, group, arm, seed) for arm in columns.values()),
            *(
                numbers.signed(group.shown(by_seed[seed]) if seed in by_seed else None, 2)
                for by_seed in differences
            ),
        ]
        for seed in sorted({seed for arm in arms for seed in arm.seeds})
    ]
    return make_table(head, rows, view.title(group), left=())


def _of_seed(view: View, group: Group, arm: ArmResult, seed: int) -> str:
    texts = []
    for record in [record for record in arm.records if record.seed == seed]:
        text = view.value(group, record.test, 2)
        if group.metric == "perplexity":
            text = view.with_detail(text, view.bits([record]))
        texts.append(text if arm.lr is not None else f"{text} @ {numbers.learning_rate(record.lr)}")
    return view.words.items(texts) or numbers.NOTHING
