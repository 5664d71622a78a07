"""The findings on one page: the answer, every claim with its number, pictures, and the limits of the numbers.
Made from records alone, so that the same records give the same page."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from oelm.claims import data
from oelm.claims.collect import Collection, ages
from oelm.claims.language_modelling import METHOD, REFERENCE, language_settings, sentences, table_rows
from oelm.claims.published_recipe import difference, recipe_sentences, repeats_recipe
from oelm.claims.verdicts import Finding, Verdict, measured
from oelm.models.gpt_sizes import is_reference
from oelm.study.report import figures, numbers
from oelm.study.report.document import Figure, Figures, templates
from oelm.study.report.view import View, Words
from oelm.study.result_types import Analysis, ArmResult, Comparison, Group
from oelm.system.files import write_text

CONSTANT = "majority"  # the trivial baseline that reads no text


@dataclass(frozen=True)
class Picture:
    """A drawing in a file of its own beside the page."""

    file: str
    title: str
    svg: str


def write_page(path: Path, given: Collection, verdicts: Sequence[Verdict]) -> None:
    """Write the page, and its pictures into a folder with the page's name."""
    folder = path.with_suffix("")
    page, pictures = make_page(path, given, verdicts)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        if old.name not in {picture.file for picture in pictures}:
            old.unlink()
    for picture in pictures:
        write_text(folder / picture.file, picture.svg)
    write_text(path, page)


def make_page(path: Path, given: Collection, verdicts: Sequence[Verdict]) -> tuple[str, list[Picture]]:
    """The text of a page at `path`, and its pictures."""
    # A study whose plan was not recorded before its first test result decides nothing, and is not shown.
    planned = [a for a in given.analyses if a.study is not None and not a.unplanned]
    views = [View(analysis, Words("en")) for analysis in planned]
    folders = {
        analysis.title: analysis.groups[0].folder.name for analysis in given.analyses if analysis.groups
    }
    claims = {verdict.id: _claim_picture(verdict, folders) for verdict in verdicts}
    rates = [picture for view in views for picture in _view_pictures(view)]
    language = language_settings(planned)
    shown = [record for analysis in planned for record in analysis.records]
    values: dict[str, Any] = {
        "rules": data.claim_data()["rules"],
        "trials": ages(record for record in shown if record.choosing),
        "measured": ages(record for record in shown if not record.choosing),
        "answer": _answer(planned, verdicts),
        "verdicts": [_claim_row(verdict) for verdict in verdicts],
        "pictures": claims,
        "curves": rates,
        "folder": path.stem,
        "comparisons": [row for analysis in planned for row in _comparison_rows(analysis, path)],
        "linear": _distinct(row for analysis in planned for row in _linear_rows(analysis)),
        "recipe": recipe_sentences(planned),
        "language": table_rows(language),
        "language_answer": sentences(language),
        "robustness": _distinct(row for analysis in planned for row in _robustness_rows(analysis)),
        "benchmarks": sorted(benchmark.name for benchmark in given.benchmarks),
    }
    template = (files("oelm.claims") / "findings.md.j2").read_text(encoding="utf-8")
    text = templates(html=False).from_string(template).render(values)
    drawn = [picture for picture in claims.values() if picture]
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n", [*drawn, *rates]


# The answer ------------------------------------------------------------------------------------------------


def _answer(analyses: Sequence[Analysis], verdicts: Sequence[Verdict]) -> list[str]:
    by_id = {verdict.id: verdict for verdict in verdicts}
    groups = [(a, group) for a in analyses for group in _scratch(a) if a.complete(group)]
    tuned = [(a, g) for a in analyses for g in a.groups if _pretrained_here(g) and a.complete(g)]
    return [
        _classification_sentence(groups),
        _robustness_sentence(groups),
        _claim_sentence(by_id["C2"], "Time of a training step that freezing saves"),
        _claim_sentence(by_id["C4"], "Language modelling, perplexity of `oelm` above that of `baseline`"),
        _linear_sentence([*groups, *tuned]),
    ]


def _scratch(analysis: Analysis) -> list[Group]:
    """The settings of a study that train the published size from scratch with both methods, fairly."""
    size = data.claim_data()["sizes"]["gpt"]
    if repeats_recipe(analysis):
        return []
    return [g for g in analysis.groups if g.model == size and {METHOD, REFERENCE} <= g.arms.keys()]


