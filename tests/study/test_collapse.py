"""Runs that diverged or collapsed are results of their arm, and a study may compare by another metric."""

import json
import math
from statistics import fmean

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score

from oelm.config import to_toml
from oelm.errors import UserError
from oelm.study.analysis import analyse
from oelm.study.decide import collapse_rate
from oelm.study.folder import StudyFolder, digest
from oelm.study.item_values import item_values, stand_in_values
from oelm.study.records import find_records
from oelm.study.report import as_plain, summary, write_report
from oelm.study.two_way import overall
from oelm.system.files import write_json, write_text
from tests.study.report_folders import copy_run, make_study, settle

DIVERGED = {
    "status": "failed",
    "failure": {"kind": "diverged"},
    "best": None,
    "test": None,
    "at_chance": True,
}
MAJORITY = {"majority": {"test": {"accuracy": 0.55}}, "tfidf_logreg": {"test": {"accuracy": 0.7}}}


def edit(record, **results):
    write_json(record.folder / "results.json", record.results | results)


def lose(out, method, seeds, references=MAJORITY, **results):
    """Let the measured runs of these seeds diverge; all others know the trivial baselines."""
    for record in list(find_records(out / "runs")):
        if not record.choosing and record.method == method and record.seed in seeds:
            edit(record, **DIVERGED | {"references": None} | results)
            (record.folder / "predictions.npz").unlink(missing_ok=True)
        elif references is not None and not record.choosing:
            edit(record, references=references)


def test_the_rate_of_collapses_has_the_exact_interval():
    for count, runs in ((0, 5), (1, 5), (3, 10), (5, 5)):
        low, high = collapse_rate(count, runs)
        assert low == pytest.approx(stats.beta.ppf(0.025, count, runs - count + 1) if count else 0.0)
        assert high == pytest.approx(stats.beta.ppf(0.975, count + 1, runs - count) if count < runs else 1.0)


def test_a_run_that_diverged_scores_as_the_worst_trivial_baseline(tmp_path):
    out = make_study(tmp_path / "s", items=400)
    lose(out, "oelm", [3])
    (found,) = analyse(out).comparisons
    assert not found.problems and found.seeds == (1, 2, 3, 4, 5) and found.collapsed
    theirs = found.reference_arm.values[2]
    assert found.differences[2] == pytest.approx(100 * (0.55 - theirs))
    assert found.overall.mean == pytest.approx(fmean(found.differences), abs=3)  # items are drawn at random
    plain = as_plain(analyse(out))
    arm = next(a for a in plain["settings"][0]["arms"] if a["method"] == "oelm")
    rest = [v for v, seed in zip(arm["test"], arm["seeds"], strict=True) if seed != 3]
    assert arm["collapsed"] == {
        "seeds": [3],
        "rate": pytest.approx(list(collapse_rate(1, 5))),
        "mean_without": pytest.approx(fmean(rest)),
    }
    assert [f["seed"] for f in arm["failures"]] == [3]
    told = [w["text"] for w in plain["warnings"] if w["kind"] == "collapsed"]
    assert len(told) == 1 and "seed 3" in told[0] and "most frequent class" in told[0]
    text = " ".join(summary(analyse(out)).split())
    assert "1 of 5 runs collapsed" in text and "interval 0.51 to 72 %" in text
    for lang in ("en", "zh"):
        assert "collapsed" in write_report(out, lang).markdown.read_text() or lang == "zh"


@pytest.mark.parametrize("method", ["baseline", "oelm"])
def test_a_collapse_in_either_arm_bars_equivalent(tmp_path, method):
    """Pairs that differ by less than a wide margin: equivalent, until one run diverges."""
    out = make_study(tmp_path / "s", seeds=10, items=200)
    text = (out / "study.toml").read_text().replace("margin = 1.0", "")
    write_text(out / "study.toml", text.replace("[study]", "[study]\nmargin = 30.0"))
    assert analyse(out).comparisons[0].verdict == "equivalent"
    lose(out, method, [4])
    (found,) = analyse(out).comparisons
    assert not found.problems and found.margin_p_holm < 0.05 and found.verdict == "open"


