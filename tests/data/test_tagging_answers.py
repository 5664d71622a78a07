"""Token classification and question answering, against what Hugging Face's tokenizers say."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.data import IGNORE, load_task, padded_batch, prepare
from oelm.data.tasks.question_answering import answer_text
from oelm.errors import UserError
from tests.data.made import parquet, sentence

TAGS = ["DT", "NN", "VB"]


def _treebank(folder: Path, rows: int = 60) -> tuple[list[list[str]], list[list[str]]]:
    rng = random.Random(0)
    words = [f"{sentence(rng, 2, 12)} unknownword{i}".split() for i in range(rows)]
    tags = [[rng.choice(TAGS) for _ in row] for row in words]
    parquet(folder / "ptb-pos" / "train.parquet", tokens=words, tags=tags)
    parquet(folder / "ptb-pos" / "test.parquet", tokens=words[:9], tags=tags[:9])
    return words, tags


def test_tags_stand_on_the_first_token_of_each_word(tmp_path: Path, bert: Any, bert_folder: str) -> None:
    words, tags = _treebank(tmp_path)
    store = prepare(load_task("ptb-pos", data_dir=tmp_path), tokenizer=bert_folder, max_length=24)
    assert store.label_names == TAGS
    train = store["train"]
    batch = padded_batch(train, np.arange(len(train)), store.pad_id)
    cut = 0
    for row, ids, found in zip(batch.ids, batch.inputs["input_ids"], batch.targets["labels"], strict=True):
        one = bert(words[row], is_split_into_words=True, truncation=True, max_length=24)
        assert ids[: len(one["input_ids"])].tolist() == one["input_ids"]
        expected, before = [], None
        for word in one.word_ids():
            first = word is not None and word != before
            expected.append(TAGS.index(tags[row][word]) if first else IGNORE)
            before = word
        assert found[: len(expected)].tolist() == expected
        assert (found[len(expected) :] == IGNORE).all()
        cut += len(bert(words[row], is_split_into_words=True)["input_ids"]) > 24
    assert train.meta["truncated"] == cut > 0


def test_words_of_a_byte_level_tokenizer_are_tokenised_as_in_running_text(tmp_path: Path) -> None:
    words, _ = _treebank(tmp_path)
    store = prepare(load_task("ptb-pos", data_dir=tmp_path), tokenizer="train:400")
    train, tokenizer = store["train"], store.tokenizer()
    for item, row in enumerate(train.ids):
        ids = train.tokens[train.offsets[item] : train.offsets[item + 1]]
        tags = train.tags[train.offsets[item] : train.offsets[item + 1]]
        assert ids.tolist() == tokenizer(" ".join(words[row]))["input_ids"]
        assert (tags != IGNORE).sum() == len(words[row]) == train.column("words")[item]


def test_conll_has_numbered_tags(tmp_path: Path, bert_folder: str) -> None:
    rng = random.Random(0)
    for split in ("train", "validation", "test"):
        tokens = [sentence(rng).split() for _ in range(10)]
        tags = [[rng.randrange(9) for _ in row] for row in tokens]
        parquet(tmp_path / "conll2003" / f"{split}.parquet", tokens=tokens, ner_tags=tags)
    store = prepare(load_task("conll2003", data_dir=tmp_path), tokenizer=bert_folder)
    assert store.label_names[:2] == ["O", "B-PER"]
    assert store["train"].tags.max() == 8
    assert [len(split) for split in store.splits.values()] == [10, 10, 10]


@pytest.mark.parametrize(
    ("tags", "said"),
    [([[0, 1]], "row 1: 3 words and 2 tags"), ([[0, 9, 1]], "row 1: tag 9 is not one of 0 to 8")],
)
def test_tags_that_do_not_fit_their_words(
    tmp_path: Path, bert_folder: str, tags: list[list[int]], said: str
) -> None:
    for split in ("train", "validation", "test"):
        parquet(tmp_path / "conll2003" / f"{split}.parquet", tokens=[["a", "b", "c"]], ner_tags=tags)
    with pytest.raises(UserError, match=said):
        prepare(load_task("conll2003", data_dir=tmp_path), tokenizer=bert_folder)


def _squad(folder: Path, rows: int = 40) -> dict[str, list[Any]]:
    rng = random.Random(1)
    made: dict[str, list[Any]] = {"id": [], "question": [], "context": [], "answers": []}
    for i in range(rows):
        words = sentence(rng, 30, 200).split()
        at = rng.randrange(len(words) - 3)
        answer = " ".join(words[at : at + rng.randint(1, 3)])
        context = " ".join(words)
        start = len(" ".join(words[:at])) + (at > 0)
        made["id"].append(f"q{i}")
        made["question"].append(sentence(rng, 3, 8))
        made["context"].append(context)
        made["answers"].append({"text": [answer], "answer_start": [start]})
    for split in ("train", "validation"):
        parquet(folder / "squad" / f"{split}.parquet", **made)
    return made


@pytest.mark.parametrize("tokenizer", ["bert", "train:300"])
def test_every_answer_can_be_read_back_from_its_place(
    tmp_path: Path, bert_folder: str, tokenizer: str
) -> None:
    made = _squad(tmp_path)
    name = bert_folder if tokenizer == "bert" else tokenizer
    store = prepare(load_task("squad", data_dir=tmp_path), tokenizer=name, max_length=96)
    test = store["test"]
    references = test.right_texts()
    assert len(references) == 40
    assert len(test) > 40  # long documents became several windows
    starts, ends = test.column("starts"), test.column("ends")
    found: dict[int, set[str]] = {}
    for item, row in enumerate(test.ids.tolist()):
        if starts[item] > 0:
            text = answer_text(test, item, int(starts[item]), int(ends[item]), references)
            found.setdefault(row, set()).add(text)
    assert found == {row: {made["answers"][row]["text"][0]} for row in range(40)}
    assert test.lengths.max() <= 96
    batch = padded_batch(test, np.arange(4), store.pad_id)
    assert batch.targets["start"].tolist() == starts[:4].tolist()


def test_bert_windows_are_those_of_hugging_face(tmp_path: Path, bert: Any, bert_folder: str) -> None:
    made = _squad(tmp_path)
    store = prepare(load_task("squad", data_dir=tmp_path), tokenizer=bert_folder, max_length=300)
    test = store["test"]
    expected = bert(
        made["question"], made["context"], truncation="only_second", max_length=300, stride=128,
        return_overflowing_tokens=True,
    )  # fmt: skip
    assert [
        test.tokens[test.offsets[i] : test.offsets[i + 1]].tolist() for i in range(len(test))
    ] == expected["input_ids"]
    assert test.ids.tolist() == expected["overflow_to_sample_mapping"]


def test_questions_about_one_document_stay_on_one_side(tmp_path: Path, bert_folder: str) -> None:
    made = _squad(tmp_path, 20)
    many = {name: [value for value in values for _ in range(3)] for name, values in made.items()}
    many["question"] = [f"{question} {i}" for i, question in enumerate(many["question"])]
    parquet(tmp_path / "squad" / "train.parquet", **many)
    store = prepare(load_task("squad", data_dir=tmp_path), tokenizer=bert_folder)
    sides = [{many["context"][row] for row in store[split].ids} for split in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert sides[1]


def test_answers_that_are_not_in_the_document(tmp_path: Path, bert_folder: str) -> None:
    made = _squad(tmp_path, 12)
    made["answers"][3] = {"text": ["elsewhere"], "answer_start": [0]}
    parquet(tmp_path / "squad" / "validation.parquet", **made)
    with pytest.raises(
        UserError, match=r"validation.parquet, row 4: the answer 'elsewhere' does not stand at 0"
    ):
        prepare(load_task("squad", data_dir=tmp_path), tokenizer=bert_folder)
