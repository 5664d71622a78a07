"""The statistics of one or two runs' heads as a page of heat maps, in the report's style."""

import numpy as np
from markupsafe import Markup

from oelm.inference.attention_statistics import MEASURES, Array, AttentionStatistics, difference
from oelm.study.report.document import (
    Block,
    Document,
    Figure,
    Figures,
    Paragraph,
    TableCell,
    make_table,
    to_html,
)
from oelm.study.report.numbers import fixed, signed
from oelm.study.report.view import Words

FAINT = 'font-size="11" fill="var(--faint)"'
WIDTH, BESIDE, ABOVE, HEIGHT = 400, 34, 18, 24  # width of a map, margins for labels, height of a row
NARROWEST = 27  # the least width of a cell that shows its value
DARKEST = 0.6  # opacity at which a value can still be read, on a light or dark page


def attention_page(statistics: dict[str, AttentionStatistics], lang: str = "en") -> str:
    """One self-contained HTML page for the statistics of one run or two, by the runs' names."""
    words, runs = Words(lang), list(statistics.values())
    answer = [
        words(
            "explain.answer", run=name, **{key: _mean(one, key) for key in ("relative_entropy", "score_std")}
        )
        for name, one in statistics.items()
    ]
    notes = [f"{name}: {note}" for name, one in statistics.items() for note in one.notes]
    if len(runs) > 1:
        answer.append(words("explain.one_pair"))
        if runs[0].sample != runs[1].sample:
            notes.append(words("explain.other_sample"))
    first = runs[0]
    sample = words("explain.subtitle", texts=first.texts, tokens=first.tokens, sample=first.sample)
    overview: list[Block] = [_table(statistics, at, words) for at in first.attentions]
    overview += [Paragraph(note, "note") for note in notes]
    maps: list[Block] = []
    for number, at in enumerate(first.attentions):
        if len(first.attentions) > 1:
            maps.append(Paragraph(at, "heading"))
        share = fixed(100 * first.uniform[at], 1) + " %"
        maps.append(Paragraph(words("explain.uniform", share=share), "note"))
        maps += [
            _maps(statistics, at, measure, number, words)
            for measure in MEASURES
            if first.grid(at, measure) is not None
        ]
    title = words("explain.title", runs=words.items(statistics))
    sections = {"overview": overview, "heads": maps}
    return to_html(Document(title, sample, [], answer, "", sections, "explain.made"), words)


def _mean(one: AttentionStatistics, measure: str) -> str:
    return fixed(float(np.mean([getattr(head, measure) for head in one.heads])), 2)


def _table(statistics: dict[str, AttentionStatistics], at: str, words: Words) -> Block:
    runs, rows = list(statistics.values()), []
    for measure in MEASURES:
        grids = [one.grid(at, measure) for one in runs]
        row: list[str | TableCell] = [words(f"explain.{measure}")]
        row += [fixed(None if grid is None else float(grid.mean()), 3) for grid in grids]
        if len(runs) > 1:
            more = difference(runs[0], runs[1], measure).get(at)
            row.append("–" if more is None else _largest(more, words))
        rows.append(row)
    head = [words("explain.measure"), *statistics, *([words("explain.most")] if len(runs) > 1 else [])]
    return make_table(head, rows, at if len(runs[0].attentions) > 1 else "")


def _largest(more: Array, words: Words) -> TableCell:
    layer, head = np.unravel_index(np.abs(more).argmax(), more.shape)
    where = words("explain.where", layer=int(layer), head=int(head))
    return TableCell(signed(float(more[layer, head]), 3), where)


def _maps(
    statistics: dict[str, AttentionStatistics], at: str, measure: str, number: int, words: Words
) -> Figures:
    grids = {name: grid for name, one in statistics.items() if (grid := one.grid(at, measure)) is not None}
    most = max(float(grid.max()) for grid in grids.values())
    if measure == "effective_rank":
        most = next(iter(statistics.values())).head_dim
    title, label = words(f"explain.{measure}"), f"{measure}-{number}"
    figures = [
        _map(f"{label}-{index}", grid, most, title, name, words)
        for index, (name, grid) in enumerate(grids.items())
    ]
    caption = words("explain.colour", most=fixed(most, 3))
    if len(grids) > 1:
        one, other = statistics.values()
        more = difference(one, other, measure)[at]
        widest = float(np.abs(more).max())
        figures.append(
            _map(f"{label}-more", more, widest, title, " − ".join(reversed(list(grids))), words, True)
        )
        caption += " " + words("explain.colours", most=fixed(widest, 3))
    return Figures(title, caption, figures, {})


def _map(
    name: str, grid: Array, most: float, title: str, label: str, words: Words, sign: bool = False
) -> Figure:
    """A heat map (layers, heads); with `sign`, of differences."""
    layers, heads = grid.shape
    width, digits = (WIDTH - BESIDE) / heads, 1 if most >= 10 else 2 if most >= 0.1 else 3
    parts = [
        f'<text x="{BESIDE - 8}" y="{ABOVE + (i + 0.65) * HEIGHT:g}" text-anchor="end" {FAINT}>{i}</text>'
        for i in range(layers)
    ]
    for j in range(0, heads, max(1, round(20 / width))):
        parts.append(
            f'<text x="{BESIDE + (j + 0.5) * width:g}" y="12" text-anchor="middle" {FAINT}>{j}</text>'
        )
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            x, y = BESIDE + j * width, ABOVE + i * HEIGHT
            text = signed(float(value), digits) if sign else fixed(float(value), digits)
            tooltip = f"{words('explain.layer')} {i}, {words('explain.head')} {j}: {text}"
            opacity = DARKEST * abs(value) / most if most > 0 else 0.0
            fill = 1 if sign and value > 0 else 0
            parts.append(
                f'<g><title>{tooltip}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" '
                f'fill="var(--c{fill})" fill-opacity="{opacity:.3f}" stroke="var(--line)"/>'
            )
            if width >= NARROWEST:
                middle = f'x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle"'
                parts.append(f'<text {middle} font-size="10" fill="currentColor">{text}</text>')
            parts.append("</g>")
    return Figure(name, f"0 0 {WIDTH} {ABOVE + layers * HEIGHT + 4}", Markup("".join(parts)), title, label)