def test_pairs_in_which_both_runs_diverged_do_not_differ(tmp_path):
    out = make_study(tmp_path / "s", items=100)
    for method in ("baseline", "oelm"):
        lose(out, method, [2])
    (found,) = analyse(out).comparisons
    assert found.differences[1] == 0 and not found.problems


def test_an_arm_that_always_diverges_is_worse_and_without_any_run_nothing_is_said(tmp_path):
    out = make_study(tmp_path / "s", items=300)
    lose(out, "oelm", range(1, 6))
    (found,) = analyse(out).comparisons
    assert found.verdict == "worse" and found.arm.values == [0.55] * 5
    assert as_plain(analyse(out))["settings"][0]["arms"][1]["collapsed"]["mean_without"] is None
    assert write_report(out).html.exists()
    lose(out, "baseline", range(1, 6))
    (found,) = analyse(out).comparisons
    assert found.verdict == "void" and "failed" in found.problems


def test_a_fault_or_a_run_at_chance_level_still_forbids_a_verdict(tmp_path):
    out = make_study(tmp_path / "s", items=100)
    lose(out, "oelm", [2], failure={"kind": "disk"})
    assert "unfinished" in analyse(out).comparisons[0].problems
    lose(out, "oelm", [2], failure={"kind": "at_chance"})
    assert analyse(out).comparisons[0].problems == ("at_chance",)


def test_the_arithmetic_of_a_run_that_diverged_by_both_paths_does_not_matter(tmp_path):
    out = make_study(tmp_path / "s", items=100)
    lose(out, "oelm", [2], arithmetic={"numerics": 1, "path": "fast", "plain_from": 7})
    assert not analyse(out).comparisons[0].problems


def test_a_perplexity_that_diverged_is_that_of_the_unigram_model_and_differences_are_per_cent(tmp_path):
    out = make_study(tmp_path / "s", metric="perplexity")
    lose(out, "oelm", [5], references=None)
    analysis = analyse(out)
    (found,) = analysis.comparisons
    assert found.arm.values[-1] == 40.0 and found.collapsed
    theirs = found.reference_arm.values
    logs = [math.log(a / b) for a, b in zip(found.arm.values, theirs, strict=True)]
    assert found.overall.mean == pytest.approx(-100 * fmean(logs))
    (said,) = as_plain(analysis)["comparisons"]
    assert said["percent"]["mean"] == pytest.approx(100 * (1 - math.exp(fmean(logs))))
    assert said["percent"]["low"] == pytest.approx(100 * (1 - math.exp(-said["combined"]["low"] / 100)))
    assert found.group.shown(found.group.bound(25.0)) == pytest.approx(100 * (1 - 1 / 1.25))
    assert found.group.shown(-found.group.bound(25.0)) == pytest.approx(-25)


def test_a_higher_perplexity_is_told_in_per_cent_with_its_interval(tmp_path):
    out = make_study(tmp_path / "s", metric="perplexity")
    for record in list(find_records(out / "runs")):
        if not record.choosing:
            worse = 1.5 + 0.01 * record.seed if record.method == "oelm" else 1.0
            metrics = {"perplexity": 30 * worse, "bits_per_byte": 1.0}
            edit(record, test={"split": "test", "metrics": metrics})
            scores = {"scores": np.full(20, math.log(30 * worse)), "tokens": np.ones(20)}
            np.savez(record.folder / "predictions.npz", ids=np.arange(20), **scores)
    logs = np.log([1.5 + 0.01 * seed for seed in range(1, 6)])
    low, high = stats.t.interval(0.95, 4, logs.mean(), stats.sem(logs))
    percent = [100 * math.expm1(value) for value in (logs.mean(), low, high)]
    text = " ".join(summary(analyse(out)).split())
    assert (
        f"the perplexity of oelm is {percent[0]:.1f} % higher than that of baseline (95 % interval "
        f"{percent[1]:.1f} % to {percent[2]:.1f} %" in text
    )


