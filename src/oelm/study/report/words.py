"""Every text of a report, in every language it can be written in: the table `words.toml`."""

from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from oelm.errors import UserError
from oelm.system.messages import LANGUAGES, fill, read_sentences, sentences


@cache
def table() -> dict[str, dict[str, str]]:
    """Key -> language -> text: the report's own words, and those of notices."""
    text = (files("oelm.study.report") / "words.toml").read_text(encoding="utf-8")
    return sentences() | read_sentences(text)


class Words:
    """The texts of one language. Values are put in as they are: escaping is the templates' work."""

    def __init__(self, lang: str) -> None:
        if lang not in LANGUAGES:
            raise UserError(f"there is no report in {lang!r}; languages: {', '.join(LANGUAGES)}")
        self.lang = lang

    def __call__(self, key: str, **values: Any) -> str:
        return fill(table()[key][self.lang], values, self.lang)

    def name(self, kind: str, raw: str) -> str:
        """What a metric or reference is called; itself where the table does not know it."""
        known = table().get(f"{kind}.{raw}")
        return known[self.lang] if known else raw

    def items(self, several: Iterable[str]) -> str:
        return self("list.comma").join(several)

    def range(self, low: str, high: str) -> str:
        return self("list.range", low=low, high=high)
