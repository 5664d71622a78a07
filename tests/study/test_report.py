"""Reports as a reader gets them: the answer, the warnings, the two files, and what must not be in them."""

import json
import re
import resource
import shutil
import string
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len
from scipy import stats
from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.config import ArmConfig, MethodConfig
from oelm.errors import UserError
from oelm.study.analysis import analyse, analyse_records
from oelm.study.catalogue import get_experiment
from oelm.study.folder import StudyFolder, digest
from oelm.study.records import find_records, mean_of
from oelm.study.report import as_plain, numbers, summary, write_report
from oelm.study.report.answer import answer
from oelm.study.report.build import build
from oelm.study.report.document import escape_markdown, to_html, to_markdown
from oelm.study.report.notices import notices
from oelm.study.report.tables import MOST_KEYS
from oelm.study.report.view import View, Words, table
from oelm.system.messages import LANGUAGES, notice
from oelm.training.status import run_status
from tests.claims.claim_records import ONE_GROUP, pairs, rates_study, run, trials
from tests.study.report_folders import copy_run, make_study, settle

HOSTILE = "<script>alert(1)</script>|$x$ `b` *c* [d](e) & \\ _f_ \"q'"


class Page(HTMLParser):
    """What a browser would make of a page: its elements, attributes, ids and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.by_tag: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # well nested

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)
            self.by_tag.setdefault(self.open[-1], []).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split()).replace("\u00a0", " ")


def rendered(records, study=None, lang="en") -> tuple[str, str]:
    words = Words(lang)
    document = build(View(analyse_records(records, study), words), "somewhere")
    return to_html(document, words), to_markdown(document, words, "report.html")


def said(records, study=None, lang="en") -> str:
    return answer(View(analyse_records(records, study), Words(lang)))[0]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("report") / "s", items=200)


@pytest.fixture(scope="module")
def page(study):
    return Page(write_report(study).html.read_text(encoding="utf-8"))


def test_both_languages_have_every_text_with_the_same_places_for_values():
    for key, texts in table().items():
        assert set(texts) == set(LANGUAGES), key
        parsed = [string.Formatter().parse(texts[lang]) for lang in LANGUAGES]
        first, second = ({name for _, name, _, _ in parts if name} for parts in parsed)
        assert first == second, key
    assert sum(bool(re.search("[一-鿿]", texts["zh"])) for texts in table().values()) > 0.9 * len(table())


def test_an_unknown_language_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="en, zh"):
        Words("fr")


@pytest.mark.parametrize(("gain", "more"), [(5.0, "more"), (-5.0, "less")])
def test_a_clear_difference_is_told_with_its_interval_and_p(gain, more):
    records = pairs(gain)
    ours = [r.test for r in records if r.method == "oelm"]
    theirs = [r.test for r in records if r.method == "baseline"]
    test = stats.ttest_rel([100 * v for v in ours], [100 * v for v in theirs])
    low, high = sorted(abs(end) for end in test.confidence_interval(0.95))
    sentence = said(records)
    assert f"oelm reaches {abs(gain):.2f} points {more} accuracy than baseline" in sentence
    assert (
        f"95 % interval {low:.2f} to {high:.2f}, n = 5 seeds, p < 0.001" in sentence and test.pvalue < 0.001
    )


def test_the_interval_of_an_accuracy_ends_at_all_of_them():
    records = pairs(-0.4, base=0.9985, spread=2.0)
    values = [r.test for r in records if r.method == "oelm"]
    assert max(values) <= 1 < stats.ttest_1samp(values, 0).confidence_interval().high
    assert re.search(r"9\d\.\d+ to 100\.0", Page(rendered(records)[0]).text)


def test_a_perplexity_is_lower_or_higher_not_more_or_less():
    """By what was put into the runs: ten per cent of it, whichever the direction, not of its logarithm."""
    for gain, word in ((-10.0, "higher"), (10.0, "lower")):
        text = said(pairs(gain, task="tinystories"))
        told = re.search(rf"the perplexity of oelm is ([\d.]+) % {word} than that of baseline", text)
        assert told and float(told[1]) == pytest.approx(10.0, abs=0.05)
        assert re.search(r"95 % interval 9\.\d+ % to 10\.\d+ %", text)


def test_equality_within_the_margin_needs_a_test_and_says_the_margin():
    sentence = said(pairs(0.0, spread=0.5))
    assert "are equivalent: they differ by less than the margin of 1 point (" in sentence


def test_a_difference_too_small_to_matter_is_called_so():
    sentence = said(pairs(0.5, spread=0.3))
    assert "are equivalent: they differ by less than the margin of 1 point" in sentence
    assert "difference +0.50 points" in sentence and "a small but certain difference" in sentence


def differing_by(hundredths, method="oelm"):
    found = [run("baseline", seed, 0.8) for seed in range(1, len(hundredths) + 1)]
    return found + [run(method, seed, 0.8 + d / 1e4) for seed, d in enumerate(hundredths, 1)]


def test_an_interval_without_0_beside_a_corrected_p_is_explained():
    few = (150, 400, 200, 100, 400, -60)  # p = 0.04 by itself, a t test's
    records = differing_by(few) + differing_by((10, -10, 20, -20, 10, 300), "oelm-random")[len(few) :]
    assert "excludes 0, but p, corrected for 2 comparisons, does not (p = 0.0" in said(records)


def test_what_the_data_do_not_decide_is_not_decided():
    sentence = said(pairs(0.1, spread=10.0))
    found = re.search(
        r"interval is −(\d+\.\d) to \+(\d+\.\d); 0 % of its variance comes from the test items and would "
        r"stay with any number of seeds; about \d+ seeds would narrow it to the margin",
        sentence,
    )
    assert "do not decide between oelm and baseline" in sentence and found
    assert "p =" not in sentence


def test_the_same_difference_on_every_seed_has_no_interval_to_tell():
    records = [run(m, s, 0.75 + 0.125 * (m == "oelm")) for s in range(1, 6) for m in ("baseline", "oelm")]
    assert "+12.5 points for each of 5 seeds" in said(records)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (pairs(5.0, n=3), "3 pairs of seeds are too few: with 1 comparison a verdict needs 5"),
        (
            pairs(5.0, only=True, lr=1e-3) + pairs(0.0, method="baseline", only=True),
            "different learning rates",
        ),
        (pairs(5.0, results={"at_chance": True}), "oelm with seeds 1, 2, 3, 4, 5"),
        (pairs(5.0, choose_on="test"), "on the test split"),
        ([*pairs(5.0), run("baseline", 6, 0.8)], "measured runs are missing"),
    ],
)
def test_where_nothing_may_be_concluded_the_reason_is_given(records, reason):
    sentence = said(records)
    assert "no conclusion may be drawn about oelm against baseline, because" in sentence
    assert reason in sentence and "reaches" not in sentence
    assert any(
        n.kind == "void" and reason in n.text
        for n in notices(View(analyse_records(records, None), Words("en")))
    )


def test_before_anything_is_measured_no_learning_rates_of_it_are_blamed():
    rates = {method: {1: 3e-4, 2: 3e-4} for method in ("baseline", "oelm")}
    whole = trials(rates)
    sentence = said(whole[:-1], rates_study(2))
    assert "not every learning rate of the grid was evaluated" in sentence
    assert "were measured at" not in sentence and "0 pairs of seeds are too few" in sentence


def test_several_tasks_are_counted_by_method():
    records = pairs(5.0, task="imdb") + pairs(-5.0, task="ag_news") + pairs(5.0, task="sst2")
    sentence = said(records)
    assert sentence.startswith("Compared with baseline in 3 settings. oelm: better in 2 (imdb, sst2)")
    assert "worse in 1 (ag_news) (−5.00 points)" in sentence


def test_many_methods_on_one_task_are_grouped_by_verdict():
    records = pairs(5.0, n=10)
    for method in ("oelm-random", "oelm-gaussian", "frozen"):
        records += pairs(0.0, n=10, spread=0.5, method=method, only=True)
    assert "better: oelm +5.00 points; equivalent: " in said(records)


def test_names_with_commas_stand_in_quotation_marks_where_they_are_listed():
    arm = ArmConfig("oelm, slow")
    records = [*pairs(5.0, n=10), *pairs(5.0, n=10, method="oelm-random", only=True)]
    records = [
        r if r.method != "oelm-random" else replace(r, config=replace(r.config, arm=arm)) for r in records
    ]
    for method in ("oelm-gaussian", "frozen"):
        records += pairs(0.0, n=10, spread=0.5, method=method, only=True)
    assert 'better: oelm +5.00 points, "oelm, slow" +5.00 points; equivalent: ' in said(records)
    alone = [record for record in records if record.method == "oelm, slow"]
    assert said(alone).endswith('every run that has ended is of "oelm, slow".')
    assert str(notice("problem.unevaluated", methods=["a, b", "c"])).endswith('for "a, b", c')


def test_nothing_to_compare_is_said():
    assert said([run("oelm", 1, 0.8)]) == "There is nothing to compare: every run that has ended is of oelm."


def test_learning_rates_and_trivial_baselines_are_the_second_sentence(study):
    second = answer(View(analyse(study), Words("en")))[1]
    assert "best for it on validation (baseline 0.0003, oelm 0.0003)" in second
    assert "TF-IDF + logistic regression reaches 90.1 %, better than all of them." in second
    untuned = answer(View(analyse_records(pairs(5.0), None), Words("en")))[1]
    assert "at the same learning rate (0.0003), which was not chosen from a grid" in untuned


def test_everything_asked_for_is_on_the_page(page):
    for heading in ("Results", "Learning rates and learning curves", "How certain this is", "Warnings",
                    "Time, memory, parameters", "Training in detail", "Raw values",
                    "How to repeat it"):  # fmt: skip
        assert heading in page.by_tag["h2"]
    for words in ("p, Holm", "p, equivalence", "±1", "over items only", "from items", "within 1 of the best",
                  "lost at 3 × (points)", "area under the curve", "most frequent class", "3,145,728 (7.0 %)",
                  "baseline, published", "IMDB-oelm: one run, lr 0.001, on test; differs in",
                  "oelm study study.toml --out again", "NVIDIA H200", "data of imdb", "10.1 ms"):  # fmt: skip
        assert words in page.text, words
    assert page.tags.count("svg") == page.tags.count("desc") == 4  # forest, rates, curves, histories


def test_the_numbers_in_the_files_are_those_of_the_analysis(study, page):
    comparison = analyse(study).comparisons[0]
    assert comparison.combined is not None and comparison.by_items is not None
    digits = numbers.digits_for(comparison.combined.low, comparison.combined.high)
    markdown = (study / "report.md").read_text(encoding="utf-8")
    for text in (page.text, markdown):
        assert numbers.signed(comparison.combined.mean, digits) in text
        assert numbers.signed(comparison.by_items.low, digits) in text
        for record in comparison.arm.records:
            assert f"{100 * record.test:.2f}" in text


def test_the_page_stands_alone(page, study):
    html = (study / "report.html").read_text(encoding="utf-8")
    assert "script" not in page.tags and "link" not in page.tags and "@import" not in html
    for _, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "srcset", "data"):
            assert value.startswith("#")
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for value in re.findall(r'(?:href="|url\()#([^")]+)', html):
        assert value in ids


def test_the_same_records_give_the_same_bytes(study):
    first = [path.read_bytes() for path in (study / "report.md", study / "report.html")]
    write_report(study)
    assert first == [path.read_bytes() for path in (study / "report.md", study / "report.html")]


def test_markdown_tables_are_tables(study):
    write_report(study)
    markdown = (study / "report.md").read_text(encoding="utf-8")
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(markdown)
    kinds = [token.type for token in tokens]
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert kinds.count("table_open") >= 6
    # Every line is a row (the ones that align the columns aside), and every bar in it ends a cell.
    assert len(lines) == kinds.count("tr_open") + kinds.count("table_open")
    cells = sum(line.count("|") - 1 for line in lines if not line.startswith(("| :---", "| ---:")))
    assert cells == kinds.count("td_open") + kinds.count("th_open")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_names_of_the_user_are_text_and_nothing_else(tmp_path, lang):
    out = make_study(tmp_path / "s", tasks=(HOSTILE, "imdb"), seeds=5, title=HOSTILE)
    for path in (out / "runs").rglob("results.json"):
        record = json.loads(path.read_text()) | {"warnings": [f"{HOSTILE}\n# not a heading"]}
        path.write_text(json.dumps(record))
    copy_run(
        out / "runs" / "x", "oelm", "imdb", 3e-4, 6, 0.8, results={"status": "failed", "reason": HOSTILE}
    )
    written = write_report(out, lang)
    page = Page(written.html.read_text(encoding="utf-8"))
    assert "script" not in page.tags and "b" not in {tag for tag, _, _ in page.attributes}
    assert page.by_tag["title"][0].endswith(HOSTILE)
    assert any(HOSTILE in " ".join(text.split()) for text in page.by_tag["li"])
    assert any("<script>alert(1)</" in text for text in page.by_tag["text"])  # in the drawings
    seen = MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(
        written.markdown.read_text(encoding="utf-8")
    )
    from_markdown = Page(seen)
    assert "script" not in from_markdown.tags and "a" not in from_markdown.tags
    assert HOSTILE in from_markdown.by_tag["h1"][0] and "# not a heading" in from_markdown.text


@pytest.mark.parametrize(
    "text", ["# a", "1. a", "- a", "+ a", "a\n\nb", "|", "<b>", "**x**", "~~x~~", "&lt;"]
)
def test_markdown_shows_a_text_as_it_is(text):
    seen = Page(MarkdownIt("gfm-like", {"linkify": False}).render(escape_markdown(text)))
    assert seen.tags == ["p"] and seen.text == " ".join(text.split())


def test_perplexity_never_stands_without_bits_per_byte(tmp_path):
    out = make_study(tmp_path / "s", tasks=("tinystories",), metric="perplexity")
    written = write_report(out)
    page = Page(written.html.read_text(encoding="utf-8"))
    arm = written.analysis.groups[0].arms["oelm"]
    bits = f"{mean_of(arm.records, 'test', 'metrics', 'bits_per_byte'):.3f}"
    assert "bits per byte" in page.by_tag["th"] and bits in page.text
    assert page.by_tag["text"].count("bits per byte") == 2  # rates, curves
    assert page.by_tag["text"].count("million tokens trained on") == 1
    for record in arm.records:  # raw values
        assert f"({record.results['test']['metrics']['bits_per_byte']:.3f})" in page.text
    assert "GPT-02: one run, lr 0.001, on validation; differs in" in page.text and "4.69" in page.text
    shown = summary(written.analysis)
    assert bits in shown and re.search(r"unigram model +40\.00 +1\.277", shown)


def test_curves_are_over_steps_where_runs_read_different_numbers_of_tokens(tmp_path):
    out = make_study(tmp_path / "s", tasks=("tinystories",), metric="perplexity")
    path = next((out / "runs").glob("*/measured-*/results.json"))
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"tokens": record["tokens"] + 4221}))
    page = Page(write_report(out).html.read_text(encoding="utf-8"))
    assert "million tokens trained on" not in page.by_tag["text"] and "step" in page.by_tag["text"]


def test_every_kind_of_warning_is_told_once(tmp_path):
    out = make_study(tmp_path / "s")
    for path in (out / "runs").rglob("environment.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {"commit": "abc" if "choice" in str(path) else "def"}))
    for record in list(find_records(out / "runs")):
        if record.method == "oelm" and record.choosing and record.lr in (1e-3, 3e-3):
            failed = {"status": "failed", "reason": "the loss is not finite"}
            (record.folder / "results.json").write_text(json.dumps(record.results | failed))
    settle(out)
    copy_run(out / "runs" / "other", "oelm", "another", 3e-4, 1, 0.8)
    found = {}
    for listed in notices(View(analyse(out), Words("en"))):
        found.setdefault(listed.kind, []).append(listed.text)
    assert any(
        "oelm, learning rate 0.001, seed 1001; oelm, learning rate 0.003, seed 1001. Reason: the loss" in t
        for t in found["failed"]
    )
    assert found["trivial"] == ["imdb, baseline, oelm: the mean is behind TF-IDF + logistic regression"]
    assert "the runs do not share one commit: abc, def" in found["mixture"]
    assert any(text.startswith("left out: 1 record in the folder, of other ") for text in found["mixture"])
    assert any(
        text.startswith("imdb: 114 of 25000 items of test stand in train too (") for text in found["run"]
    )
    assert len(found["run"]) == len(set(found["run"])) == 6  # each warning of the real run, once


def test_copies_damage_and_changes_of_plan_are_told(tmp_path):
    out = make_study(tmp_path / "s")
    settle(out)
    before = analyse(out)
    runs = sorted(path.parent for path in (out / "runs").rglob("results.json"))
    shutil.copytree(runs[-1], runs[-1].with_name("copy"))
    shutil.copytree(runs[-1], runs[-1].with_name(".half.part"))
    shutil.copytree(runs[-1], runs[-1].with_name("torn"))
    (runs[-1].with_name("torn") / "results.json").write_text('{"status": "comp')
    with (runs[-1] / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step')
    (runs[-1] / "predictions.npz").write_bytes(b"PK nothing of the kind")
    study = StudyFolder(out).read()
    StudyFolder(out).write(plan=study.plan, plan_digest=digest(study.plan))
    StudyFolder(out).save(replace(study, table=replace(study.table, margin=10.0)), [])
    after = analyse(out)
    assert [c.differences for c in after.comparisons] == [c.differences for c in before.comparisons]
    assert after.copies == 1 and len(after.damaged) == 1
    texts = [listed.text for listed in notices(View(after, Words("en")))]
    assert any("study.margin was changed from 1.0 to 10.0" in text for text in texts)
    assert any("1 copy of a run" in text for text in texts) and any("skipped" in text for text in texts)


def test_a_published_recipe_is_compared_with_trials_before_anything_is_measured(tmp_path):
    out = make_study(tmp_path / "s")
    for folder in [*(out / "runs").rglob("measured-*")]:
        shutil.rmtree(folder)
    analysis = analyse(out)
    keys = View(analysis, Words("en")).differs(get_experiment("IMDB-oelm"), analysis.groups[0])
    assert "training.schedule" in keys and not analysis.groups[0].arms["oelm"].records


def test_a_run_that_was_made_twice_with_another_score_is_told(tmp_path):
    out = make_study(tmp_path / "s")
    run = next((out / "runs").rglob("measured-*-s1*"))
    shutil.copytree(run, run.with_name("a-better-one"))
    record = json.loads((run / "results.json").read_text())
    record["test"]["metrics"]["accuracy"] += 0.05
    (run.with_name("a-better-one") / "results.json").write_text(json.dumps(record))
    texts = [listed.text for listed in notices(View(analyse(out), Words("en")))]
    assert any(text.startswith("1 run left out beside one of the same configuration") for text in texts)


def test_results_under_the_configuration_of_another_run_do_not_count(tmp_path):
    """The record of a good seed in place of a bad one's."""
    out = make_study(tmp_path / "s")
    good, bad = (next((out / "runs").rglob(f"measured-*-s{seed}*")) for seed in (1, 2))
    for path in good.iterdir():
        if path.name != "config.toml":
            shutil.copy(path, bad / path.name)
    after = analyse(out)
    assert [str(problem).split("run: ")[1] for problem in after.damaged] == [
        "seed is 1, and 2 in config.toml"
    ]
    assert "unfinished" in after.comparisons[0].problems


