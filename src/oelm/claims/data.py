"""The published claims as data (claims.toml), and the sentences a verdict is made of, in two languages."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from oelm.system.messages import Notice, text_of

SUPPORTED, REFUTED, NOT_DECIDED = VERDICTS = ("supported", "refuted", "not decided")

Said = tuple[str, str]  # a sentence in English and in Chinese
Interval = tuple[float, float]


@dataclass(frozen=True)
class Part:
    """What is measured on one task, and the thresholds; see claims.toml."""

    measure: str
    above: float = 0.0
    share: float | None = None
    published: float | None = None
    at_margin: bool = False
    control: str | None = None
    experiments: tuple[str, ...] = ()

    def thresholds(self, margin: float) -> tuple[float, float]:
        """Supported above the first, refuted below the second."""
        if self.at_margin:
            return -margin, -margin
        if self.share is None or self.published is None:
            return self.above, self.above
        return self.above, self.share * self.published


@dataclass(frozen=True)
class Claim:
    """One row of claims.toml."""

    id: str
    claim: str
    claim_zh: str
    rule: str
    kind: str | None = None
    architectures: tuple[str, ...] = ()
    method: str = "oelm"
    reference: str = "baseline"
    parts: dict[str, Part] = field(default_factory=dict)
    any_size: bool = False
    one_refutes: bool = False
    beyond_records: bool = False
    frozen: dict[str, float] = field(default_factory=dict)
    growth: tuple[str, ...] = ()
    ratio: tuple[float, float] = (1.0, 1.0)


@cache
def claim_data() -> dict[str, Any]:
    return tomllib.loads((files("oelm.claims") / "claims.toml").read_text(encoding="utf-8"))


def read_claims() -> list[Claim]:
    """The claims, in order."""
    found = []
    for row in claim_data()["claims"]:
        parts = {task: Part(**part) for task, part in row.get("parts", {}).items()}
        found.append(Claim(**{**row, "parts": parts}))
    return found


def say(key: str, **values: Any) -> Said:
    """A sentence of claims.toml."""
    return fill(claim_data()["words"][key], values)


def fill(template: Sequence[str], values: Mapping[str, Any]) -> Said:
    """A template in both languages; of a value that is a pair each language gets its own."""
    english, chinese = (
        text.format(**{key: v[language] if isinstance(v, tuple) else v for key, v in values.items()})
        for language, text in enumerate(template)
    )
    return english, chinese


def join(sentences: Iterable[Said], between: Said = (" ", "")) -> Said:
    pairs = list(sentences)
    return between[0].join(pair[0] for pair in pairs), between[1].join(pair[1] for pair in pairs)


def figure(value: float, unit: str, signed: bool = True) -> str:
    """A number as it is shown with its unit, without the unit."""
    return "0" if value == 0 else f"{value:{'+' if signed else ''}.{2 if unit == 'points' else 1}f}"


def show(value: float, unit: str, signed: bool = True) -> Said:
    number = figure(value, unit, signed)
    return (f"{number} points", f"{number} 个百分点") if unit == "points" else (f"{number} %", f"{number}%")


def show_p(p: float | None) -> str:
    return "= ?" if p is None else "< 0.001" if p < 0.001 else f"= {p:.3f}"


def show_problems(problems: Iterable[Notice]) -> Said:
    """Why nothing may be concluded."""
    return join([(text_of(p, "en"), text_of(p, "zh")) for p in problems], ("; ", "；"))
