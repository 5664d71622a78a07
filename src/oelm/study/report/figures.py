"""The figures of a report. A method has the same colour and mark in all of them."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from oelm.study.report import numbers
from oelm.study.report.document import Figures, Legend
from oelm.study.report.drawing import BAND, FAINT, INK, LINE, PAGE, colour, draw, mark
from oelm.study.report.view import View
from oelm.study.result_types import ArmResult, Comparison, Group

MOST_FACETS = 6  # settings that are drawn; the tables have all of them
MOST_ROWS = 30  # of a forest plot
HEIGHT = 2.75


def forest(view: View, kind: str) -> Figures | None:
    """Paired differences with their intervals, one row for each comparison of a kind."""
    rows = [c for c in view.analysis.comparisons if c.paired is not None and c.group.kind == kind][:MOST_ROWS]
    if not rows:
        return None
    words, unit = view.words, view.unit(rows[0].group)
    margin = max(c.equivalence.margin for c in rows if c.equivalence)

    def paint(axes: Any) -> None:
        axes.axvspan(-margin, margin, color=BAND, lw=0)
        axes.axvline(0, color=FAINT, lw=1)
        for place, comparison in enumerate(rows):
            _forest_row(view, axes, comparison, len(rows) - 1 - place)
        axes.set_ylim(-0.45, len(rows) - 0.1)
        _set_limits(axes, rows, margin)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(words("figure.difference", unit=unit))

    texts = [
        f"{view.label(c.group)}, {c.method}: "
        f"{numbers.signed(c.paired.mean, view.digits(c))} "
        f"({view.span(c.paired.low, c.paired.high, view.digits(c))})"
        for c in rows
        if c.paired is not None
    ]
    title = words("figure.forest")
    figure = draw(
        f"forest-{kind}", 0.78 + 0.5 * len(rows), paint, title, words("list.semicolon").join(texts), left=0.15
    )
    return Figures(title, words("figure.forest_how", margin=f"{margin:g}", unit=unit), [figure], [])


def _forest_row(view: View, axes: Any, comparison: Comparison, y: float) -> None:
    paired, items = comparison.paired, comparison.items
    assert paired is not None
    shade = colour(view.colours[comparison.method])
    if items is not None and items.low is not None:
        axes.plot([items.low, items.high], [y - 0.2] * 2, color=FAINT, lw=1.2, solid_capstyle="butt")
    if paired.low is not None:
        axes.plot([paired.low, paired.high], [y, y], color=shade, lw=3, solid_capstyle="butt")
    void = comparison.verdict == "void"
    axes.plot(
        paired.mean, y, mark(view.colours[comparison.method]), ms=8, color=shade,
        markerfacecolor=PAGE if void else shade, markeredgewidth=1.8,
    )  # fmt: skip
    text = f"{_short(_row_name(view, comparison), 40)}: {view.verdict(comparison)}"
    axes.text(
        0, y + 0.24, text, transform=axes.get_yaxis_transform(), va="bottom", ha="left", color=INK, size=9.5
    )


def _row_name(view: View, comparison: Comparison) -> str:
    """A name that distinguishes a comparison from the others, the distinction first: long names are cut."""
    task = view.label(comparison.group) if len(view.analysis.groups) > 1 else ""
    methods = {c.method for c in view.analysis.comparisons}
    if task and len(methods) == 1:
        return task
    name = f"{comparison.method} − {comparison.group.reference_arm}"
    return f"{comparison.method}, {task}" if task else name


def _set_limits(axes: Any, rows: Sequence[Comparison], margin: float) -> None:
    """Make room for zero, the margin and every interval."""
    ends = [-margin, margin]
    for comparison in rows:
        paired, items = comparison.paired, comparison.items
        assert paired is not None
        drawn = [paired.mean, paired.low, paired.high, *((items.low, items.high) if items else ())]
        ends += [end for end in drawn if end is not None]
    low, high = min(ends), max(ends)
    axes.set_xlim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def learning_rates(view: View) -> Figures | None:
    """Validation score against learning rate, one line for each method."""
    groups = [group for group in view.analysis.groups if len(group.tried_lrs) > 1]
    return _facets(view, "learning_rates", groups, _paint_learning_rates)


def _paint_learning_rates(view: View, group: Group, axes: Any) -> str:
    texts, lrs = [], group.tried_lrs
    for arm in group.arms.values():
        known = {lr: score for lr, score in arm.lr_scores.items() if score is not None}
        if not known:
            continue
        place = view.colours[arm.method]
        scores = [_shown(group, score) for score in known.values()]
        axes.plot(list(known), scores, **_line(view, group, arm))
        for record in arm.trials:
            if record.validation is not None and len({r.seed for r in arm.trials}) > 1:
                axes.plot(record.lr, _shown(group, record.validation), ".", color=colour(place), alpha=0.5)
        if arm.chosen and arm.lr in known:
            axes.plot(
                arm.lr, _shown(group, known[arm.lr]), "o", ms=12, mfc="none", mec=colour(place), mew=1.3,
                clip_on=False,
            )  # fmt: skip
        pairs = (f"{numbers.learning_rate(lr)} {view.value(group, score)}" for lr, score in known.items())
        texts.append(f"{arm.method}: {', '.join(pairs)}")
    axes.set_xscale("log")
    shown = lrs[:: math.ceil(len(lrs) / 6)]
    axes.set_xticks(shown, [numbers.learning_rate(lr) for lr in shown], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(view.words("figure.learning_rate"))
    return "; ".join(texts)


def curves(view: View) -> Figures | None:
    """Learning curves of the measured runs: the mean and the range over the seeds."""
    groups = [g for g in view.analysis.groups if any(_curve(g, arm) for arm in g.arms.values())]
    return _facets(view, "curves", groups, _paint_curves)


def _curve(group: Group, arm: ArmResult) -> dict[int, list[float]]:
    """Step -> the scores of all measured runs, for steps at which every run has one."""
    curve: dict[int, list[float]] = defaultdict(list)
    for point in [point for record in arm.records for point in record.curve]:
        value = point["metrics"].get(group.metric)
        if point["split"] == "validation" and value is not None and math.isfinite(value):
            curve[point["step"]].append(value)
    return {step: values for step, values in sorted(curve.items()) if len(values) == len(arm.records)}


def _paint_curves(view: View, group: Group, axes: Any) -> str:
    texts, last = [], 0
    for arm in group.arms.values():
        if not (curve := _curve(group, arm)):
            continue
        steps, place = list(curve), view.colours[arm.method]
        last = max(last, steps[-1])
        lows, means, highs = (
            [_shown(group, pick(values)) for values in curve.values()] for pick in (min, fmean, max)
        )
        many = len(steps) > 12
        axes.plot(steps, means, **_line(view, group, arm) | ({"marker": None} if many else {}))
        if len(steps) > 1:
            axes.fill_between(steps, lows, highs, color=colour(place), alpha=0.18, lw=0)
        else:
            axes.vlines(steps, lows, highs, color=colour(place), alpha=0.5)
        ends = (view.value(group, fmean(curve[step])) for step in (steps[0], steps[-1]))
        texts.append(f"{arm.method}: {' → '.join(ends)}")
    for experiment, value in view.published(group):
        method = experiment.config["method"]["name"]
        if method in view.colours:
            axes.plot(
                last * 1.06, _shown(group, value), "*", ms=11, color=colour(view.colours[method]),
                markerfacecolor=PAGE, markeredgewidth=1.4, clip_on=False,
            )  # fmt: skip
            texts.append(view.words("figure.published", id=experiment.id, value=view.value(group, value)))
    axes.set_xlabel(view.words("figure.step"))
    axes.locator_params(axis="x", nbins=5)
    return "; ".join(texts)


def expected_best(view: View) -> Figures | None:
    """The expected best validation score after a number of trials."""
    groups = [g for g in view.analysis.groups if any(len(a.trials) > 1 for a in g.arms.values())]
    return _facets(view, "expected", groups, _paint_expected)


def _paint_expected(view: View, group: Group, axes: Any) -> str:
    texts = []
    for arm in group.arms.values():
        if scores := arm.expected_best(group.larger_is_better):
            trials = range(1, len(scores) + 1)
            axes.plot(trials, [_shown(group, score) for score in scores], **_line(view, group, arm))
            texts.append(f"{arm.method}: {view.value(group, scores[0])} → {view.value(group, scores[-1])}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(view.words("figure.trials"))
    return "; ".join(texts)


def _line(view: View, group: Group, arm: ArmResult) -> dict[str, Any]:
    """The style of a method's line; that of the reference arm is wider, to be seen below an equal one."""
    place = view.colours[arm.method]
    style: dict[str, Any] = {"color": colour(place), "marker": mark(place), "clip_on": False}
    return style | ({"lw": 3.4, "ms": 7.5} if arm.method == group.reference_arm else {})


