"""A report as plain values, and its forms: Markdown, and one HTML page that needs no network and no script.

All text is raw: the templates escape it. `kind` tells a template what a block is.
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
    """`colour` is the number of the method it names, `tone` good, bad or quiet; `detail` stands below the
    text, or in brackets after it."""

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
    """`align` has a letter for each column: l or r. `title` tells tables of one section apart. With
    `verdict_last` the last column is what a reader looks for, and comes first on a phone."""

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
    """A table whose columns are right-aligned except those at the places `left`."""
    cells = [[TableCell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    places = {place % len(head) for place in left}
    return Table(head, cells, "".join("l" if i in places else "r" for i in range(len(head))), title)


@dataclass(frozen=True)
class Code:
    text: str
    title: str = ""
    kind: str = "code"


@dataclass(frozen=True)
class Figure:
    """One drawing: `inside` is its SVG without the outer tag, `label` names its setting."""

    name: str
    box: str
    inside: Markup
    title: str
    label: str = ""


@dataclass(frozen=True)
class Figures:
    """Drawings of one kind, one for each setting, how to read them, and the methods' colours."""

    title: str
    caption: str
    figures: list[Figure]
    legend: dict[str, int]
    kind: str = "figures"


FOLDED = ("training",)  # sections that a reader opens: details that no verdict needs

Block = Paragraph | Bullets | Table | Code | Figures


def with_note(blocks: Iterable[Block | None], note: str = "") -> list[Block]:
    """The blocks that are there, and below them a note on how to read them."""
    there = [block for block in blocks if block is not None]
    return [*there, Paragraph(note, tone="note")] if there and note else there


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    badges: list[TableCell]  # what is known of each comparison, in a word or two
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
    # Markup first as entities, so that nothing a name contains can open a tag in any reader.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|$~])", r"\\\1", text)
    # An underscore inside a word is only a letter; at its ends it would begin or end an emphasis.
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    return re.sub(r"^(#+|[-+]|\d+[.)])(?=\s|$)", lambda m: m[1][:-1] + "\\" + m[1][-1], text)


def fence(text: str) -> str:
    """A code block that its own content cannot close."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    marks = "`" * (longest + 1)
    return f"{marks}\n{text.rstrip()}\n{marks}"
