"""A document as Markdown and as one HTML page that needs nothing else: no network, no script."""

import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from oelm.study.report.document import Document
from oelm.study.report.words import Words
from oelm.system.version import __version__


def to_html(document: Document, words: Words) -> str:
    return _environment(True).get_template("report.html.j2").render(document=document, words=words)


def to_markdown(document: Document, words: Words, page: str) -> str:
    """`page` is the name of the HTML page, which has the figures."""
    template = _environment(False).get_template("report.md.j2")
    text = template.render(document=document, words=words, page=page)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" +\n", "\n", text)).strip() + "\n"


@cache
def _environment(html: bool) -> Environment:
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_unbroken if html else None,
    )
    environment.filters["md"] = escape_markdown
    environment.filters["fence"] = fence
    environment.globals["version"] = __version__
    environment.globals["style"] = Markup(_source("style.css"))
    return environment


def _unbroken(value: Any) -> Any:
    """Keep "68.7 %" and "n = 5" on one line. Markup is left as it is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return re.sub(r"(?<=\d) (?=%)|(?<=\b[np]) (?=[=<])|(?<=[=<]) (?=\d)", "\u00a0", value)


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