def classes(seed, n=500, k=3):
    rng = np.random.default_rng(seed)
    labels = rng.choice(k, n, p=[0.6, 0.3, 0.1])
    right = rng.random(n) < 0.7
    predictions = np.where(right, labels, rng.integers(k, size=n))
    return {"ids": np.arange(n), "labels": labels, "predictions": predictions}


def test_weighted_f1_is_the_mean_of_its_item_values():
    arrays = classes(0)
    found = item_values("f1_weighted", arrays)
    expected = f1_score(arrays["labels"], arrays["predictions"], average="weighted")
    assert found.values.mean() == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["accuracy", "f1_macro", "f1_weighted"])
def test_the_majority_class_by_item_is_rebuilt_from_the_labels(metric):
    arrays = classes(1)
    constant = arrays | {"predictions": np.zeros(500, dtype=int)}
    expected = item_values(metric, constant)
    score = float(expected.values.mean())
    found = stand_in_values(metric, arrays, 0.7, score)
    assert np.array_equal(found.values, expected.values) and expected.values.std() > 0
    unknown = stand_in_values(metric, arrays, float(item_values(metric, arrays).values.mean()), 0.123)
    assert unknown.values == pytest.approx(np.full(500, 0.123))


def test_bits_per_byte_of_items_are_on_the_scale_of_their_logarithm():
    rng = np.random.default_rng(2)
    tokens = rng.integers(5, 50, 200)
    runs = [
        {"ids": np.arange(200), "tokens": tokens, "scores": tokens * rng.gamma(9, s, 200)} for s in (0.3, 0.4)
    ]
    a, b = (item_values("bits_per_byte", run).values.mean() for run in runs)
    nats = [run["scores"].sum() for run in runs]
    assert a - b == pytest.approx(math.log(nats[0] / nats[1]))
    stand_in = stand_in_values("bits_per_byte", runs[0], 1.2, 2.4)
    assert stand_in.values.mean() - a == pytest.approx(math.log(2))


@pytest.fixture
def by_f1(tmp_path):
    """A study in which accuracy prefers one learning rate and macro F1 the other."""
    out = make_study(tmp_path / "s", lrs=[3e-4, 1e-3], seeds=6)
    for record in list(find_records(out / "runs")):
        if record.choosing:
            metrics = {
                "accuracy": 0.8 if record.lr == 1e-3 else 0.7,
                "f1_macro": 0.5 if record.lr == 1e-3 else 0.6,
            }
            edit(record, best={"step": 30, "split": "validation", "metrics": metrics})
        else:
            arrays = classes([record.seed, len(record.method)])
            f1 = f1_score(arrays["labels"], arrays["predictions"], average="macro")
            metrics = {"accuracy": 0.7, "f1_macro": float(f1)}
            best = {"step": 30, "split": "validation", "metrics": metrics}
            edit(record, best=best, test=best | {"split": "test"})
            np.savez(record.folder / "predictions.npz", **arrays)
    return out


def set_metric(out, metric, plan=True):
    study = StudyFolder(out).read().to_dict()
    study["study"]["metric"] = metric
    study["study"]["widen"] = 0
    write_text(out / "study.toml", to_toml(study))
    if plan:
        found = StudyFolder(out).read().plan
        StudyFolder(out).write(plan=found, plan_digest=digest(found))


def test_the_metric_of_a_study_chooses_rates_and_is_compared(by_f1):
    set_metric(by_f1, "f1_macro")
    analysis = analyse(by_f1)
    (found,) = analysis.comparisons
    assert found.group.metric == "f1_macro" and found.arm.lr == 3e-4 and not found.problems
    runs = [r for r in find_records(by_f1 / "runs") if not r.choosing]
    scores = {(r.method, r.seed): r.results["test"]["metrics"]["f1_macro"] for r in runs}
    expected = [100 * (scores["oelm", s] - scores["baseline", s]) for s in range(1, 7)]
    assert found.differences == pytest.approx(expected)
    tables = []
    for seed in range(1, 7):
        pair = [item_values("f1_macro", classes([seed, len(name)])).values for name in ("oelm", "baseline")]
        tables.append(100 * (pair[0] - pair[1]))
    assert found.overall.error == pytest.approx(overall(np.array(tables)).error)
    assert "macro F1" in summary(analysis) and as_plain(analysis)["comparisons"][0]["metric"] == "f1_macro"


