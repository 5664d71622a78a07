"""The figures of a report, as SVG with the fonts and colours of the page; a method looks the same in all."""

import io
import math
import re
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup

from oelm.study.history import ArmHistory, arm_histories
from oelm.study.report import numbers
from oelm.study.report.document import Figure, Figures
from oelm.study.report.view import View
from oelm.study.result_types import ArmResult, Comparison, Group

MOST_FACETS = 6  # settings that are drawn; the tables have all of them
MOST_ROWS = 30  # of a forest plot
HEIGHT = 2.75
BESIDE, LETTERS = 1.45, 20  # inches left of a forest plot, and the letters of a line of a label that fit
WIDTH = 4.0  # inches; on a phone of 360 px a letter of 9.5 points is then about 10 px high

# Placeholders that are replaced by the page's CSS variables, so that one drawing serves light and dark
# themes. The fallbacks apply to a figure taken out of its page.
INK, FAINT, LINE, PAGE, BAND = "#0d0d01", "#0d0d02", "#0d0d03", "#0d0d04", "#0d0d05"
# Okabe and Ito's palette, for colour-blind readers.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#7f7f7f")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_VARIABLES = {
    INK: "currentColor", FAINT: "var(--faint, #667)", LINE: "var(--line, #ccd)", PAGE: "var(--page, #fff)",
    BAND: "var(--band, #eef)",
} | {f"#0d0e{place:02x}": f"var(--c{place}, {colour})" for place, colour in enumerate(PALETTE)}  # fmt: skip

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the reader's fonts: Chinese too
    "svg.hashsalt": "oelm",  # the same numbers give the same file
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.size": 9.5, "axes.titlesize": 9.5, "axes.labelsize": 9.5, "xtick.labelsize": 9,
    "ytick.labelsize": 9, "text.color": INK, "axes.labelcolor": FAINT, "axes.titlecolor": FAINT,
    "axes.edgecolor": LINE, "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT, "grid.color": LINE, "grid.linewidth": 0.6, "lines.linewidth": 1.8,
    "lines.markersize": 5.5, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
}  # fmt: skip


def forest(view: View, kind: str) -> Figures | None:
    """Paired differences with their intervals, one row for each comparison of a kind."""
    rows = [c for c in view.analysis.comparisons if c.combined and c.group.kind == kind][:MOST_ROWS]
    if not rows:
        return None
    words, unit = view.words, view.unit(rows[0].group)
    margin = max(c.margin for c in rows)
    bound, shown = rows[0].group.bound(margin), rows[0].group.shown

    def paint(axes: Any) -> None:
        axes.axvspan(shown(-bound), shown(bound), color=BAND, lw=0)
        for index, comparison in enumerate(rows):
            _forest_row(view, axes, comparison, len(rows) - 1 - index)
        axes.axvline(0, color=FAINT, lw=1, zorder=1)
        axes.set_ylim(-0.5, len(rows) - 0.5)
        axes.margins(x=0.06)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(words("figure.difference", unit=unit))

    title = words("figure.forest")
    figure = draw(f"forest-{kind}", 0.78 + 0.5 * len(rows), paint, title, left=BESIDE)
    return Figures(title, words("figure.forest_how", margin=f"{margin:g}", unit=unit), [figure], {})


