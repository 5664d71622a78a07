"""Codes and sentences: each code that is raised has its sentence in every language, and none is left over."""

import ast
import json
import re
import string
from pathlib import Path

import pytest

import oelm
from oelm.study.result_types import PROBLEMS
from oelm.system.messages import LANGUAGES, Notice, Span, notice, read_notice, sentences, text_of

# Words that stand in sentences and are looked up by the value of a placeholder.
VOCABULARY = ("list", "split", "metric", "trivial", "recorded", "failure", "dropped", "type", "quantity")


def test_every_code_has_its_sentence_and_every_sentence_its_code():
    told = {key for key in sentences() if key.partition(".")[0] not in VOCABULARY}
    raised = {f"problem.{code}" for code in PROBLEMS}  # the one place where a code is put together
    mentioned = set(raised)
    for path in Path(oelm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                mentioned.add(node.value)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("notice", "Notice"):
                raised |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "code":
                raised |= {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    raised = {code for code in raised if re.fullmatch(r"\w+\.\w+", str(code))}
    assert raised - told == set(), "raised, but not in messages.toml"
    assert told - mentioned == set(), "in messages.toml, but never raised"
    for key in set(sentences()) - told:
        assert {key, key.partition(".")[2]} & mentioned, f"{key} is in messages.toml, but never used"


def test_both_languages_say_the_same():
    for code, texts in sentences().items():
        assert set(texts) == set(LANGUAGES), code
        fields = [
            {name for _, name, _, _ in string.Formatter().parse(texts[lang]) if name is not None}
            for lang in LANGUAGES
        ]
        assert fields[0] == fields[1], code
        around = "".join(text for text, *_ in string.Formatter().parse(texts["zh"]))
        translated = re.search("[一-鿿]", around) or not re.search("[a-z]{2}", texts["en"].partition("{")[0])
        assert translated or code.startswith(("metric.", "trivial.", "recorded.python")), code


@pytest.mark.parametrize(
    ("told", "en", "zh"),
    [
        (
            notice("data.dropped", count=1, why="empty"),
            "1 row dropped: empty texts",
            "舍弃 1 行：空文本",
        ),
        (
            notice("data.dropped", count=12345, why="another"),
            "12,345 rows dropped: another",
            "舍弃 12,345 行：another",
        ),
        (
            notice("data.dropped", count=Span(1, 1200), why="empty"),
            "1–1,200 rows dropped: empty texts",
            "舍弃 1–1,200 行：空文本",
        ),
        (
            notice("data.no_label", split="test", labels=[f"l{n}" for n in range(14)]),
            f"labels that no text of the test split has: {', '.join(f'l{n}' for n in range(12))} and 2 more",
            f"测试集中没有文本的标签：{'、'.join(f'l{n}' for n in range(12))} 等，另有 2 项",
        ),
        (
            notice("checkpoint.use_previous", problem=notice("checkpoint.none_whole")),
            "no checkpoint is complete: the run starts from the beginning; the checkpoint before it is used",
            "没有完整的检查点：运行从头开始；改用它之前的检查点",
        ),
        (notice("study.seeds", method="oelm", seeds=[2]), "oelm with seed 2", "oelm 的种子 2"),
        (notice("study.seeds", method="oelm", seeds=[1, 2]), "oelm with seeds 1, 2", "oelm 的种子 1、2"),
        (notice("study.run", method="oelm", lr=3e-5, seed=1), "oelm, learning rate 3e-5, seed 1", None),
        (notice("run.unsaved", step=1, error="x", checkpoint=None), None, None),
    ],
)
def test_sentences(told, en, zh):
    again = read_notice(json.loads(json.dumps(told.to_dict())))
    for lang, text in (("en", en), ("zh", zh)):
        assert text is None or text_of(told, lang) == text
        if not any(isinstance(value, Span) for value in told.values.values()):
            assert text_of(again, lang) == text_of(told, lang)
    assert str(told) == text_of(told, "en")


@pytest.mark.parametrize(
    "value",
    [
        "an old text {count}", 3, None, ["x"], {"code": 3}, {"code": "data.dropped"},
        {"code": "x", "values": {}},
        {"code": "data.dropped", "values": {"count": "many", "why": "empty"}},
        {"code": "data.dropped", "values": {"count": {"code": "y", "values": {"a": [{}]}}, "why": []}},
        {"code": "data.dropped", "values": {}}, {"code": "text", "values": {}},
    ],
)  # fmt: skip
def test_whatever_a_record_holds_is_shown_as_it_is(value):
    for lang in LANGUAGES:
        text = text_of(read_notice(value), lang)
        assert isinstance(text, str) and text
        if isinstance(value, str):
            assert text == value
    assert isinstance(read_notice(value), Notice)