def test_a_score_that_its_items_do_not_give_decides_nothing(tmp_path):
    out = make_study(tmp_path / "s", items=1000)
    (before,) = analyse(out).comparisons
    path = next((out / "runs").rglob("measured-*-s1*")) / "results.json"
    record = json.loads(path.read_text())
    record["test"]["metrics"]["accuracy"] += 0.05
    path.write_text(json.dumps(record))
    (after,) = analyse(out).comparisons
    assert not before.problems and after.problems == ("no_items",) and after.verdict == "void"


def test_items_of_one_group_decide_nothing():
    """A corpus without marks between documents, such as one long text."""
    records = [replace(record, folder=ONE_GROUP) for record in pairs(5.0)]
    (found,) = analyse_records(records, None).comparisons
    assert found.problems == ("one_group",) and found.verdict == "void"
    assert not analyse_records(pairs(5.0), None).comparisons[0].problems


def test_a_study_that_is_changed_after_its_first_test_keeps_its_planned_verdicts(tmp_path):
    out = make_study(tmp_path / "s", methods=("baseline", "oelm", "frozen"))
    folder, study = StudyFolder(out), StudyFolder(out).read()
    folder.write(plan=study.plan, plan_digest=digest(study.plan))
    planned = [(c.method, c.verdict, c.margin) for c in analyse(out).comparisons]
    text = (out / "study.toml").read_text()
    (out / "study.toml").write_text(text.replace("[study]", "[study]\nmargin = 5.0"))
    after = analyse(out)
    assert [(c.method, c.verdict, c.margin) for c in after.comparisons] == planned
    texts = [listed.text for listed in notices(View(after, Words("en")))]
    assert any("study.margin was changed from 1.0 to 5.0" in text for text in texts)
    assert any('by the changed study, and is "undecided" as planned' in text for text in texts)
    (out / "study.toml").write_text(text.replace('"frozen"', "").replace(", ]", "]"))
    texts = [listed.text for listed in notices(View(analyse(out), Words("en")))]
    assert any("study.methods was changed from baseline, oelm, frozen to baseline, oelm" in t for t in texts)
    assert [(c.method, c.verdict, c.margin) for c in analyse(out).comparisons] == planned
    folder.write(plan=study.plan | {"margin": 5.0})
    with pytest.raises(UserError, match=r"the plan in .* was edited"):
        analyse(out)


