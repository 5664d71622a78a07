"""The published claims as data (claims.toml), and the sentences of a verdict, in English and Chinese."""

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from oelm.system.messages import Notice, text_of

SUPPORTED, REFUTED, IN_PART, NOT_DECIDED = VERDICTS = ("supported", "refuted", "in part", "not decided")

Sentence = tuple[str, str]  # in English and in Chinese
Interval = tuple[float, float]


@dataclass(frozen=True)
class ClaimPart:
    """The measure on one task, or in one benchmark, and its rule; see claims.toml."""

    measure: str
    above: float = 0.0
    share: float | None = None
    published: float | None = None
    at_margin: bool = False
    within: float | None = None
    control: str | None = None
    control_margin: float = 0.0
    experiments: tuple[str, ...] = ()
    kind: str | None = None  # of a benchmark's work, with the next two
    architecture: str = ""
    length: int = 0

    def threshold(self, metric: str) -> float:
        """The value above which the part is supported, below refuted; `metric` is "share" or "perplexity"."""
        if self.at_margin:
            return -float(claim_data()["margins"][metric])
        return self.above if self.share is None or self.published is None else self.share * self.published


@dataclass(frozen=True)
class Claim:
    """One row of claims.toml."""

    id: str
    claim: str
    claim_zh: str
    rule: str
    run: str  # the commands that make the records that decide it
    kind: str | None = None
    architectures: tuple[str, ...] = ()
    method: str = "oelm"
    reference_arm: str = "baseline"
    parts: dict[str, ClaimPart] = field(default_factory=dict)
    any_size: bool = False
    one_refutes: bool = False
    per_hour: bool = False
    frozen: dict[str, float] = field(default_factory=dict)
    growth: tuple[str, ...] = ()
    ratio: tuple[float, float] = (1.0, 1.0)
    tasks: int = 1  # of different names that a verdict needs

    @property
    def advice(self) -> str:
        """The commands to run to decide it."""
        return str(claim_data()["smaller"].get(self.id, self.run))

    @property
    def hours(self) -> float:
        """The GPU hours of all studies that the advice names."""
        named = re.findall(r"[\w-]+", self.advice.replace("benchmark", "bench"))
        return sum(hours for name, hours in claim_data()["hours"].items() if name in named)

    @property
    def names(self) -> dict[str, str]:
        return {"method": self.method, "reference_arm": self.reference_arm}


@cache
def claim_data() -> dict[str, Any]:
    return tomllib.loads((files("oelm.claims") / "claims.toml").read_text(encoding="utf-8"))


def read_claims() -> list[Claim]:
    claims = []
    for row in claim_data()["claims"]:
        parts = {task: ClaimPart(**part) for task, part in row.get("parts", {}).items()}
        claims.append(Claim(**{**row, "parts": parts}))
    return claims


def sentence(key: str, **values: Any) -> Sentence:
    return fill(claim_data()["words"][key], **values)


def fill(template: Sequence[str], **values: Any) -> Sentence:
    """A template in both languages; a value that is a pair has one text for each language."""
    english, chinese = (
        text.format(**{key: v[language] if isinstance(v, tuple) else v for key, v in values.items()})
        for language, text in enumerate(template)
    )
    return english, chinese


def join(sentences: Iterable[Sentence], between: Sentence = (" ", "")) -> Sentence:
    pairs = list(sentences)
    return between[0].join(pair[0] for pair in pairs), between[1].join(pair[1] for pair in pairs)


def listed(names: Iterable[str]) -> Sentence:
    texts = list(names)
    return ", ".join(texts), "、".join(texts)


def format_number(value: float, unit: str, signed: bool = True) -> str:
    """A number without its unit, which is "points" or "%"."""
    return "0" if value == 0 else f"{value:{'+' if signed else ''}.{2 if unit == 'points' else 1}f}"


def with_unit(value: float, unit: str, signed: bool = True) -> Sentence:
    number = format_number(value, unit, signed)
    return (f"{number} points", f"{number} 个百分点") if unit == "points" else (f"{number} %", f"{number}%")


def format_p(p: float | None) -> str:
    return "= ?" if p is None else "< 0.001" if p < 0.001 else f"= {p:.3f}"


def format_problems(problems: Iterable[Notice]) -> Sentence:
    """Why no conclusion may be drawn."""
    return join([(text_of(p, "en"), text_of(p, "zh")) for p in problems], ("; ", "；"))
