"""The words of a report: each is used, and each fact is told by the same words everywhere."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import oelm
from oelm.claims.data import claim_data
from oelm.claims.verdicts import judge
from oelm.config import read_toml
from oelm.study.analysis import analyse, analyse_records
from oelm.study.design import shipped_studies, title_in
from oelm.study.report.answer import answer
from oelm.study.report.build import build
from oelm.study.report.document import to_markdown
from oelm.study.report.notices import notices
from oelm.study.report.numbers import with_minus
from oelm.study.report.view import View, Words
from oelm.system.messages import LANGUAGES, read_sentences
from tests.claims.claim_records import BERT, UNRECORDED, pairs, run

PACKAGE = Path(oelm.__file__).parent


def test_every_text_is_used():
    """By its key, or by a key that is put together from strings of the code."""
    strings, patterns = set(), []
    for template in PACKAGE.rglob("*.j2"):
        text = template.read_text(encoding="utf-8")
        strings |= set(re.findall(r"[\w.]+", text))
        patterns += [rf"{re.escape(start)}(.+)" for start in re.findall(r'words\("([\w.]+)" ~', text)]
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                strings.add(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = (re.escape(p.value) if isinstance(p, ast.Constant) else "(.+)" for p in node.values)
                patterns.append("".join(parts))
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "name":
                patterns += [rf"{p.value}\.(.+)" for p in node.args[:1] if isinstance(p, ast.Constant)]
    for key in read_sentences((PACKAGE / "study" / "report" / "words.toml").read_text(encoding="utf-8")):
        made = (re.fullmatch(pattern, key) for pattern in patterns if not pattern.startswith("("))
        assert key in strings or any(found and strings.issuperset(found.groups()) for found in made), key


def test_claims_are_named_as_by_their_own_command():
    records = [*pairs(0.0), *pairs(-8.0, task="tinystories"), *pairs(0.0, task="sst2", model=BERT)]
    analysis = analyse_records(records, None)
    units = set()
    for place, lang in enumerate(LANGUAGES):
        words = Words(lang)
        text = to_markdown(build(View(analysis, words), "somewhere"), words, "report.html")
        for verdict in judge([analysis]):
            name = claim_data()["verdicts"][verdict.verdict][place]
            assert not verdict.details or re.search(f"{verdict.id}[:：] ?{name}", text)
            if verdict.details and verdict.number is not None:
                assert f" {claim_data()['units'][verdict.unit][place]}" in text
                units.add(verdict.unit)
    assert "settings" in units and "points" in units


def test_pairs_without_scores_of_items_are_told_by_their_mean():
    analysis = analyse_records([replace(record, folder=UNRECORDED) for record in pairs(5.0)], None)
    text = answer(View(analysis, Words("en")))[0]
    assert "or scores that differ from results.json; measured so far: +5.0 points, n = 5" in text


def test_shipped_studies_have_a_title_in_chinese():
    for file in shipped_studies().values():
        values = read_toml(str(file))
        assert re.search("[一-鿿]", title_in("zh", values["title"])), file
        assert title_in("en", values["title"]) == values["title"]
    assert title_in("zh", "mine") == "mine"


def test_one_style_of_numbers():
    assert with_minus("-0.55 to +1.81 points, lr 1e-3, GPT-02, 2024-05-01, (-3)") == (
        "−0.55 to +1.81 points, lr 1e-3, GPT-02, 2024-05-01, (−3)"
    )
    view = View(analyse(PACKAGE.parents[1] / "results" / "demo"), Words("en"))
    merged = "0.9–1.1 % of the train, validation, test items are cut at 64 tokens (38 runs)"
    assert [listed.text for listed in notices(view)][-1] == f"movie-reviews.csv: {merged}"


def test_chinese_has_one_word_for_one_thing_and_full_width_marks():
    texts = "".join(
        (PACKAGE / path).read_text() for path in ("study/report/words.toml", "system/messages.toml")
    )
    page = (PACKAGE.parents[1] / "README.zh-CN.md").read_text()
    assert "简单参照" in texts and "简单参照" in page
    assert "简单基线" not in texts + page and "对照方法" not in texts + page
    records = [
        run("oelm", seed, 0.8, environment={"numerics": seed, "commit": f"c{seed}"}) for seed in (1, 2)
    ]
    for lang, names in {"zh": ("数值版本", "提交"), "en": ("numerics version", "commit")}.items():
        view = View(analyse_records(records, None), Words(lang))
        told = [entry.text for entry in notices(view) if entry.kind == "mixture"]
        assert len(told) == 2 and all(any(name in text for text in told) for name in names), told
        assert lang == "en" or not any(", " in text for text in told)


def test_verdicts_are_named_the_same_in_the_answer_and_in_the_table():
    records = pairs(5.0, task="imdb") + pairs(0.0, n=3, spread=3.0, task="ag_news") + pairs(5.0, task="sst2")
    analysis = analyse_records(records, None)
    for lang in LANGUAGES:
        words = Words(lang)
        told = answer(View(analysis, words))[0]
        for comparison in analysis.comparisons:
            assert words(f"verdict.{comparison.verdict}") in told