INCOMPLETE = {
    "best without metrics": {"best": {"split": "validation", "step": 3}},
    "metrics of another kind": {"best": {"split": "validation", "step": 3, "metrics": ["accuracy"]}},
    "a metric that is text": {"test": {"split": "test", "step": 3, "metrics": {"accuracy": "0.9"}}},
    "a metric that is null": {"test": {"split": "test", "step": 3, "metrics": {"accuracy": None}}},
    "a number no float can hold": {"test": {"split": "test", "metrics": {"accuracy": 10**400}}},
    "no test": {"test": None},
    "no parameters": {"parameters": None},
    "references of another kind": {"references": {"majority": 0.5}},
    "a time that is text": {"total_time_s": "long"},
}


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_one_incomplete_record_is_named_and_the_others_are_compared(tmp_path, kind):
    out = make_study(tmp_path / "s")
    settle(out)
    victim = next(p for p in sorted((out / "runs").rglob("results.json")) if "measured" in str(p))
    victim.write_text(json.dumps(json.loads(victim.read_text()) | INCOMPLETE[kind]))
    found = analyse(out)
    assert len(found.damaged) == 1 and f"{victim} is not the record of a run: " in str(found.damaged[0])
    assert len(found.comparisons) == 1 and len(found.comparisons[0].seeds) == 4
    assert run_status(victim.parent).status and summary(found)


