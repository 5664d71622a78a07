"""How the page of findings tells a comparison, and which settings it may tell of."""

from oelm.study.report import numbers
from oelm.study.result_types import Analysis, Comparison, Group


def complete(analysis: Analysis, group: Group) -> bool:
    """Whether all planned runs of a setting are there: before that its test scores are nobody's business."""
    return not any("unfinished" in c.problems for c in analysis.comparisons if c.group is group)


def difference(comparison: Comparison, sign: int = 1) -> str:
    """A difference with its interval; with `sign` -1, by how much the reference arm is better."""
    assert comparison.combined is not None
    told = comparison.group.told(comparison.combined)
    digits = numbers.digits_for(told.low, told.high)
    ends = ""
    if told.low is not None and told.high is not None:
        low, high = sorted((sign * told.low, sign * told.high))
        ends = f" ({numbers.signed(low, digits)} to {numbers.signed(high, digits)})"
    return numbers.signed(sign * told.mean, digits) + ends
