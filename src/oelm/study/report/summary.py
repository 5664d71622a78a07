"""What the command line prints: a compact table for each setting, then the answer, in 80 columns."""

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oelm.study.report import numbers
from oelm.study.report.answer import answer
from oelm.study.report.notices import alert, notices
from oelm.study.report.view import View
from oelm.study.report.words import Words
from oelm.study.result_types import Analysis, ArmResult, Group

WIDTH = 80
RIGHT = ("n", "mean", "bits", "difference", "interval", "p")


def summary(analysis: Analysis, lang: str = "en") -> str:
    """The results of every setting with its trivial baselines, and the answer in two sentences."""
    view = View(analysis, Words(lang))
    # Fixed width, no colour, no markup: the text is the same in a terminal, a pipe and a log.
    console = Console(
        file=io.StringIO(), width=WIDTH, color_system=None, markup=False, highlight=False, emoji=False
    )
    for group in analysis.groups:
        percent = view.words("summary.percent") if group.kind == "share" else ""
        heading = view.words(
            "summary.heading",
            task=view.label(group),
            model=group.model,
            metric=view.metric(group),
            percent=percent,
        )
        console.print(Text(heading))
        console.print(_table(view, group))
        if baselines := _trivial_baselines(view, group):
            console.print(Text(baselines))
        console.print()
    warned = notices(view)
    never = [listed.text for listed in warned if listed.kind == "unevaluated"]
    for sentence in [*answer(view), *never, alert(view.words, warned)]:
        if sentence:
            console.print(Text(sentence))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _table(view: View, group: Group) -> Table:
    perplexity = group.metric == "perplexity"
    columns = ["method", "lr", "n", "mean", "bits", "difference", "interval", "p", "verdict"]
    if not perplexity:
        columns.remove("bits")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=None)
    for name in columns:
        wraps = name in ("method", "verdict")
        table.add_column(
            Text(view.words(f"summary.{name}")),
            justify="right" if name in RIGHT else "left",
            no_wrap=not wraps,
            overflow="fold",
        )
    for arm in group.arms.values():
        table.add_row(*_row(view, group, arm, perplexity))
    return table


def _trivial_baselines(view: View, group: Group) -> str:
    texts = []
    for name, metrics in group.trivial_baselines.items():
        text = f"{view.words.name('trivial', name)} {view.value(group, metrics[group.metric])}"
        if group.metric == "perplexity":
            bits = numbers.fixed(metrics.get("bits_per_byte"), 3)
            text = view.with_detail(text, f"{bits} {view.words('metric.bits_per_byte')}")
        texts.append(text)
    return view.words("summary.trivial_baselines", names=view.words.items(texts)) if texts else ""


def _row(view: View, group: Group, arm: ArmResult, perplexity: bool) -> list[Text]:
    interval = arm.interval
    cells = [arm.method, numbers.learning_rate(arm.lr), str(len(arm.values))]
    if interval is None:
        cells.append(numbers.NOTHING)
    else:
        digits = view.arm_digits(group, interval)
        text = view.value(group, interval.mean, digits)
        if interval.high is not None:  # a t interval: as far above the mean as below
            places = len(text.partition(".")[2])
            half = interval.high - interval.mean
            text += f" ± {numbers.fixed(100 * half if group.kind == 'share' else half, places)}"
        cells.append(text)
    if perplexity:
        cells.append(view.bits(arm.records))
    comparison = view.comparison(group, arm.method)
    if comparison is None or comparison.paired is None:
        verdict = view.words("verdict.reference_arm") if comparison is None else view.verdict(comparison)
        cells += ["", "", "", verdict]
    else:
        paired, digits = comparison.paired, view.digits(comparison)
        cells += [
            numbers.signed(paired.mean, digits),
            view.span(paired.low, paired.high, digits),
            numbers.p_value(comparison.p_holm),
            view.verdict(comparison),
        ]
    return [Text(cell) for cell in cells]