def test_warnings_that_differ_in_numbers_only_are_one_line():
    records = pairs(5.0)
    for place, record in enumerate(records):
        record.results["warnings"] = [
            notice(
                "training.behind_baseline", split="test", metric="accuracy", value=(place + 10) / 100,
                name="tfidf_logreg", baseline=0.9007,
            ).to_dict()
        ]  # fmt: skip
    analysis = analyse_records(records, None)
    (listed,) = [n for n in notices(View(analysis, Words("en"))) if n.kind == "run"]
    assert listed.text == (
        "imdb: test accuracy 0.1000–0.1900 is behind the trivial baseline TF-IDF + logistic regression "
        "(0.9007) (10 runs)"
    )
    (listed,) = [n for n in notices(View(analysis, Words("zh"))) if n.kind == "run"]
    assert listed.text == (
        "imdb：测试集准确率 0.1000–0.1900 落后于简单参照 TF-IDF + 逻辑回归（0.9007）（运行数：10）"
    )
    warnings = as_plain(analysis)["warnings"]  # for programs: the code, and the range of each number
    (told,) = [w["notice"]["values"]["warning"] for w in warnings if w["kind"] == "run"]
    assert told["code"] == "training.behind_baseline" and told["values"]["value"] == [0.10, 0.19]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_warnings_of_old_records_and_of_later_versions_are_shown_as_they_are(lang):
    records = pairs(5.0)
    for record in records:
        later = {"code": "data.tomorrow", "values": {"n": 3}}
        record.results["warnings"] = ["3 rows dropped: no label", f"accuracy {record.test}", later]
    texts = [n.text for n in notices(View(analyse_records(records, None), Words(lang))) if n.kind == "run"]
    assert len(texts) == 3  # what the runs said in different numbers is one
    assert any("3 rows dropped: no label" in text for text in texts)
    assert any("data.tomorrow (n: 3)" in text for text in texts)
    assert any(text.count("accuracy 0.") == 10 for text in texts)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_failure_is_told_in_the_reports_language(lang):
    reason = notice("run.weight_not_finite", name="h.0.mlp", step=1200, checkpoint=None).to_dict()
    failed = {"status": "failed", "failure": {"kind": "diverged"}, "reason": reason, "test": None}
    view = View(analyse_records([*pairs(5.0), run("oelm", 6, None, results=failed)], None), Words(lang))
    (text,) = [listed.text for listed in notices(view) if listed.kind == "failed"]
    said = {
        "en": "imdb, diverged: oelm, learning rate 0.0003, seed 6. Reason: h.0.mlp is not finite after step "
        "1,200; the last good checkpoint is none",
        "zh": "imdb，发散：oelm，学习率 0.0003，种子 6。原因：第 1,200 步之后 h.0.mlp 不是有限值；"
        "最近的完好检查点：无",
    }
    assert text == said[lang]