def _forest_row(view: View, axes: Any, comparison: Comparison, y: float) -> None:
    shown_interval, items = comparison.group.shown_interval, comparison.by_items
    assert comparison.combined is not None
    combined, items = shown_interval(comparison.combined), items and shown_interval(items)
    colour_index = view.colours[comparison.method]
    shade = colour(colour_index)
    if items is not None and items.low is not None:
        axes.plot([items.low, items.high], [y - 0.2] * 2, color=FAINT, lw=1.2, solid_capstyle="butt")
    if combined.low is not None:
        axes.plot([combined.low, combined.high], [y, y], color=shade, lw=3, solid_capstyle="butt")
    filling = PAGE if comparison.verdict == "void" else shade
    axes.plot(combined.mean, y, _mark(colour_index), ms=8, color=shade, mfc=filling, markeredgewidth=1.8)
    # The part that distinguishes a comparison from the others comes first, as long names are cut.
    name, task = comparison.method, view.title(comparison.group)
    if not task:
        name = f"{name} − {comparison.reference}"
    else:
        name = task if len({c.method for c in view.analysis.comparisons}) == 1 else f"{name}, {task}"
    verdict = textwrap.wrap(view.verdict(comparison), LETTERS)
    lines, most = textwrap.wrap(name, LETTERS), max(1, 3 - len(verdict))
    if len(lines) > most:
        lines[most - 1 :] = [f"{lines[most - 1][: LETTERS - 1]}…"]
    text = "\n".join([*lines, *verdict])
    axes.annotate(text, (0, y), (-6, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                  ha="right", va="center", color=INK, size=9)  # fmt: skip


def learning_rates(view: View) -> Figures | None:
    """Validation score against learning rate, one line for each method."""
    groups = [group for group in view.analysis.groups if len(group.tried_lrs) > 1]
    return _facets(view, "learning_rates", groups, _paint_learning_rates)


def _paint_learning_rates(view: View, group: Group, axes: Any) -> None:
    lrs = group.tried_lrs
    for arm in group.arms.values():
        known = {lr: score for lr, score in arm.lr_scores.items() if score is not None}
        if not known:
            continue
        shade = colour(view.colours[arm.method])
        axes.plot(
            list(known), [_shown(group, score) for score in known.values()], **_line(view, group, arm.method)
        )
        for record in arm.trials:
            if record.validation is not None and len({r.seed for r in arm.trials}) > 1:
                axes.plot(record.lr, _shown(group, record.validation), ".", color=shade, alpha=0.5)
        if arm.chosen and arm.lr in known:
            ring = {"ms": 12, "mfc": "none", "mec": shade, "mew": 1.3, "clip_on": False}
            axes.plot(arm.lr, _shown(group, known[arm.lr]), "o", **ring)
    axes.set_xscale("log")
    shown = lrs[:: math.ceil(len(lrs) / 6)]
    axes.set_xticks(shown, [numbers.learning_rate(lr) for lr in shown], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(view.words("figure.learning_rate"))


def curves(view: View) -> Figures | None:
    """Learning curves of the measured runs: the mean and the range over the seeds."""
    groups = [g for g in view.analysis.groups if any(_curve(g, arm) for arm in g.arms.values())]
    return _facets(view, "curves", groups, _paint_curves)


def _curve(group: Group, arm: ArmResult) -> dict[int, list[float]]:
    """Step -> the scores of all measured runs, for steps at which every run has one."""
    curve: dict[int, list[float]] = defaultdict(list)
    for point in [point for record in arm.finished for point in record.curve]:
        if point["split"] == "validation":
            curve[point["step"]].append(point["metrics"][group.metric])
    return {step: values for step, values in sorted(curve.items()) if len(values) == len(arm.finished)}


def _tokens_a_step(group: Group) -> float | None:
    """Tokens of a training step, for language models whose runs all have the same number; otherwise None."""
    runs = [record.results for arm in group.arms.values() for record in arm.finished]
    counts = {run["tokens"] / run["steps"] if run.get("steps") and "tokens" in run else None for run in runs}
    return counts.pop() if group.kind == "perplexity" and len(counts) == 1 else None


def _paint_curves(view: View, group: Group, axes: Any) -> None:
    tokens = _tokens_a_step(group)
    for arm in group.arms.values():
        if not (curve := _curve(group, arm)):
            continue
        shade = colour(view.colours[arm.method])
        steps = [step if tokens is None else 1e-6 * tokens * step for step in curve]
        lows, means, highs = (
            [_shown(group, pick(values)) for values in curve.values()] for pick in (min, fmean, max)
        )
        many = len(steps) > 12
        axes.plot(steps, means, **_line(view, group, arm.method) | ({"marker": None} if many else {}))
        if len(steps) > 1:
            axes.fill_between(steps, lows, highs, color=shade, alpha=0.18, lw=0)
        else:
            axes.vlines(steps, lows, highs, color=shade, alpha=0.5)
    axes.set_xlabel(view.words("figure.step" if tokens is None else "figure.tokens"))
    axes.locator_params(axis="x", nbins=5)


def histories(view: View) -> Figures | None:
    """The loss at every evaluation, and what was published for the same run."""
    groups = [g for g in view.analysis.groups if any(_losses(arm) for arm in arm_histories(g))]
    return _facets(view, "histories", groups, _paint_histories, loss=True)


def _losses(arm: ArmHistory) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in arm.history if "loss" in row}


def _paint_histories(view: View, group: Group, axes: Any) -> None:
    for arm in arm_histories(group):
        losses, index = _losses(arm), view.colours[arm.method]
        points, last = arm.published.get("history", {}), max(losses, default=0)
        published = {step: row["loss"] for step, row in points.items() if "loss" in row and step <= last}
        style = _line(view, group, arm.method) | ({"marker": None} if len(losses) > 12 else {})
        axes.plot(list(losses), list(losses.values()), **style)
        axes.plot(
            list(published), list(published.values()), _mark(index), color=colour(index), mfc="none", ms=5
        )
    axes.set_xlabel(view.words("figure.step"))
    axes.locator_params(axis="x", nbins=5)


def _line(view: View, group: Group, method: str) -> dict[str, Any]:
    """The style of a method's line; the reference arm's is wider, to be visible below an identical one."""
    index = view.colours[method]
    style: dict[str, Any] = {"color": colour(index), "marker": _mark(index), "clip_on": False}
    return style | ({"lw": 3.4, "ms": 7.5} if method == group.reference_arm else {})


def _shown(group: Group, value: float) -> float:
    return 100 * value if group.kind == "share" else value


def _facets(
    view: View, name: str, groups: list[Group], paint: Callable[[View, Group, Any], None], loss: bool = False
) -> Figures | None:
    """One small figure for each setting, with the score's axis (or the loss's) and a legend."""
    if not groups:
        return None
    title = view.words(f"figure.{name}")
    caption = view.words(f"figure.{name}_how")
    if len(groups) > MOST_FACETS:
        caption += " " + view.words("figure.facets", shown=MOST_FACETS, total=len(groups))
    drawn = {method for group in groups for method in group.arms}
    legend = {method: index for method, index in view.colours.items() if method in drawn}
    figures = []
    for index, group in enumerate(groups[:MOST_FACETS]):

        def fill(axes: Any, group: Group = group) -> None:
            paint(view, group, axes)
            _scale(view, replace(group, metric="loss", kind="loss") if loss else group, axes)
            if loss:
                axes.set_title(view.words("metric.loss"), loc="left", x=-0.1, pad=8)

        right = 0.5 if group.metric == "perplexity" and not loss else 0.2
        figures.append(draw(f"{name}-{index}", HEIGHT, fill, title, view.title(group), right=right))
    return Figures(title, caption, figures, legend)


def _scale(view: View, group: Group, axes: Any) -> None:
    """The axis of the score: per cent, or a perplexity with bits per byte on the other side."""
    unit = view.words("unit.percent") if group.kind == "share" else ""
    axes.set_title(view.words("figure.score", metric=view.metric(group)) + unit, loc="left", x=-0.1, pad=8)
    axes.grid(axis="y")
    axes.margins(y=0.12)
    if group.kind == "share":
        axes.locator_params(axis="y", nbins=6)
        return
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axes.dataLim.intervaly
    if low > 0 and high / low > 4:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.locator_params(axis="y", nbins=6)
    axes.yaxis.set_major_formatter("{x:g}")
    if group.metric == "perplexity" and (factor := _bits_per_log2(group)):
        other = axes.secondary_yaxis(
            "right",
            functions=(lambda y: factor * np.log2(np.maximum(y, 1e-12)), lambda b: 2.0 ** (b / factor)),
        )
        other.yaxis.set_major_locator(MaxNLocator(5))
        other.yaxis.set_minor_locator(NullLocator())
        other.yaxis.set_major_formatter("{x:g}")
        other.tick_params(colors=LINE, labelcolor=FAINT)
        other.spines["right"].set_visible(False)
        axes.set_title(view.words("metric.bits_per_byte"), loc="right", x=1.12, pad=8)


def _bits_per_log2(group: Group) -> float | None:
    """Tokens per byte of the validation split: the factor from log2 of a perplexity to bits per byte."""
    for record in group.records:
        metrics = (record.results.get("best") or {}).get("metrics") or {}
        perplexity, bits = metrics.get("perplexity"), metrics.get("bits_per_byte")
        if perplexity and bits and math.isfinite(perplexity) and perplexity > 1:
            return bits / math.log2(perplexity)
    return None


def colour(index: int) -> str:
    return f"#0d0e{index % len(PALETTE):02x}"


def _mark(index: int) -> str:
    return MARKS[index % len(MARKS)]


def draw(
    name: str,
    height: float,
    paint: Callable[[Any], None],
    title: str,
    label: str = "",
    left: float = 0.5,
    right: float = 0.15,
) -> Figure:
    """A figure whose axes `paint` has filled; margins in inches. `name` makes its ids unique in the page."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # matplotlib only measures the text here; the reader's fonts have the glyphs.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        canvas = Canvas(figsize=(WIDTH, height))
        axes = canvas.add_axes(
            (left / WIDTH, 0.48 / height, 1 - (left + right) / WIDTH, 1 - (0.48 + 0.3) / height)
        )
        axes.patch.set_alpha(0)
        paint(axes)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    box, inside = _inline(buffer.getvalue(), name)
    return Figure(name, box, Markup(inside), title, label)


def _inline(svg: str, name: str) -> tuple[str, str]:
    """The viewBox and the content of an SVG, with unique ids and the theme's colours."""
    svg = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="([^"]+)"', svg)
    assert box is not None
    inside = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
    # Its style would apply to the whole page.
    inside = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", inside, flags=re.DOTALL)
    # Only inside tags: texts, whose angle brackets are escaped, stay as they are.
    inside = re.sub(r"<[^>]+>", lambda tag: _adapt(tag[0], name), inside)
    return box[1], inside


def _adapt(tag: str, name: str) -> str:
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', tag)
    tag = re.sub(r'(?:xlink:)?href="#([^"]+)"', rf'href="#{name}-\1"', tag)
    tag = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", tag)
    tag = re.sub(r"font-family: [^;\"]+;? ?", "", tag)  # matplotlib's fonts; the page has its own
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], tag)
