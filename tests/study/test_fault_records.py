"""What a report makes of trials that diverged, that a fault ended, and that are missing."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.errors import FAULTS, OUTCOMES
from oelm.study.analysis import analyse, analyse_records
from oelm.study.design import make_study as make_design
from oelm.study.records import find_records
from oelm.study.report import as_plain, summary, write_report
from oelm.study.report.notices import notices
from oelm.study.report.view import View, Words, table
from oelm.system.messages import LANGUAGES, notice, text_of
from tests.claims.claim_records import GRID, MEDIUM, pairs, rates_study, run, trials
from tests.study.report_folders import make_study

THREE = ["baseline", "oelm", "oelm-random"]


def failed(record, kind):
    """The record of a run that failed; "unknown": as runs recorded it before there were kinds."""
    failure = {} if kind == "unknown" else {"failure": {"kind": kind}}
    results = {"status": "failed", "reason": "something happened", "best": None, "test": None} | failure
    return replace(record, results=record.results | results)


def spoilt(kind, method="oelm", lr=1e-3):
    """A whole study, oelm clearly better, in which one trial failed; None: that trial is not there."""
    records = [*trials({"baseline": {1: 3e-4}, "oelm": {1: 3e-4}}), *pairs(5.0)]
    hit = next(r for r in records if r.choosing and (r.method, r.lr) == (method, lr))
    rest = [record for record in records if record is not hit]
    return rest if kind is None else [*rest, failed(hit, kind)]


def test_whole_it_is_decided():
    records = [*trials({"baseline": {1: 3e-4}, "oelm": {1: 3e-4}}), *pairs(5.0)]
    assert analyse_records(records, rates_study(1)).comparisons[0].verdict == "better"


@pytest.mark.parametrize("kind", OUTCOMES)
def test_what_diverged_rules_its_rate_out_and_is_shown(kind):
    analysis = analyse_records(spoilt(kind), rates_study(1))
    (comparison,) = analysis.comparisons
    assert comparison.verdict == "better" and comparison.problems == ()
    assert comparison.arm.chosen and comparison.arm.lr_scores[1e-3] is None
    assert [(f.lr, f.seed, f.failure_kind) for f in comparison.arm.failures] == [(1e-3, 1001, kind)]
    told = [n.text for n in notices(View(analysis, Words("en"))) if n.kind == "failed"]
    assert len(told) == 1 and Words("en")(f"failure.{kind}") in told[0]


def test_a_best_rate_that_diverged_gives_way_to_the_next():
    records = spoilt("diverged", lr=3e-4)
    arm = analyse_records(records, rates_study(1)).groups[0].arms["oelm"]
    assert arm.chosen and arm.lr == GRID[0]


@pytest.mark.parametrize("method", ["baseline", "oelm"])
@pytest.mark.parametrize("kind", [*FAULTS, None])
def test_a_trial_that_was_never_evaluated_voids_the_conclusion_and_is_named(kind, method):
    analysis = analyse_records(spoilt(kind, method), rates_study(1))
    (comparison,) = analysis.comparisons
    assert comparison.verdict == "void" and comparison.problems[0] == "unevaluated"
    assert len(comparison.differences) == 5  # what was measured is still shown
    name = f"{method}, learning rate 0.001, seed 1001"
    told = " ".join(summary(analysis).split())
    assert f"evaluated for {method}" in told and name in told
    assert "best for it on validation" not in told
    plain = as_plain(analysis)
    arms = {arm["method"]: arm for arm in plain["settings"][0]["arms"]}
    assert arms[method]["unevaluated"] == [{"lr": 1e-3, "seed": 1001}]
    assert plain["comparisons"][0]["problems"][0] == "unevaluated"
    assert any(w["kind"] == "unevaluated" and name in w["text"] for w in plain["warnings"])


def test_methods_whose_trials_are_whole_are_still_compared():
    study = make_design({
        "study": {"methods": THREE, "lrs": GRID, "widen": 1, "seeds": 5, "choose_seeds": 1},
        "task": {"name": "imdb"}, "model": {"name": MEDIUM},
    })  # fmt: skip
    best = {"baseline": {1: 3e-4}, "oelm-random": {1: 3e-4}}
    records = [*spoilt("process"), *trials(best)[len(GRID) :]]
    records += pairs(-5.0, method="oelm-random", only=True)
    verdicts = {c.method: c.verdict for c in analyse_records(records, study).comparisons}
    assert verdicts == {"oelm": "void", "oelm-random": "worse"}


def test_a_fault_in_the_measured_runs_is_a_run_that_is_missing():
    records = [*trials({"baseline": {1: 3e-4}, "oelm": {1: 3e-4}}), *pairs(5.0)]
    # These records hold no trivial baseline for a run that diverged to count with.
    for kind, problem in (("disk", "unfinished"), ("diverged", "failed"), ("unknown", "failed")):
        *rest, last = records
        found = analyse_records([*rest, failed(last, kind)], rates_study(1)).comparisons[0]
        assert problem in found.problems and len({"unfinished", "failed"} & {*found.problems}) == 1


def test_every_kind_has_a_name_in_every_language():
    for kind in (*OUTCOMES, *FAULTS):
        assert set(table()[f"failure.{kind}"]) == set(LANGUAGES)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_old_records_are_read_and_a_failure_of_theirs_rules_nothing_out(tmp_path, lang):
    out = make_study(tmp_path / "s")
    for record in list(find_records(out / "runs")):
        if record.method == "oelm" and record.choosing and record.lr == 1e-3:
            results = record.results | {"status": "failed", "reason": "its process ended with signal 9"}
            (record.folder / "results.json").write_text(json.dumps(results | {"schema": 1}))
    (comparison,) = analyse(out).comparisons
    assert comparison.verdict == "void" and comparison.problems[0] == "unevaluated"
    written = write_report(out, lang)
    page = written.html.read_text(encoding="utf-8")
    assert Words(lang)("table.unevaluated") in page and Words(lang)("notice.unevaluated") in page
    assert text_of(notice("study.run", method="oelm", lr=0.001, seed=1001), lang) in page
    shown = CliRunner().invoke(app, ["report", str(out), "--json"])
    (said,) = json.loads(shown.output)["comparisons"]
    assert said["verdict"] == "void" and "unevaluated" in said["problems"]


def test_a_run_that_was_stopped_is_not_evaluated_either():
    records = spoilt(None)
    stopped = {"status": "interrupted", "reason": "stopped by SIGTERM", "best": None}
    records.append(run("oelm", 1001, None, lr=1e-3, validation=0.9, results=stopped))
    (comparison,) = analyse_records(records, rates_study(1)).comparisons
    assert comparison.verdict == "void" and "unevaluated" in comparison.problems