def test_runs_at_chance_edges_and_missing_runs_are_warned_of():
    tried = rates_study(1)
    edge = trials({"baseline": {1: 3e-5}, "oelm": {1: 3e-4}})
    records = [*edge, run("baseline", 1, 0.5, lr=3e-5, results={"at_chance": True}), run("oelm", 1, 0.8)]
    analysis = analyse_records(records, make_widening(tried))
    kinds = {n.kind: n.text for n in notices(View(analysis, Words("en")))}
    assert (
        kinds["chance"] == "imdb, baseline: seed 1 cannot be told from the most frequent class on validation"
    )
    assert "baseline: the best learning rate (3e-5) is at the edge of the grid" in kinds["rate"]
    assert kinds["unfinished"] == "imdb: 8 runs of the study have not ended; the numbers will change"


def make_widening(study):
    """A study whose grid has been widened as far as it may."""
    return replace(study, table=replace(study.table, widen=1, lrs=study.table.lrs[1:]))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("records", "study"),
    [
        ([run("oelm", 1, 0.8)], None),
        (trials({"baseline": {1: 3e-4}, "oelm": {1: 1e-3}}), rates_study(1)),
        (trials({"baseline": {1: 3e-4, 2: 3e-4}, "oelm": {1: 1e-3, 2: 3e-4}}), rates_study(2)),
        (pairs(1.0, n=1), None),
        (pairs(1.0) + pairs(2.0, task="tinystories") + pairs(-1.0, task="sst2", n=3), None),
        (pairs(1.0) + pairs(1.0, lr=1e-3), None),
        (pairs(1.0) + pairs(1.0, model="bert-base-uncased"), None),
        ([run("oelm", 1, 0.8, results={"status": "failed", "reason": "", "test": None})], None),
        (pairs(1.0, warmup=7.0) + pairs(1.0, warmup=9.0), None),
        ([run(method, 1, 0.8, task="文本") for method in ("baseline", "oelm")], None),
    ],
)  # fmt: skip
def test_whatever_is_there_gives_a_report(records, study, lang):
    html, markdown = rendered(records, study, lang)
    assert Page(html).by_tag["h1"] and markdown.startswith("# ")
    assert "None" not in Page(html).text and "nan" not in Page(html).text.split()