def _pretrained_here(group: Group) -> bool:
    """Whether its runs start from reference GPTs that were trained before."""
    is_gpt = any(record.results.get("architecture") == "oelm-gpt" for record in group.records)
    return is_gpt and not is_reference(group.model)


def _classification_sentence(groups: Iterable[tuple[Analysis, Group]]) -> str:
    parts = []
    for analysis, group in groups:
        comparison = analysis.comparison(group, METHOD, REFERENCE)
        if group.kind != "share" or comparison is None or comparison.verdict == "void":
            continue
        parts.append(f"{difference(comparison)} on {group.name} ({_word(comparison)})")
    what = "Classification from scratch, each method at its own best learning rate, accuracy of `oelm` minus"
    return f"{what} `baseline` in points: {'; '.join(parts) or 'no study of it is complete'}."


def _robustness_sentence(groups: Iterable[tuple[Analysis, Group]]) -> str:
    parts = []
    for _, group in groups:
        spans = [group.robustness(group.arms[method]) for method in (METHOD, REFERENCE)]
        if group.kind == "share" and all(spans):
            of_method, of_reference = (span.ratio for span in spans if span)
            parts.append(f"{of_method:.3g}-fold against {of_reference:.3g}-fold on {group.name}")
    what = "Learning rates within one point of a method's best span, `oelm` against `baseline`"
    return f"{what}: {'; '.join(parts) or 'not measured'}."


def _claim_sentence(verdict: Verdict, what: str) -> str:
    if verdict.number is None:
        return f"{what}: not measured."
    return f"{what}: {_numbers(verdict)} ({verdict.id}: {verdict.verdict})."


def _linear_sentence(groups: Iterable[tuple[Analysis, Group]]) -> str:
    above: list[str] = []
    below: list[str] = []
    for _, group in groups:
        for method in (REFERENCE, METHOD):
            linear = _linear(group)
            if linear is not None and method in group.arms and group.arms[method].values:
                ahead = fmean(group.arms[method].values) > linear[1]
                first = ", pre-trained" if _pretrained_here(group) else ""
                (above if ahead else below).append(f"`{method}` on {group.name}{first}")
    what = "Above the best linear baseline of their task (TF-IDF and logistic regression) end"
    return f"{what}: {', '.join(above) or 'none'}; below it: {', '.join(below) or 'none'}."


# Tables ----------------------------------------------------------------------------------------------------


def _number(verdict: Verdict | Finding) -> str:
    return numbers.NOTHING if verdict.number is None else measured(verdict)


def _numbers(verdict: Verdict) -> str:
    """The claim's number; for several settings the number of each, as a mean of them would mislead."""
    apart = _apart(verdict)
    if len(apart) < 2:
        void = verdict.number is not None and all(finding.void for finding in verdict.details)
        return _number(verdict) + (f" ({verdict.details[0].label}: no conclusion)" if void else "")
    parts = [(finding.name or finding.task, _number(finding)) for finding in apart]
    if len({finding.task for finding in apart}) == 1:
        return f"{parts[0][0]} {', '.join(number for _, number in parts)}"
    return "; ".join(f"{name} {number}" for name, number in parts)


def _apart(verdict: Verdict) -> list[Finding]:
    return [f for f in verdict.details if not f.void and f.number is not None and f.unit != "ratio"]


def _claim_row(verdict: Verdict) -> dict[str, Any]:
    number, apart = _numbers(verdict), _apart(verdict)
    n = ", ".join(dict.fromkeys(str(f.n) for f in apart)) if len(apart) > 1 else verdict.n
    return {
        "id": verdict.id, "claim": verdict.claim, "verdict": verdict.verdict, "number": number,
        "n": n or numbers.NOTHING, "why": verdict.why,
    }  # fmt: skip


