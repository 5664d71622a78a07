"""The section on the published recipe, and models that were pre-trained here."""

from dataclasses import replace
from pathlib import Path

from oelm.claims.collect import Collection
from oelm.claims.findings import make_page
from oelm.claims.verdicts import judge
from oelm.config import ArmConfig
from oelm.study.analysis import analyse_records
from oelm.study.design import make_study, read_study
from oelm.study.records import Record, identify
from oelm.study.result_types import Analysis
from tests.claims.claim_records import WIGGLE, pairs, run, tuned

SCORES = {
    "baseline": 0.78, "oelm": 0.85, "baseline at the other rate": 0.60, "oelm at the other rate": 0.84,
    "baseline with warm-up": 0.86, "oelm with warm-up": 0.86,
    "baseline by validation": 0.77, "oelm by validation": 0.845,
}  # fmt: skip
LINEAR = {"majority": {"test": {"accuracy": 0.5}}, "tfidf_logreg": {"test": {"accuracy": 0.9}}}
BASELINES = {"references": LINEAR}


def repeated(left_out: int = 0) -> list[Analysis]:
    """The study of that name as if it had been made, perhaps without some runs."""
    study = make_study(read_study("published-recipe"))
    records: list[Record] = []
    for name, arm in study.arms.items():
        for seed in study.seeds:
            value = SCORES[name] + WIGGLE[seed] / 100 * (arm.label == "oelm")
            training = {**arm.settings.get("training", {}), "lr": arm.lr or study.table.lrs[0]}
            one = run(arm.label, seed, value, results=BASELINES, **training)
            labels = ArmConfig(name if name != arm.label else None, study.differs_in)
            config = replace(one.config, arm=labels)
            records.append(replace(one, config=config, identity=identify(config, "imdb", "fp32", 1)))
    return [analyse_records(records[: len(records) - left_out], study)]


def page(analyses: list[Analysis]) -> str:
    return make_page(Path("docs/findings.md"), Collection(analyses), judge(analyses))[0]


def test_the_gap_as_published_stands_beside_the_published_one_and_what_changes_it():
    text = page(repeated())
    told = text.partition("## As published")[2].partition("\n## ")[0]
    assert "`oelm` minus `baseline` is +6.92 (+6.62 to +7.22) points (n = 5; published: +7.14)." in told
    assert "`oelm with warm-up` minus `baseline with warm-up` −0.08 " in told
    assert "`oelm` minus `baseline at the other rate` +24.92" in told
    assert "`oelm by validation` minus `baseline by validation` +7.42" in told
    assert "`baseline with warm-up` minus" not in told  # no comparison of the methods


def test_it_decides_no_claim_and_is_no_fair_comparison():
    fair, both = (judge(some) for some in (tuned(pairs(7, n=10)), [*tuned(pairs(7, n=10)), *repeated()]))
    assert [(v.id, v.verdict, v.number) for v in fair] == [(v.id, v.verdict, v.number) for v in both]
    text = page(repeated())
    assert "points: no study of it is complete." in text  # of fair ones
    assert "| imdb | gpt-medium-512 | baseline with warm-up |" not in text.partition("linear baseline")[2]


def test_before_its_last_run_nothing_is_told():
    assert "## As published" not in page(repeated(left_out=1))


def test_a_model_that_was_pretrained_here_stands_beside_the_linear_one():
    results = BASELINES | {"architecture": "oelm-gpt"}
    text = page(tuned(pairs(1, base=0.905, model="studies/pretrain-text", results=results)))
    assert "end: `baseline` on imdb, pre-trained, `oelm` on imdb, pre-trained; below it: none." in text
    assert "| imdb | studies/pretrain-text | oelm | 91." in text
    other = page(tuned(pairs(1, base=0.905, model="bert", results=BASELINES | {"architecture": "bert"})))
    assert "end: none; below it: none." in other  # it has read more than the task, and not here