def test_settings_of_one_task_are_told_apart_by_what_differs():
    analysis = analyse_records(pairs(1.0, warmup=7.0) + pairs(1.0, warmup=9.0), None)
    assert sorted(View(analysis, Words("en")).labels.values()) == ["imdb (warmup=7.0)", "imdb (warmup=9.0)"]


def test_chinese_is_chinese_and_has_the_same_numbers(study):
    chinese, english = write_report(study, "zh"), write_report(study)
    assert chinese.html.name == "report.zh.html" and chinese.markdown.name == "report.zh.md"
    pages = [Page(w.html.read_text(encoding="utf-8")) for w in (chinese, english)]
    assert ("html", "lang", "zh-CN") in pages[0].attributes
    for words in ("Results", "interval", "Warnings", "verdict", "learning rate"):
        assert words not in " ".join(pages[0].by_tag["h2"] + pages[0].by_tag["th"] + pages[0].by_tag["text"])
    for tag in ("td", "small"):
        found = [sorted(re.findall(r"[+−]?\d+\.\d+", " ".join(p.by_tag[tag]))) for p in pages]
        assert found[0] == found[1]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "method",
    ["oelm", "train-then-freeze-plain-x", "a-method-with-a-very-long-name-that-nobody-would-type (gain=2.0)"],
)
def test_the_summary_fits_a_terminal(method, lang):
    records = pairs(-12.3, spread=30.0) + pairs(1.0, task="tinystories", base=12345.6)
    if method != "oelm":
        chosen = MethodConfig(name=method, freeze={"q": "all"})
        records = [
            replace(r, config=replace(r.config, method=chosen)) if r.method == "oelm" else r for r in records
        ]
    text = summary(analyse_records(records, None), lang)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "baseline" in text and method[:30] in text  # no word of a name is broken but a longer one


