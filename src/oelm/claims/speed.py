"""Speed: the step times of two methods, taken in turns by one process, from records of `oelm bench`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oelm.claims.cases import Case, describe_number
from oelm.claims.data import Claim, ClaimPart, claim_data, sentence
from oelm.errors import UserError
from oelm.models.gpt_sizes import SIZES
from oelm.study import statistics
from oelm.study.decide import FEWEST_SEEDS

FEWEST_ROUNDS = FEWEST_SEEDS


@dataclass(frozen=True)
class Benchmark:
    """A record of `oelm bench` and the name of its file."""

    name: str
    record: dict[str, Any]


def speed_cases(claim: Claim, benchmarks: Sequence[Benchmark]) -> list[Case]:
    """The per cent of a step's time that the claim's method saves, in every benchmark of both methods that
    has a published shape."""
    cases = []
    for part_name, part in claim.parts.items():
        for benchmark in benchmarks:
            try:
                cases += [
                    _case(claim, part_name, part, benchmark, work)
                    for work in benchmark.record["cases"]
                    if _fits(part, work, benchmark.record)
                    and {claim.method, claim.reference_arm} <= {arm["name"] for arm in work["arms"]}
                ]
            except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
                raise UserError(
                    f"{benchmark.name} is damaged ({type(error).__name__}: {error}); measure it again"
                ) from None
    return cases


def _fits(part: ClaimPart, work: dict[str, Any], record: dict[str, Any]) -> bool:
    model, size = work.get("model"), record["settings"]["size"]
    if model is None and size in SIZES:  # a record of before the model's shape was written
        model = {"architecture": "gpt", "layers": SIZES[size][0], "d_model": SIZES[size][1]}
    shape = claim_data()["shapes"][part.architecture]
    return (
        model is not None
        and (work["kind"], work["length"], model["architecture"])
        == (part.kind, part.length, part.architecture)
        and [model["layers"], model["d_model"]] == shape
    )


def _case(claim: Claim, part_name: str, part: ClaimPart, benchmark: Benchmark, work: dict[str, Any]) -> Case:
    from scipy import stats

    windows = {arm["name"]: arm["windows"] for arm in work["arms"]}
    ours, theirs = (
        [window["seconds"] / window["steps"] for window in windows[name]]
        for name in (claim.method, claim.reference_arm)
    )
    logs = [
        math.log(a / b) for a, b in zip(ours, theirs, strict=False)
    ]  # one may have failed in a late round
    n, problem = len(logs), None
    if n < FEWEST_ROUNDS:
        problem = sentence("few_rounds", n=n, fewest=FEWEST_ROUNDS)
    mean, interval, what = None, None, sentence("nothing_timed")
    if logs:
        found = statistics.interval(logs)
        mean = -100 * math.expm1(found.mean)
        if found.low is not None and found.high is not None:
            interval = -100 * math.expm1(found.high), -100 * math.expm1(found.low)
        environment = benchmark.record["environment"]
        values = {"on": work["name"], "record": benchmark.name, "ms": 1000 * sum(theirs) / len(theirs)}
        values["machine"] = environment.get("gpu") or environment.get("cpu")
        values |= describe_number(part, "%", mean, interval, n, "rounds")
        what = sentence("time_saved", **claim.names, **values)

    def test(threshold: float) -> float | None:
        p = float(stats.ttest_1samp(logs, math.log1p(-threshold / 100)).pvalue) if interval else None
        return None if p is None or math.isnan(p) else p

    return Case(
        part_name, benchmark.name, benchmark.name, part_name, part, part.threshold("share"), n, "%", mean,
        interval, test, what, problem,
    )  # fmt: skip
