"""A report as plain values: sections of paragraphs, tables, figures. Two templates write them down.

All text is raw. Escaping happens in the templates and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup


@dataclass(frozen=True)
class Cell:
    """A cell of a table; `colour` is the number of the method it names, `tone` good, bad or quiet.

    `detail` stands below the text, or in brackets after it.
    """

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
    rows: Sequence[Sequence[Cell]]
    align: str
    title: str = ""
    note: str = ""
    kind: str = "table"


@dataclass(frozen=True)
class Entry:
    """A thing that was judged: its name, the verdict, what it says and why."""

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
    """One drawing; `title` and `description` are for those who cannot see it, `label` names its facet.

    `inside` is the SVG between its tags: markup, and the one thing in a document that is not plain text.
    """

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
    """Drawings of one kind, one for each setting, and how they are read."""

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
    alert: str  # one line under the answer: how many warnings there are; "" without any
    sections: list[Section] = field(default_factory=list)