@pytest.mark.parametrize("model", ["gpt-medium-512", "gpt-tiny"])
def test_a_run_of_an_experiment_always_has_the_published_figure_beside_it(model):
    records = [run("baseline", 1, 5.0, task="tinystories", model=model, results={"experiment": "M512-GPT"})]
    analysis = analyse_records(records, None)
    text, (setting,) = summary(analysis), as_plain(analysis)["settings"]
    row = text[text.index("published") :]
    assert "4.14" in row and "M512-GPT: one run" in row and "validation" in row
    found = setting["published"]["M512-GPT"]
    assert (found["value"], found["split"]) == (4.14, "validation")
    assert ("model.name" in found["differs_in"]) == (model == "gpt-tiny")
    assert len(found["differs_in"]) > MOST_KEYS and "training.steps" in found["differs_in"]
    assert ("GPT-01" in setting["published"]) == (model == "gpt-medium-512")
    assert build(View(analysis, Words("en")), "x").subtitle.startswith("1 run: ")


def test_the_command_writes_prints_and_answers_in_json(study):
    result = CliRunner().invoke(app, ["report", str(study)])
    assert result.exit_code == 0 and "On imdb, " in result.output
    assert result.output.rstrip().endswith("report.html\nnext     open the page in a browser")
    result = CliRunner().invoke(app, ["report", str(study), "--json"])
    values = json.loads(result.stdout)
    analysis = analyse(study)
    found = analysis.comparisons[0].overall
    assert values["comparisons"][0]["overall"]["mean"] == found.mean
    assert {"low", "high", "p", "df", "share_items"} <= values["comparisons"][0]["overall"].keys()
    assert values["settings"][0]["arms"][1]["test"] == analysis.groups[0].arms["oelm"].values
    assert [claim["id"] for claim in values["claims"]] == ["C1", "C8", "C9"]  # what the study is about
    assert {warning["kind"] for warning in values["warnings"]} >= {"trivial", "run"}


def test_json_has_no_number_that_json_does_not_know():
    records = pairs(1.0, task="tinystories")
    records[0].results["best"]["metrics"]["perplexity"] = float("inf")
    records[0].results["peak_memory_bytes"] = float("nan")
    json.dumps(as_plain(analyse_records(records, None)), allow_nan=False)


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: None, lambda p: p.write_text("x")])
def test_a_folder_without_runs_is_refused(tmp_path, make):
    make(tmp_path / "empty")
    with pytest.raises(UserError, match="empty"):
        write_report(tmp_path / "empty")


