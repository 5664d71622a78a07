"""Every text of a report, in every language it can be written in: the table `words.toml`."""

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from string import Formatter
from typing import Any

from oelm.errors import UserError

LANGUAGES = ("en", "zh")


@cache
def table() -> dict[str, dict[str, str]]:
    """Key -> language -> text."""
    text = (files("oelm.study.report") / "words.toml").read_text(encoding="utf-8")
    return {
        f"{section}.{key}": texts
        for section, entries in tomllib.loads(text).items()
        for key, texts in entries.items()
    }


@cache
def _shape(template: str) -> re.Pattern[str]:
    """What a template looks like once it is filled in."""
    parts = Formatter().parse(template)
    return re.compile(
        "".join(re.escape(text) + (f"(?P<{name}>.+?)" if name else "") for text, name, *_ in parts)
    )


class Words:
    """The texts of one language. Values are put in as they are: escaping is the templates' work."""

    def __init__(self, lang: str) -> None:
        if lang not in LANGUAGES:
            raise UserError(f"there is no report in {lang!r}; languages: {', '.join(LANGUAGES)}")
        self.lang = lang

    def __call__(self, key: str, **values: Any) -> str:
        return table()[key][self.lang].format(**values)

    def name(self, kind: str, raw: str) -> str:
        """What a metric or reference is called; itself where the table does not know it."""
        known = table().get(f"{kind}.{raw}")
        return known[self.lang] if known else raw

    def recorded(self, text: str) -> str:
        """A run's warning in this language; itself where the table does not know its shape."""
        for key, texts in table().items():
            if key.startswith("recorded.") and (found := _shape(texts["en"]).fullmatch(text)):
                return texts[self.lang].format(**found.groupdict())
        return text

    def items(self, several: Iterable[str]) -> str:
        return self("list.comma").join(several)

    def range(self, low: str, high: str) -> str:
        return self("list.range", low=low, high=high)
