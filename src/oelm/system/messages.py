"""Warnings and failures as codes with values; their sentences, in every language, are in messages.toml.

Records store the code and the values. The sentence is made when it is shown, in the reader's language.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

LANGUAGES = ("en", "zh")
MOST = 12  # entries of a list that a sentence names; the rest is counted


@dataclass(frozen=True)
class Notice:
    """One message: `code` is a key of messages.toml, `values` (plain JSON, or notices) fill in its sentence.

    A text without a code, such as another library's or an old record's, is Notice("text", {"text": ...}).
    """

    code: str
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return text_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, read back by `read_notice`."""
        return asdict(self)


class Span(NamedTuple):
    """The range of a value over several notices that are shown as one."""

    low: float
    high: float


def notice(code: str, /, **values: Any) -> Notice:
    return Notice(code, {key: str(v) if isinstance(v, Path) else v for key, v in values.items()})


def read_notice(value: Any) -> Notice:
    """A notice from JSON; any other value, such as a warning of an old record, becomes a text without a
    code."""
    match value:
        case Notice():
            return value
        case {"code": str(code), "values": dict(values)}:
            return Notice(code, {str(key): _inner(entry) for key, entry in values.items()})
    return notice("text", text=str(value))


def _inner(value: Any) -> Any:
    if isinstance(value, list):
        return [_inner(entry) for entry in value]
    return read_notice(value) if isinstance(value, dict) else value


def text_of(entry: Notice, language: str = "en") -> str:
    """The sentence of a notice. A code or values that this version does not know are shown raw."""
    if entry.code == "text":
        return str(entry.values.get("text"))
    try:
        return fill(sentences()[entry.code][language], entry.values, language)
    except (LookupError, ValueError, TypeError):
        return f"{entry.code} ({', '.join(f'{key}: {value}' for key, value in entry.values.items())})"


@cache
def sentences() -> dict[str, dict[str, str]]:
    """Code -> language -> text."""
    return read_sentences((files("oelm.system") / "messages.toml").read_text(encoding="utf-8"))


def read_sentences(toml: str) -> dict[str, dict[str, str]]:
    return {
        f"{section}.{key}": texts
        for section, entries in tomllib.loads(toml).items()
        for key, texts in entries.items()
    }


def named(name: str) -> str:
    """A name as it stands in a list: in quotation marks where it holds a mark that parts lists."""
    return f'"{name}"' if any(mark in name for mark in ",;、；") else name


def fill(template: str, values: Mapping[str, Any], language: str) -> str:
    return _Sentence(language).vformat(template, (), values)


class _Sentence(Formatter):
    """Python's format language with three additions: `{count:row|rows}` gives "1 row" or "1,234 rows",
    `{split:split}` the value's word in that section of messages.toml, and lists are joined."""

    def __init__(self, language: str) -> None:
        self.language = language

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, Notice):
            return text_of(value, self.language)
        if isinstance(value, Span):
            if "|" in spec:
                return f"{self.format_field(value, ',')} {spec.partition('|')[2]}"
            low, high = (self.format_field(end, spec) for end in value)
            return low if low == high else f"{low.removesuffix(' %')}–{high}"
        if isinstance(value, list | tuple):
            one, bar, many = spec.partition("|")
            names = self._join(value, "" if bar else spec)
            return f"{one if len(value) == 1 else many} {names}" if bar else names
        if value is None:
            return self._word("list.none")
        if "|" in spec:
            one, _, many = spec.partition("|")
            return f"{value:,} {one if value == 1 else many}"
        if isinstance(value, str):
            return self._word(f"{spec}.{value}", value) if spec else value
        text = format(value, spec).replace("%", " %")  # 95 %, as everywhere
        return text.replace("e-0", "e-")  # a learning rate of 3e-5, not 3e-05

    def _join(self, entries: list[Any] | tuple[Any, ...], spec: str) -> str:
        has_notices = any(isinstance(entry, Notice) for entry in entries)  # these may contain commas
        between = self._word("list.semicolon" if has_notices else "list.comma")
        texts = (
            named(entry) if isinstance(entry, str) and not spec else self.format_field(entry, spec)
            for entry in entries[:MOST]
        )
        names = between.join(texts)
        more = {"names": names, "count": len(entries) - MOST}
        return fill(self._word("list.more"), more, self.language) if len(entries) > MOST else names

    def _word(self, key: str, otherwise: str = "") -> str:
        return sentences().get(key, {}).get(self.language, otherwise)
