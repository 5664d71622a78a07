"""A report as plain values, rendered as Markdown and as one HTML page that needs no network and no script.

All text is unescaped: the templates escape it. `kind` is the name by which a template renders a block.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from oelm.study.report.view import Words
from oelm.system.version import __version__


@dataclass(frozen=True)
class TableCell:
    """A cell: `colour` is the number of its method's colour, `tone` is good, bad or quiet; `detail` is shown
    below the text, or in brackets after it."""

    text: str
    detail: str = ""
    colour: int | None = None
    tone: str = ""


@dataclass(frozen=True)
class Paragraph:
    text: str
    tone: str = ""
    kind: str = "paragraph"


@dataclass(frozen=True)
class Bullets:
    items: list[str]
    kind: str = "bullets"


@dataclass(frozen=True)
class Table:
    """A table. `align` has a letter for each column: l or r. `title` tells tables of one section apart. With
    `verdict_last` the last column is the verdict, which comes first on a phone."""

    head: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    align: str
    title: str = ""
    kind: str = "table"
    verdict_last: bool = False


def make_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | TableCell]],
    title: str = "",
    left: Iterable[int] = (0,),
) -> Table:
    """A table whose columns are right-aligned, except those with an index in `left`."""
    cells = [[TableCell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    left_aligned = {index % len(head) for index in left}
    return Table(head, cells, "".join("l" if i in left_aligned else "r" for i in range(len(head))), title)


@dataclass(frozen=True)
class Code:
    text: str
    title: str = ""
    kind: str = "code"


@dataclass(frozen=True)
class Figure:
    """One drawing: `inside` is its SVG without the outer tag, `box` its viewBox, `label` names its
    setting."""

    name: str
    box: str
    inside: Markup
    title: str
    label: str = ""


@dataclass(frozen=True)
class Figures:
    """Drawings of one kind, one for each setting, with a caption and a legend: method -> colour."""

    title: str
    caption: str
    figures: list[Figure]
    legend: dict[str, int]
    kind: str = "figures"


FOLDED = ("training",)  # sections shown closed: details that no verdict needs

Block = Paragraph | Bullets | Table | Code | Figures


def with_note(blocks: Iterable[Block | None], note: str = "") -> list[Block]:
    """The blocks that are not None and, if there are any, a note on how to read them."""
    present = [block for block in blocks if block is not None]
    return [*present, Paragraph(note, tone="note")] if present and note else present


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    badges: list[TableCell]  # the verdict of each comparison
    answer: list[str]
    alert: str  # one line below the answer: how many warnings there are; "" without any
    sections: dict[str, list[Block]]
    made: str = "page.made"  # the text that says what the page was made from


def to_html(document: Document, words: Words) -> str:
    return templates(html=True).get_template("report.html.j2").render(document=document, words=words)


def to_markdown(document: Document, words: Words, page: str) -> str:
    """`page` is the name of the HTML page, which has the figures."""
    template = templates(html=False).get_template("report.md.j2")
    text = template.render(document=document, words=words, page=page)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" +\n", "\n", text)).strip() + "\n"


@cache
def templates(html: bool) -> Environment:
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"md": escape_markdown, "fence": fence}
    environment.globals |= {"version": __version__, "folded": FOLDED, "style": Markup(_source("style.css"))}
    return environment


def _source(name: str) -> str:
    return (files("oelm.study.report") / "templates" / name).read_text(encoding="utf-8")


def escape_markdown(text: str) -> str:
    """Plain text that Markdown shows as it is, in a paragraph, a list or the cell of a table."""
    text = " ".join(text.split())
    # Markup characters become entities first, so that no name can open a tag in any viewer.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|$~])", r"\\\1", text)
    # Only an underscore at the start or end of a word would begin or end an emphasis.
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    return re.sub(r"^(#+|[-+]|\d+[.)])(?=\s|$)", lambda m: m[1][:-1] + "\\" + m[1][-1], text)


def fence(text: str) -> str:
    """A code block, with more backticks than its content has in a row, so that nothing in it closes it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    marks = "`" * (longest + 1)
    return f"{marks}\n{text.rstrip()}\n{marks}"