def _shown(group: Group, value: float) -> float:
    return 100 * value if group.kind == "share" else value


def _facets(
    view: View, name: str, groups: list[Group], paint: Callable[[View, Group, Any], str]
) -> Figures | None:
    """One small figure for each setting, with the score's axis, the trivial baselines and a legend."""
    if not groups:
        return None
    words = view.words
    title = words(f"figure.{name}")
    figures, published, has_baselines = [], False, False
    for place, group in enumerate(groups[:MOST_FACETS]):
        described: list[str] = []

        def fill(axes: Any, group: Group = group, described: list[str] = described) -> None:
            described.append(paint(view, group, axes))
            described.extend(_draw_baselines(view, group, axes))
            _scale(view, group, axes)

        right = 0.5 if group.metric == "perplexity" else 0.2
        drawn = draw(f"{name}-{place}", HEIGHT, fill, title, "", view.title(group), right=right)
        figures.append(replace(drawn, description="; ".join(described)))
        has_baselines = has_baselines or len(described) > 1
        published = published or (name == "curves" and bool(view.published(group)))
    legend = [
        Legend(method, place, mark(place))
        for method, place in view.colours.items()
        if any(method in group.arms for group in groups)
    ]
    if has_baselines:
        legend.append(Legend(words("figure.trivial_line"), None, "dots"))
    if published:
        legend.append(Legend(words("figure.published_mark"), None, "star"))
    caption = words(f"figure.{name}_how")
    if published:
        caption += " " + words("figure.curves_published")
    if len(groups) > MOST_FACETS:
        caption += " " + words("figure.facets", shown=MOST_FACETS, total=len(groups))
    return Figures(title, caption, figures, legend)