def test_a_metric_changed_after_the_plan_keeps_the_verdicts_of_the_plan(by_f1):
    plan = StudyFolder(by_f1).read().plan
    assert "metric" not in plan  # so that plans from before there was one keep their digest
    StudyFolder(by_f1).write(plan=plan, plan_digest=digest(plan))
    set_metric(by_f1, "f1_macro", plan=False)
    analysis = analyse(by_f1)
    assert analysis.comparisons[0].group.metric == "accuracy"
    assert analysis.changed.comparisons[0].group.metric == "f1_macro"
    assert {"key": "metric", "from": None, "to": "f1_macro"} in analysis.changes


def test_a_metric_that_no_run_measured_is_refused(by_f1):
    set_metric(by_f1, "f1_weighted")
    with pytest.raises(UserError, match=r"by 'f1_weighted'; it has accuracy, f1_macro$"):
        analyse(by_f1)
    assert json.loads((by_f1 / "study.json").read_text())["plan"]["metric"] == "f1_weighted"


def test_runs_at_near_tied_rates_are_used_and_shown(tmp_path):
    """Two learning rates nearly tie for each arm: both are measured, none is "not used" or "not ended"."""
    out = make_study(tmp_path / "s", lrs=[3e-4, 1e-3])
    study = StudyFolder(out).read().to_dict()
    study["study"] |= {"measure": "all", "widen": 0}
    write_text(out / "study.toml", to_toml(study))
    for place, method in enumerate(("baseline", "oelm")):
        for seed in range(1, 6):
            folder = out / "runs" / str(place) / f"measured-lr0.001-s{seed}"
            copy_run(folder, method, "imdb", 1e-3, seed, 0.8 + 0.01 * seed)
    settle(out)
    analysis = analyse(out)
    plain, arm = as_plain(analysis), analysis.comparisons[0].arm
    assert analysis.unused == 0 and len(analysis.records) == 24
    assert not [w for w in plain["warnings"] if w["kind"] == "unfinished"]
    assert plain["settings"][0]["arms"][1]["near_ties"][0] == {
        "lr": 1e-3, "seeds": [1, 2, 3, 4, 5], "test": pytest.approx([0.81, 0.82, 0.83, 0.84, 0.85]),
    }  # fmt: skip
    assert [r.lr for r in arm.records] == [3e-4] * 5
    assert "oelm @ 0.001" in write_report(out).markdown.read_text()
    last = out / "runs" / "1" / "measured-lr0.001-s5"
    write_json(last / "results.json", json.loads((last / "results.json").read_text()) | DIVERGED)
    assert analyse(out).comparisons[0].collapsed  # at any of the rates


def test_near_tied_rates_without_runs_are_missing_runs_and_nothing_else(tmp_path):
    """Not runs without item scores, and not as few pairs as the best rates have."""
    out = make_study(tmp_path / "s", lrs=[3e-4, 1e-3])
    study = StudyFolder(out).read().to_dict()
    study["study"] |= {"measure": "all", "widen": 0}
    write_text(out / "study.toml", to_toml(study))
    for seed in range(1, 4):
        copy_run(out / "runs" / f"measured-lr0.001-s{seed}", "oelm", "imdb", 1e-3, seed, 0.8 + 0.01 * seed)
    settle(out)
    analysis = analyse(out)
    (comparison,) = analysis.comparisons
    assert len(comparison.seeds) == 5 and comparison.pairs == 0 and comparison.verdict == "void"
    assert set(comparison.problems) == {"unfinished", "few_seeds"}
    assert "0 pairs of seeds are too few" in as_plain(analysis)["answer"][0]
