"""Files in SQuAD's and CoNLL's shapes: read as the hub's tables are, or refused in a line that is right."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.data import load_file, prepare
from oelm.errors import UserError
from tests.data.made import parquet, sentence, write_csv, write_jsonl

TAGS = ("O", "B-PER", "I-PER", "B-LOC")


def questions(rows: int = 60) -> list[dict[str, Any]]:
    """Two questions about each document, the answers words of it; one question of ten has none."""
    rng = random.Random(2)
    made = []
    for i in range(rows):
        context = f"{sentence(rng, 12, 30)} {i // 2}" if i % 2 == 0 else made[-1]["context"]
        word = rng.choice(context.split())
        found = {"text": [word], "answer_start": [context.index(word)]}
        none: dict[str, list[Any]] = {"text": [], "answer_start": []}
        right = none if i % 10 == 9 else found
        made.append({"question": f"{sentence(rng, 3, 6)} {i}", "context": context, "answers": right})
    return made


def squad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The same questions in the form of SQuAD's own files."""
    documents: dict[str, list[dict[str, Any]]] = {}
    for i, row in enumerate(rows):
        pairs = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
        documents.setdefault(row["context"], []).append(
            {"id": f"q{i}", "question": row["question"], "answers": answers, "is_impossible": not answers}
        )
    paragraphs = [{"context": context, "qas": asked} for context, asked in documents.items()]
    return {"version": "1.1", "data": [{"title": "A", "paragraphs": paragraphs[:9]},
                                       {"title": "B", "paragraphs": paragraphs[9:]}]}  # fmt: skip


def conll(rows: int = 60) -> tuple[str, list[list[str]], list[list[str]]]:
    """A file of four columns with documents, and its sentences and tags."""
    rng = random.Random(3)
    words = [[*sentence(rng, 2, 9).split(), f"n{i}"] for i in range(rows)]
    tags = [[rng.choice(TAGS) for _ in row] for row in words]
    text = "-DOCSTART- -X- -X- O\n\n"
    for i, (row, named) in enumerate(zip(words, tags, strict=True)):
        text += "".join(f"{word} NN B-NP {tag}\n" for word, tag in zip(row, named, strict=True)) + "\n"
        text += "-DOCSTART- -X- -X- O\n\n\n" if i % 20 == 9 else ""
    return text.rstrip("\n"), words, tags


def contents(path: Path, kind: str, tokenizer: str) -> dict[str, dict[str, list[Any]]]:
    """Every column of every split of the prepared file."""
    store = prepare(load_file(path, kind=kind), tokenizer=tokenizer, max_length=48)
    files = sorted(path for path in store.folder.iterdir() if path.suffix == ".npy")
    return {file.name: np.load(file).tolist() for file in files} | {"labels": store.label_names}


def test_squads_own_form_and_the_hubs_are_one(tmp_path: Path, bert_folder: str) -> None:
    rows = questions()
    nested = tmp_path / "a.json"
    nested.write_text(json.dumps(squad(rows)), encoding="utf-8")
    flat = {
        "jsonl": write_jsonl(tmp_path / "b.jsonl", rows),
        "parquet": parquet(tmp_path / "c.parquet", **{key: [row[key] for row in rows] for key in rows[0]}),
        "list": tmp_path / "d.json",
        "data": tmp_path / "e.json",
    }
    flat["list"].write_text(json.dumps(rows))
    flat["data"].write_text(json.dumps({"data": rows}))
    expected = contents(nested, "question-answering", bert_folder)
    assert len(expected["train.ids.npy"]) >= 40
    for path in flat.values():
        assert contents(path, "question-answering", bert_folder) == expected, path


def test_a_documents_questions_stay_in_one_split(tmp_path: Path, bert_folder: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", questions())
    store = prepare(load_file(path, kind="question-answering"), tokenizer=bert_folder, max_length=48)
    split_of = {i: name for name, split in store.splits.items() for i in split.ids.tolist()}
    assert sorted(split_of) == list(range(60)) and len(set(split_of.values())) == 3
    assert all(split_of[i] == split_of[i + 1] for i in range(0, 60, 2))


@pytest.mark.parametrize("name", ["a.conll", "a.txt"])
def test_conlls_columns_and_a_table_are_one(tmp_path: Path, bert_folder: str, name: str) -> None:
    text, words, tags = conll()
    (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "tabs.conll").write_text(text.replace(" ", "\t").replace("\n", "\r\n"), encoding="utf-8")
    table = parquet(tmp_path / "b.parquet", tokens=words, tags=tags)
    expected = contents(table, "token-classification", bert_folder)
    assert expected["labels"] == sorted(TAGS)
    for path in (tmp_path / name, tmp_path / "tabs.conll"):
        assert contents(path, "token-classification", bert_folder) == expected


def test_numbered_tags_of_named_columns(tmp_path: Path, bert_folder: str) -> None:
    _, words, tags = conll()
    numbers = [[TAGS.index(tag) for tag in row] for row in tags]
    path = parquet(tmp_path / "a.parquet", words=words, ner=numbers)
    data = load_file(path, kind="token-classification", text="words", label="ner", metric="entity_f1")
    assert data.label_names == ["0", "1", "2", "3"] and data.metric == "entity_f1"
    flat = np.concatenate(
        [split.tags[split.tags >= 0] for split in prepare(data, tokenizer=bert_folder).splits.values()]
    )
    assert np.bincount(flat).tolist() == [sum(row.count(i) for row in numbers) for i in range(4)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.conll", "a O\nb B-X\nc\n", "line 3: 1 columns; the first line has 2"),
        ("a.conll", "a\nb\n", "line 1: 1 columns; a word and its tag were expected"),
        ("a.conll", "\n\n-DOCSTART- O\n", "has no rows"),
        ("a.jsonl", '{"tokens": "a b", "tags": ["O"]}\n', "row 1: tagging needs a list of words"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [["O"]]}\n', "row 1: tagging needs a list of words"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["O", 1]}\n', "tags must all be words, or all numbers"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [5000]}\n', "numbers from 0 to 999"),
        ("a.jsonl", '{"words": ["a"], "tags": [0]}\n', "has no 'tokens'"),
    ],
)
def test_what_is_not_tagged_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        load_file(tmp_path / name, kind="token-classification")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON: .*one object per line, name the file .jsonl"),
        ('{"data": 3}', "a list of objects"),
        ("[1]", "a list of objects"),
        ('{"data": [{"paragraphs": [{"context": "a", "questions": []}]}]}', "SQuAD's form is .*'qas'"),
        ('[{"question": "a", "context": "b"}]', "row 1 has no 'answers'; it has: question, context"),
        ("[]", "has no rows"),
    ],
)
def test_what_is_no_list_of_questions_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=said):
        load_file(tmp_path / "a.json", kind="question-answering")


def test_an_answer_that_does_not_stand_there_is_refused(tmp_path: Path, bert_folder: str) -> None:
    rows = questions()
    rows[3]["answers"] = {"text": ["nowhere"], "answer_start": [0]}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match="row 4: the answer 'nowhere' does not stand at 0"):
        prepare(load_file(path, kind="question-answering"), tokenizer=bert_folder)


def test_columns_that_the_kind_does_not_have_are_refused(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["text", "label"], [["a", "b"]])
    with pytest.raises(UserError, match="reads the columns question, context and answers"):
        load_file(path, kind="question-answering", label="topic")
    with pytest.raises(UserError, match="text_pair does not go with it"):
        load_file(path, kind="token-classification", text_pair="other")