def _draw_baselines(view: View, group: Group, axes: Any) -> list[str]:
    """Draw trivial baselines on validation as dotted lines, those near enough to the curves; their texts."""
    baselines: dict[str, Any] = next((b for r in group.records if (b := r.results.get("references"))), {})
    low, high = axes.get_ylim()
    near = 0.6 * (high - low)
    texts = []
    for name, splits in baselines.items():
        value = (splits.get("validation") or {}).get(group.metric)
        if value is None or not low - near <= (shown := _shown(group, value)) <= high + near:
            continue
        axes.axhline(shown, color=FAINT, lw=1.2, ls=(0, (1, 2)))
        label = view.words.name("trivial", name)
        axes.text(
            0.01, shown, _short(label, 34), transform=axes.get_yaxis_transform(), color=FAINT, size=8.5,
            va="bottom", zorder=1.5, bbox={"facecolor": PAGE, "alpha": 0.7, "pad": 0.5, "lw": 0},
        )  # fmt: skip
        texts.append(f"{label}: {view.value(group, value)}")
    return texts


def _scale(view: View, group: Group, axes: Any) -> None:
    """The axis of the score: per cent, or a perplexity with bits per byte on the other side."""
    unit = " (%)" if group.kind == "share" else ""
    axes.set_title(view.words("figure.score", metric=view.metric(group)) + unit, loc="left", x=-0.1, pad=8)
    axes.grid(axis="y")
    axes.margins(y=0.12)
    if group.kind == "share":
        axes.locator_params(axis="y", nbins=6)
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    low, high = axes.dataLim.intervaly
    if low > 0 and high / low > 4:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.locator_params(axis="y", nbins=6)
    axes.yaxis.set_major_formatter(plain)
    if group.metric == "perplexity" and (factor := _bits_per_log2(group)):
        other = axes.secondary_yaxis(
            "right", functions=(lambda y: factor * _log2(y), lambda b: 2.0 ** (b / factor))
        )
        other.yaxis.set_major_locator(MaxNLocator(5))
        other.yaxis.set_minor_locator(NullLocator())
        other.yaxis.set_major_formatter(plain)
        other.tick_params(colors=LINE, labelcolor=FAINT)
        other.spines["right"].set_visible(False)
        axes.set_title(view.words("metric.bits_per_byte"), loc="right", x=1.12, pad=8)


def _log2(values: Any) -> Any:
    import numpy as np

    return np.log2(np.maximum(values, 1e-12))


def _bits_per_log2(group: Group) -> float | None:
    """Tokens per byte of the validation split: the factor from log2 of a perplexity to bits per byte."""
    for record in group.records:
        metrics = (record.results.get("best") or {}).get("metrics") or {}
        perplexity, bits = metrics.get("perplexity"), metrics.get("bits_per_byte")
        if perplexity and bits and math.isfinite(perplexity) and perplexity > 1:
            return bits / math.log2(perplexity)
    return None
