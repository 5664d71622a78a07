"""The section on language modelling: what each arm reaches and costs, and which cheap arm is near."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oelm.claims.collect import Collection
from oelm.claims.findings import make_page
from oelm.claims.verdicts import judge
from oelm.study.records import Record
from tests.claims.claim_records import pairs, tuned

TOTAL, QK = 44_896_768, 3_145_728
PARAMETERS: dict[str, dict[str, Any]] = {
    "baseline": {"total": TOTAL, "trainable": TOTAL, "frozen": 0},
    "oelm": {"total": TOTAL, "trainable": TOTAL - QK, "frozen": QK},
    "oelm-trainable": {"total": TOTAL, "trainable": TOTAL, "frozen": 0},
    "oelm-lora": {"total": TOTAL + 98_304, "trainable": TOTAL - QK + 98_304, "frozen": QK},
    "train-then-freeze-plain": {
        "total": TOTAL, "trainable": TOTAL, "frozen": 0,
        "stages": [
            {"step": 0, "trainable": TOTAL, "frozen": 0},
            {"step": 300, "trainable": TOTAL - QK, "frozen": QK},
        ],
    },
    "top-1": {
        "total": TOTAL, "trainable": TOTAL, "frozen": 0,
        "stages": [
            {"step": 0, "trainable": TOTAL, "frozen": 0},
            {"step": 400, "trainable": TOTAL - QK, "frozen": QK},
        ],
    },
}  # fmt: skip


def runs(losses: dict[str, float], steps: int = 1500, n: int = 5) -> list[Record]:
    """Runs whose perplexities are by so many per cent above baseline's."""
    found = []
    for place, (method, loss) in enumerate(losses.items()):
        for record in pairs(-loss, task="imdb-text", method=method, n=n, spread=1.0, only=place > 0):
            record.results.update(steps=steps, parameters=PARAMETERS[record.method])
            record.results["test"]["metrics"]["bits_per_byte"] = 1.25
            found.append(record)
    return found


def page(*records: list[Record]) -> str:
    given = Collection([analysis for some in records for analysis in tuned(some)])
    text, _ = make_page(Path("docs/findings.md"), given, judge(given.analyses))
    return text


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        (
            {"oelm-lora": 8.0, "oelm-trainable": 0.5},
            "none is within 5 % of {}; the best is `oelm-lora`: 32.4",
        ),
        (
            {"oelm-lora": 4.0, "train-then-freeze-plain": 3.0},
            "the cheapest shown to be within 5 % of {} is `oelm-lora`",
        ),
        # By the means alone within 5 %, but the intervals reach beyond.
        ({"oelm-lora": 4.9, "train-then-freeze-plain": 3.0}, "{} is `train-then-freeze-plain`: 3"),
        ({"oelm-lora": 4.9, "top-1": 3.0}, "none is shown to be within 5 % of {}; the best is `oelm-lora`"),
        ({"oelm-lora": 5.1}, "none is shown to be within 5 % of {}; the best is `oelm-lora`"),
        ({"oelm-lora": 6.0, "train-then-freeze-plain": 3.0}, "{} is `train-then-freeze-plain`: 3"),
        ({"oelm-lora": 6.0, "top-1": 3.0}, "none is within 5 % of {}"),  # trained for too long
    ],
)
def test_the_cheapest_one_near_baseline_is_named(losses: dict[str, float], says: str) -> None:
    text = page(runs({"oelm": 12.0, **losses}))
    assert says.format("`baseline`'s perplexity") in text
    assert (
        "imdb-text (gpt-medium-512, 1,500 steps), of the methods with Q and K frozen for at least 80 %"
        in text
    )


def test_an_arm_without_a_verdict_is_no_candidate() -> None:
    found = runs({"oelm": 12.0, "oelm-lora": 8.0, "train-then-freeze-plain": 3.0})
    for place, record in enumerate(found):
        if (record.method, record.seed) == ("train-then-freeze-plain", 5):  # one pair has two arithmetics
            found[place] = replace(record, environment={"device": "another"})
    assert "none is within 5 % of `baseline`'s perplexity; the best is `oelm-lora`" in page(found)


def test_every_arm_has_its_row() -> None:
    text = page(runs({"oelm": 12.0, "oelm-lora": 4.0, "train-then-freeze-plain": 3.0}))
    rows = [line for line in text.splitlines() if line.startswith("| imdb-text") and "1.250" in line]
    methods = [row.split(" | ")[3] for row in rows]
    assert methods == ["baseline", "oelm-lora", "train-then-freeze-plain", "oelm"]
    assert "| 30.00 | 1.250 | – | 44,896,768 | – | 5 |" in rows[0]
    assert "| 41,849,344 |" in rows[1] and "+4.00 % (+" in rows[1]
    assert f"| {round(TOTAL - 0.8 * QK):,} |" in rows[2]


def test_the_gap_by_length_of_training_and_few_seeds_give_no_candidate() -> None:
    given = [tuned(runs({"oelm": loss}, steps, n))[0] for loss, steps, n in ((15.0, 3000, 3), (9.0, 300, 3))]
    collection = Collection([*given, *tuned(runs({"oelm": 12.0}))])
    text, _ = make_page(Path("docs/findings.md"), collection, judge(collection.analyses))
    line = next(line for line in text.splitlines() if line.startswith("Perplexity of `oelm` above that"))
    assert [part in line for part in ("+9.0", "300 steps (n = 3)", "+12.0", "1,500 steps (n = 5)", "+15.0")]
    assert line.index("+9.0") < line.index("+12.0") < line.index("+15.0")
    assert text.count("of the methods with Q and K frozen") == 1


def test_without_such_a_study_there_is_no_section() -> None:
    text = page(pairs(1.0, n=5))
    assert "## Language modelling" not in text