def test_a_folder_without_runs_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "oelm", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"oelm: {tmp_path} holds no run that has ended\n"


def test_a_folder_above_studies_is_refused_with_their_names(tmp_path):
    studies = [make_study(tmp_path / name, lrs=(3e-4,), seeds=1) for name in ("a", "b")]
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "study.toml").write_text("")  # without runs it is nothing to report on
    with pytest.raises(UserError, match=f"report on {studies[0]} or {studies[1]}$"):
        write_report(tmp_path)
    assert not (tmp_path / "report.md").exists()
    assert write_report(studies[0]).analysis.study is not None


def test_runs_that_were_interrupted_have_not_ended(tmp_path):
    stopped = {"status": "interrupted", "reason": "told to stop", "best": None, "test": None}
    copy_run(tmp_path / "s" / "a", "baseline", "imdb", 3e-4, 1, 0.8, results=stopped)
    with pytest.raises(UserError, match=r"s holds no run that has ended$"):
        write_report(tmp_path / "s")
    copy_run(tmp_path / "s" / "b", "baseline", "imdb", 3e-4, 2, 0.8, results=stopped | {"status": "failed"})
    assert "every run that has ended is of baseline" in summary(write_report(tmp_path / "s").analysis)


def test_five_hundred_runs_are_reported_within_ten_seconds(tmp_path):
    """Seconds of work, Python's start included: what other processes take meanwhile is not counted."""
    out = make_study(
        tmp_path / "s", ("baseline", "oelm", "oelm-random", "oelm-gaussian"),
        ("imdb", "ag_news", "sst2", "qnli", "rte"), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), 20, items=1000,
    )  # fmt: skip
    assert len(list(out.rglob("results.json"))) == 500

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    command = [sys.executable, "-m", "oelm", "report", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert spent() - before < 10
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    assert "500 runs" in page.text and page.tags.count("svg") <= 20


@pytest.mark.parametrize(
    ("value", "digits", "text"), [(1.25, 1, "+1.2"), (-0.04, 1, "0.0"), (-3.0, 1, "−3.0"), (None, 1, "–")]
)
def test_signs(value, digits, text):
    assert numbers.signed(value, digits) == text


@pytest.mark.parametrize(
    ("lr", "text"), [(3e-4, "0.0003"), (3e-5, "3e-5"), (1e-4, "0.0001"), (0.01, "0.01"), (None, "–")]
)
def test_rates_are_written_as_people_write_them(lr, text):
    assert numbers.learning_rate(lr) == text


@pytest.mark.parametrize(
    ("p", "text"), [(0.0004, "<0.001"), (0.0123, "0.012"), (0.65, "0.65"), (1.0, "1.00")]
)
def test_p_values(p, text):
    assert numbers.p_value(p) == text


@pytest.mark.parametrize(("page", "lang"), [("README.md", "en"), ("README.zh-CN.md", "zh")])
def test_the_readme_shows_what_the_records_say(page, lang):
    """The demo's output is a record, and the page is generated from nothing else."""
    root = Path(__file__).parents[2]
    assert summary(analyse(root / "results" / "demo"), lang) in (root / page).read_text(encoding="utf-8")


def test_the_first_page_of_the_docs_quotes_the_demo():
    root = Path(__file__).parents[2]
    answer = summary(analyse(root / "results" / "demo")).partition("\n\n")[2].partition("\nEach")[0]
    quoted = " ".join((root / "docs" / "index.md").read_text(encoding="utf-8").replace("\n> ", "\n").split())
    assert answer and " ".join(answer.split()) in quoted


def test_the_cost_of_a_schedule_says_what_is_frozen_when(tmp_path):
    sizes = {"total": 1000, "trainable": 930, "frozen": 70}
    stages = [{"step": n, "trainable": 1000 - f, "frozen": f} for n, f in ((0, 70), (1200, 50), (1300, 20))]
    for method, more in (("baseline", {}), ("oelm-unfreeze", {"stages": stages})):
        results = {"parameters": sizes | more}
        copy_run(tmp_path / method, method, "imdb", 1e-3, 1, 0.8, results=results)
    for lang, text in (
        ("en", "70 (7.0 %; from step 1,200: 50; from step 1,300: 20)"),
        ("zh", "第 1,200 步起：50；第 1,300 步起：20"),
    ):
        _, markdown = rendered(list(find_records(tmp_path)), lang=lang)
        assert text in markdown and markdown.count("1,200") == 1
