"""Speed: the step times of two methods, measured alternately by one process, from records of `oelm bench`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from oelm.claims import data
from oelm.claims.cases import Case, describe_number
from oelm.claims.data import Claim, ClaimPart, sentence
from oelm.errors import UserError
from oelm.models.gpt_sizes import SIZES
from oelm.study import statistics
from oelm.study.decide import FEWEST_SEEDS, LEVEL

FEWEST_ROUNDS = FEWEST_SEEDS


@dataclass(frozen=True)
class Benchmark:
    """A record of `oelm bench` and the name of its file."""

    name: str
    record: dict[str, Any]


def speed_cases(claim: Claim, benchmarks: Sequence[Benchmark]) -> list[Case]:
    """The share of a step's time that the claim's method saves, in per cent, in every benchmark of both
    methods with a published shape."""
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


def _model(work: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """The model that was trained; older records lack it and are of the reference GPT."""
    size = record["settings"]["size"]
    layers, d_model = SIZES.get(size, (0, 0))[:2]
    made: dict[str, Any] = {"name": size, "architecture": "gpt", "layers": layers, "d_model": d_model}
    return work.get("model", made)


def _fits(part: ClaimPart, work: dict[str, Any], record: dict[str, Any]) -> bool:
    model, shape = _model(work, record), data.claim_data()["shapes"][part.architecture]
    measured = (work["kind"], work["length"], model["architecture"], model["layers"], model["d_model"])
    return not work.get("checkpointing") and measured == (part.kind, part.length, part.architecture, *shape)


def _case(claim: Claim, part_name: str, part: ClaimPart, benchmark: Benchmark, work: dict[str, Any]) -> Case:
    windows = {arm["name"]: arm["windows"] for arm in work["arms"]}
    of_method, of_reference = (
        [window["seconds"] / window["steps"] for window in windows[name]]
        for name in (claim.method, claim.reference_arm)
    )
    # Of unequal length where one of them failed in a late round.
    logs = [math.log(a / b) for a, b in zip(of_method, of_reference, strict=False)]
    n, problem = len(logs), None
    if n < FEWEST_ROUNDS:
        problem = sentence("few_rounds", n=n, fewest=FEWEST_ROUNDS)
    mean, interval, what = None, None, sentence("nothing_timed")
    if logs:
        estimate = statistics.interval(logs)
        mean = -100 * math.expm1(estimate.mean)
        if estimate.low is not None and estimate.high is not None:
            interval = -100 * math.expm1(estimate.high), -100 * math.expm1(estimate.low)
        environment = benchmark.record["environment"]
        values = {
            "on": work["name"],
            "record": benchmark.name,
            "ms": 1000 * sum(of_reference) / len(of_reference),
        }
        values["machine"] = environment.get("gpu") or environment.get("cpu")
        values |= describe_number(part, "%", mean, interval, sentence("n_rounds", n=n), 1 - LEVEL)
        what = sentence("time_saved", **claim.names, **values)

    def test(threshold: float) -> float | None:
        p = float(stats.ttest_1samp(logs, math.log1p(-threshold / 100)).pvalue) if interval else None
        return None if p is None or math.isnan(p) else p

    model = _model(work, benchmark.record)["name"]
    return Case(
        part_name, model, benchmark.name, part_name, part, part.threshold("share"), n, "%", mean, interval,
        test, what, problem,
    )  # fmt: skip
