"""What a conversion did, as data and as a table."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from oelm.models.conversion_distance import HeadMove, ScoreScale
from oelm.system.messages import Notice


@dataclass(frozen=True)
class Row:
    """What happened to one role: how it starts and what of it is frozen."""

    role: str
    tensors: int
    heads: int
    start: str
    gain: str
    frozen: str
    parameters: int


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did. Prints as a table; `heads` and `scores` say how far each head moved."""

    model: str
    method: str
    seed: int
    init: str
    total: int
    frozen: int
    rows: tuple[Row, ...] = field(repr=False)
    heads: tuple[HeadMove, ...] = field(default=(), repr=False)
    scores: tuple[ScoreScale, ...] = field(default=(), repr=False)
    scores_from: str = "weights"  # predicted from them, or measured on a "sample"
    notes: tuple[Notice, ...] = field(default=(), repr=False)

    @property
    def trainable(self) -> int:
        return self.total - self.frozen

    @property
    def frozen_share(self) -> float:
        return self.frozen / self.total

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self) | {"trainable": self.trainable}

    def __str__(self) -> str:
        header = ("role", "tensors", "heads", "starts as", "gain", "frozen", "parameters")
        body = [
            (r.role, str(r.tensors), str(r.heads or "-"), r.start, r.gain, r.frozen, f"{r.parameters:,}")
            for r in self.rows
        ]
        return "\n".join(
            [
                f"{self.model}: method {self.method}, seed {self.seed}",
                *_table(header, body, numeric=(1, 2, 6)),
                f"parameters {self.total:,} = {self.trainable:,} trainable"
                f" + {self.frozen:,} frozen ({100 * self.frozen_share:.1f} %)",
                *self._summary(),
            ]
        )

    def _summary(self) -> Iterable[str]:
        """How far the heads moved: the median head, and the range."""
        roles = dict.fromkeys(move.role for move in self.heads)
        turned = [
            f"{role} {_spread([m.largest_angle for m in self.heads if m.role == role], '.1f')}"
            for role in roles
        ]
        if turned:
            yield f"a head's row space turned by, in degrees: {', '.join(turned)}"
        if self.scores:
            before, after = (_spread([getattr(s, name) for s in self.scores], ".3g") for name in _TIMES)
            yield f"scores' standard deviation, {self._source()}: {before}, now {after}"
        yield from (f"note: {note}" for note in self.notes)

    def _source(self) -> str:
        return "measured on the sample" if self.scores_from == "sample" else "predicted from the weights"

    def head_table(self) -> str:
        """Every head: its angles and the scale of its scores."""
        moves = [
            (m.path, m.role, str(m.head), _number(m.largest_angle, ".1f"), _number(m.mean_angle, ".1f"))
            for m in self.heads
        ]
        scales = [
            (s.attention, str(s.head), _number(s.before, ".3g"), _number(s.after, ".3g")) for s in self.scores
        ]
        parts = []
        if moves:
            names = ("projection", "role", "head", "largest angle", "mean angle")
            parts += ["", *_table(names, moves, numeric=(2, 3, 4))]
        if scales:
            parts += ["", f"standard deviation of the scores, {self._source()}"]
            parts += _table(("attention", "head", *_TIMES), scales, numeric=(1, 2, 3))
        return "\n".join(parts[1:]) or "no head moved"


_TIMES = ("before", "after")


def _table(header: tuple[str, ...], body: Sequence[tuple[str, ...]], numeric: tuple[int, ...]) -> list[str]:
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if i in numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *body)
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _spread(values: Iterable[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    low, middle, high = (format(v, form) for v in (min(known), statistics.median(known), max(known)))
    return f"{middle} ({low} to {high})"
