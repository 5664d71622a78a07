"""A report as plain values: sections of paragraphs, tables, figures. Two templates render them.

All text is raw: the templates escape it. `kind` tells a template what a block is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup


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
    """`align` has a letter for each column: l or r. `title` tells tables of one section apart."""

    head: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    align: str
    title: str = ""
    kind: str = "table"


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
class Entry:
    """A claim that was judged: its name, the verdict, its text and the reasons."""

    name: str
    verdict: str
    tone: str
    text: str
    details: list[str]
    kind: str = "entry"


@dataclass(frozen=True)
class Code:
    text: str
    title: str = ""
    kind: str = "code"


@dataclass(frozen=True)
class Figure:
    """One drawing: `inside` is its SVG without the outer tag. `title` and `description` are for readers who
    cannot see it, `label` names its setting."""

    name: str
    box: str
    inside: Markup
    title: str
    description: str
    label: str = ""


@dataclass(frozen=True)
class Legend:
    """A method with the number of its colour, or (without one) another kind of mark."""

    text: str
    colour: int | None
    mark: str


@dataclass(frozen=True)
class Figures:
    """Drawings of one kind, one for each setting, and how to read them."""

    title: str
    caption: str
    figures: list[Figure]
    legend: list[Legend]
    kind: str = "figures"


Block = Paragraph | Bullets | Table | Entry | Code | Figures


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    lang: str
    title: str
    subtitle: str
    answer: list[str]
    alert: str  # one line below the answer: how many warnings there are; "" without any
    sections: list[Section]