def _distinct(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Each row once: studies may share the runs of an arm."""
    return [dict(row) for row in dict.fromkeys(tuple(row.items()) for row in rows)]


def _word(comparison: Comparison) -> str:
    words = Words("en")
    small = words("answer.small") if comparison.small_difference else ""
    return words(f"verdict.{comparison.verdict}").lower() + small


def _comparison_rows(analysis: Analysis, page: Path) -> list[dict[str, str]]:
    rows = []
    for comparison in analysis.comparisons:
        group, arms = comparison.group, (comparison.arm, comparison.reference_arm)
        if not all(arm.values for arm in arms) or not analysis.complete(group):
            continue
        rows.append(
            {
                "task": group.name, "model": group.model,
                "pair": f"{comparison.method} − {comparison.reference}",
                "scores": ", ".join(_score(group, arm) for arm in arms),
                "difference": difference(comparison) if comparison.combined else numbers.NOTHING,
                "n": str(len(comparison.differences)), "verdict": _word(comparison),
                "records": Path(os.path.relpath(group.folder, page.resolve().parent)).as_posix(),
                "title": analysis.title,
            }
        )  # fmt: skip
    return rows


def _score(group: Group, arm: ArmResult) -> str:
    value = fmean(arm.values)
    text = numbers.fixed(100 * value if group.kind == "share" else value, 2)
    return f"{text} at {numbers.learning_rate(arm.lr)}"


def _linear(group: Group) -> tuple[str, float] | None:
    """The best linear baseline of a task: its name and its score."""
    known = {n: m[group.metric] for n, m in group.trivial_baselines.items() if n != CONSTANT}
    if not known or group.kind != "share":
        return None
    best = max(known, key=lambda name: known[name])
    return Words("en").name("trivial", best), known[best]


def _linear_rows(analysis: Analysis) -> list[dict[str, str]]:
    rows = []
    for group in analysis.groups:
        linear = _linear(group)
        # Other models were pretrained on more text.
        own = is_reference(group.model) or _pretrained_here(group)
        if linear is None or not own or repeats_recipe(analysis) or not analysis.complete(group):
            continue
        for arm in group.arms.values():
            if arm.values:
                value = fmean(arm.values)
                rows.append(
                    {
                        "task": group.name, "model": group.model, "method": arm.method,
                        "score": numbers.fixed(100 * value, 2),
                        "linear": f"{numbers.fixed(100 * linear[1], 2)} ({linear[0]})",
                        "n": str(len(arm.values)), "where": "above" if value > linear[1] else "below",
                    }
                )  # fmt: skip
    return rows


def _robustness_rows(analysis: Analysis) -> list[dict[str, str]]:
    rows = []
    for group in filter(_comparable, analysis.groups):
        for arm in group.arms.values():
            span = group.robustness(arm)
            if span is None:
                continue
            low, high = numbers.learning_rate(span.low), numbers.learning_rate(span.high)
            rows.append(
                {
                    "task": group.name, "model": group.model, "method": arm.method,
                    "best": numbers.learning_rate(span.best_rate),
                    "range": low if low == high else f"{low} to {high}",
                    "scores": ", ".join(_rate_score(group, arm, lr) for lr in arm.lr_scores),
                    "lost": _lost_rates(group, arm, span.best_score),
                }
            )  # fmt: skip
    return rows


def _comparable(group: Group) -> bool:
    """Whether several arms have runs."""
    return len(group.arms) > 1


def _rate_score(group: Group, arm: ArmResult, lr: float) -> str:
    score = arm.lr_scores[lr]
    text = "failed" if score is None else numbers.fixed(100 * score if group.kind == "share" else score, 1)
    missing = len([cell for cell in arm.unevaluated if cell.lr == lr])
    evaluated = len([run for run in arm.trials if run.lr == lr and run.evaluated])
    return f"{numbers.learning_rate(lr)}: {text}" + (
        f" ({evaluated} of {evaluated + missing})" if missing else ""
    )


def _lost_rates(group: Group, arm: ArmResult, best: float) -> str:
    """The learning rates with trials that diverged, are at chance or fell far below the best, and how
    many."""
    texts = []
    for lr in arm.lr_scores:
        trials = [run for run in arm.trials if run.lr == lr]
        bad = [run for run in trials if _is_lost(group, run, best)]
        if bad:
            texts.append(f"{numbers.learning_rate(lr)}: {len(bad)} of {len(trials)}")
    return ", ".join(texts) or "none"


FALLEN = 5.0  # points, or per cent of a perplexity, below the best: the threshold of a collapsed run


def _is_lost(group: Group, run: Any, best: float) -> bool:
    if run.stand_in or run.validation is None or run.results.get("at_chance"):
        return True
    return group.points(best) - group.points(run.validation) > FALLEN


# Pictures --------------------------------------------------------------------------------------------------


def _claim_picture(verdict: Verdict, folders: Mapping[str, str]) -> Picture | None:
    """A picture of every setting's number with its interval and, if there is one, the published figure.
    `folders`: title of a study -> name of its folder."""
    rows = [f for f in verdict.details if f.number is not None and f.unit != "settings"]
    if not rows:
        return None
    unit = data.claim_data()["units"][rows[0].unit][0]
    labels = [finding.label for finding in rows]
    names = [
        label if labels.count(label) == 1 else f"{label}, {folders.get(finding.source, finding.source)}"
        for label, finding in zip(labels, rows, strict=True)
    ]

    def paint(axes: Any) -> None:
        zero = 1.0 if rows[0].unit == "ratio" else 0.0
        axes.axvline(zero, color=figures.FAINT, lw=1)
        for index, finding in enumerate(rows):
            y = len(rows) - 1 - index
            shade = figures.FAINT if finding.void else figures.colour(0)
            if finding.interval:
                axes.plot(finding.interval, [y, y], color=shade, lw=3, solid_capstyle="butt")
            axes.plot(finding.number, y, "o", ms=8, color=shade, mfc=figures.PAGE if finding.void else shade)
            if finding.published is not None:
                axes.plot(finding.published, y, "D", ms=7, color=figures.colour(1), mfc="none", mew=1.6)
            text = f"{names[index]}: {'no verdict' if finding.void else finding.verdict}"
            at = axes.get_yaxis_transform()
            axes.text(0, y + 0.24, text, transform=at, va="bottom", color=figures.INK, size=9.5)
        axes.set_ylim(-0.45, len(rows) - 0.1)
        axes.margins(x=0.06)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        if rows[0].unit == "ratio":
            low, high = axes.dataLim.intervalx
            axes.set_xscale("log")
            ticks = [tick for tick in (0.1, 0.3, 1, 3, 10, 30, 100) if low <= tick <= high]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xticks([], minor=True)
        axes.set_xlabel(unit)

    drawn = figures.draw(verdict.id, 0.78 + 0.5 * len(rows), paint, verdict.claim, left=0.15)
    return Picture(f"{verdict.id}.svg", verdict.claim, alone(drawn))


def _view_pictures(view: View) -> list[Picture]:
    made: list[Figures | None] = [figures.learning_rates(view)]
    if any(group.kind == "perplexity" for group in view.analysis.groups):
        made.append(figures.curves(view))
    study, pictures = view.analysis.groups[0].folder.name, []
    groups = {view.title(group): group for group in view.analysis.groups}
    for figure_set in made:
        for drawn in figure_set.figures if figure_set else []:
            group = groups[drawn.label]
            if not _comparable(group):
                continue
            label = drawn.label or group.name
            kind = re.sub(r"-\d+$", "", drawn.name)
            file = re.sub(r"[^\w.-]+", "-", f"{study}-{kind}-{label}.svg")
            legend = {m: index for m, index in view.colours.items() if m in group.arms}
            text = f"{drawn.title}: {label} ({study}). {_legend(legend)}"
            pictures.append(Picture(file, text, alone(drawn)))
    return pictures


def _legend(legend: dict[str, int]) -> str:
    names = ("blue", "orange", "green", "pink", "yellow", "light blue", "brown", "grey")
    return ", ".join(f"{method} {names[index % len(names)]}" for method, index in legend.items())


def alone(figure: Figure) -> str:
    """A drawing as an SVG file, readable on light and dark pages."""
    inside = re.sub(r"var\(--\w+, (#\w+)\)", r"\1", str(figure.inside)).replace("currentColor", "#111")
    _, _, width, height = figure.box.split()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{figure.box}" width="{2 * float(width):.0f}" '
        f'height="{2 * float(height):.0f}" font-family="sans-serif"><rect width="100%" height="100%" '
        f'fill="#fff"/>{inside}</svg>\n'
    )
