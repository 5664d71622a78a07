"""Numbers as text: no more digits than an interval supports, a typographic minus sign."""

import math
import re

MINUS = "−"
NOTHING = "–"


def digits_for(*ends: float | None) -> int:
    """Decimals for an interval with these ends: one; two if narrower than 2, three if narrower than 0.2."""
    known = [end for end in ends if end is not None and math.isfinite(end)]
    half = (max(known) - min(known)) / 2 if len(known) > 1 else 1.0
    return 1 if half >= 1 or half == 0 else 2 if half >= 0.1 else 3


def fixed(value: float | None, digits: int) -> str:
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    text = f"{value:,.{digits}f}"
    if not text.strip("-0."):
        text = text.removeprefix("-")
    return text.replace("-", MINUS)


def signed(value: float | None, digits: int) -> str:
    """A difference with its sign; without one if it rounds to zero."""
    text = fixed(value, digits)
    shown_zero = not text.strip("0.")
    return text if value is None or math.isnan(value) or value < 0 or shown_zero else f"+{text}"


def with_interval(mean: float, low: float | None, high: float | None, unit: str = "") -> str:
    """A difference, and its interval where it has one: +1.2 (+0.3 to +2.1)."""
    digits = digits_for(low, high)
    ends = "" if low is None or high is None else f" ({signed(low, digits)} to {signed(high, digits)})"
    return f"{signed(mean, digits)}{unit}{ends}"


def with_minus(text: str) -> str:
    """The sentence with a typographic minus sign in negative numbers; 1e-3 and names stay as they are."""
    return re.sub(r"(?<![\w.-])-(?=\d)", MINUS, text)


def significant(value: float | None, figures: int = 3) -> str:
    """With this many figures and never an exponent: 4.69, 47.2, 1,234."""
    if value is None or not math.isfinite(value) or value == 0:
        return fixed(value, 0)
    before = math.floor(math.log10(abs(value))) + 1
    return fixed(value, max(0, figures - before))


def learning_rate(lr: float | None) -> str:
    """0.003, and 3e-5 rather than 3e-05."""
    if lr is None:
        return NOTHING
    mantissa, _, exponent = f"{lr:g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def p_value(p: float | None) -> str:
    if p is None:
        return NOTHING
    if p < 0.001:
        return "<0.001"
    return f"{p:.3f}" if p < 0.0995 else f"{p:.2f}"


def equals(p: float | None) -> str:
    """A p value inside a sentence: "= 0.65" or "< 0.001"."""
    text = p_value(p)
    return f"< {text[1:]}" if text.startswith("<") else f"= {text}"


def count(number: int | None) -> str:
    return NOTHING if number is None else f"{number:,}"


def memory(number: float | None) -> str:
    if number is None:
        return NOTHING
    return f"{significant(number / 1e9)} GB" if number >= 1e9 else f"{significant(number / 1e6)} MB"


def time_of(seconds: float | None) -> str:
    """Seconds as milliseconds, seconds, minutes or hours."""
    if seconds is None:
        return NOTHING
    for limit, size, unit in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{significant(seconds / size)} {unit}"
    return f"{significant(seconds / 3600)} h"
