"""A matplotlib figure as SVG inside a page, with the page's fonts and the colours of its theme."""

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from oelm.study.report.document import Figure

WIDTH = 4.0  # inches; on a phone of 360 px a letter of 9.5 points is then about 10 px high

# Placeholders that become the page's CSS variables, so that one drawing serves light and dark themes. The
# fallbacks show if a figure is taken out of its page.
INK, FAINT, LINE, PAGE, BAND = "#0d0d01", "#0d0d02", "#0d0d03", "#0d0d04", "#0d0d05"
# Okabe and Ito's palette, for colour-blind readers.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#7f7f7f")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_VARIABLES = {
    INK: "currentColor",
    FAINT: "var(--faint, #667)",
    LINE: "var(--line, #ccd)",
    PAGE: "var(--page, #fff)",
    BAND: "var(--band, #eef)",
} | {f"#0d0e{place:02x}": f"var(--c{place}, {colour})" for place, colour in enumerate(PALETTE)}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the reader's fonts: Chinese too
    "svg.hashsalt": "oelm",  # the same numbers give the same file
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.titlecolor": FAINT,
    "axes.edgecolor": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


def colour(place: int) -> str:
    return f"#0d0e{place % len(PALETTE):02x}"


def mark(place: int) -> str:
    return MARKS[place % len(MARKS)]


def draw(
    name: str,
    height: float,
    paint: Callable[[Any], None],
    title: str,
    description: str,
    label: str = "",
    left: float = 0.5,
    right: float = 0.15,
) -> Figure:
    """A new figure whose axes `paint` fills; margins in inches. `name` makes its ids unique in the page."""
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
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    box, inside = _inline(buffer.getvalue(), name)
    return Figure(name, box, Markup(inside), title, description, label)


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
    tag = re.sub(r"font-family: [^;\"]+;? ?", "", tag)  # those it measured with; the page has its own
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], tag)
