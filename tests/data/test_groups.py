"""Which items belong together: noted in every store, for every kind of task."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.data import Split, Store, Windows, load_file, load_task, prepare
from tests.data.made import parquet, sentence, write_csv


def _expected(texts: list[str], split: Split) -> list[int]:
    """Numbers of the texts behind a split's items, in the order in which they first appear."""
    number: dict[str, int] = {}
    return [number.setdefault(texts[row], len(number)) for row in split.ids]


def test_equal_texts_share_a_group(tmp_path: Path) -> None:
    texts = [f"{sentence(random.Random(i % 70))} {i % 70}" for i in range(300)]
    rows = [[text, ("no", "yes")[i % 2]] for i, text in enumerate(texts)]
    path = write_csv(tmp_path / "x.csv", ["text", "label"], rows)
    store = prepare(load_file(path), tokenizer="train:300")
    for split in store.splits.values():
        assert split.groups is not None
        assert split.groups.tolist() == _expected(texts, split)
        assert 1 < split.groups.max() < len(split) - 1 and split.groups.min() == 0


def test_pairs_belong_to_their_first_text_and_sources_to_themselves(tmp_path: Path) -> None:
    rng = random.Random(0)
    firsts = [sentence(random.Random(i // 3)) for i in range(120)]
    seconds = [f"{sentence(rng)} {i}" for i in range(120)]
    labels = [("no", "yes")[i % 2] for i in range(120)]
    rows = [list(row) for row in zip(firsts, seconds, labels, strict=True)]
    path = write_csv(tmp_path / "x.csv", ["text", "other", "label"], rows)
    pairs = prepare(load_file(path, text_pair="other"), tokenizer="train:300")
    path = write_csv(tmp_path / "y.csv", ["text", "target"], [row[:2] for row in rows])
    written = prepare(load_file(path, target="target"), tokenizer="train:300")
    for split in [*pairs.splits.values(), *written.splits.values()]:
        assert split.groups is not None and split.groups.tolist() == _expected(firsts, split)
        assert split.groups.max() < len(split) - 1


def test_all_windows_of_the_questions_on_one_document_share_a_group(tmp_path: Path, bert_folder: str) -> None:
    rng = random.Random(0)
    contexts = [f"{sentence(random.Random(i // 4), 60, 120)} the end" for i in range(40)]
    columns: dict[str, list[Any]] = {
        "id": [f"q{i}" for i in range(40)],
        "question": [f"{sentence(rng, 3, 6)} {i}" for i in range(40)],
        "context": contexts,
        "answers": [{"text": ["the end"], "answer_start": [len(text) - 7]} for text in contexts],
    }
    for split in ("train", "validation"):
        parquet(tmp_path / "squad" / f"{split}.parquet", **columns)
    store = prepare(load_task("squad", data_dir=tmp_path), tokenizer=bert_folder, max_length=64)
    for part in store.splits.values():
        assert part.groups is not None and part.groups.tolist() == _expected(contexts, part)
        assert part.groups.max() + 1 < len(set(part.ids.tolist())) < len(part)


def test_a_sentence_with_tags_is_its_own_group(tmp_path: Path, bert_folder: str) -> None:
    words = [f"{sentence(random.Random(i % 30))} {i % 30}".split() for i in range(50)]
    tags = [["NN" for _ in row] for row in words]
    for split in ("train", "test"):
        parquet(tmp_path / "ptb-pos" / f"{split}.parquet", tokens=words, tags=tags)
    test = prepare(load_task("ptb-pos", data_dir=tmp_path), tokenizer=bert_folder)["test"]
    assert test.groups is not None
    assert test.groups.tolist() == [*range(30), *range(20)]


def test_a_window_belongs_to_the_document_of_its_first_target(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [sentence(rng, 1, 80) for _ in range(60)]
    parquet(tmp_path / "tinystories" / "train.parquet", text=[f"{sentence(rng)} {i}" for i in range(300)])
    parquet(tmp_path / "tinystories" / "validation.parquet", text=texts)
    store = prepare(load_task("tinystories", data_dir=tmp_path), tokenizer="train:300")
    windows = Windows(store["test"], 32, whole=False)
    # The boundary after a document still belongs to it: count those that stand before the target.
    ends = np.asarray(store["test"].tokens) == store.tokenizer().eos_token_id
    documents = [int(ends[: 32 * window + 1].sum()) - 1 for window in range(len(windows))]
    groups = windows.groups()
    assert groups is not None and documents[-1] == 59
    number: dict[int, int] = {}
    assert groups.tolist() == [number.setdefault(document, len(number)) for document in documents]
    assert 10 < len(number) < len(windows)


def _wikitext(folder: Path, lines: list[str]) -> Store:
    for split in ("train", "validation", "test"):
        parquet(folder / "wikitext-2-raw" / f"{split}.parquet", text=lines)
    return prepare(load_task("wikitext-2", data_dir=folder), tokenizer="train:300")


def test_a_stream_of_lines_without_titles_is_one_group(tmp_path: Path) -> None:
    store = _wikitext(tmp_path, [sentence(random.Random(i)) + " \n" for i in range(200)])
    windows = Windows(store["test"], 32)
    assert len(windows) > 10 and (windows.groups() == np.zeros(len(windows))).all()


@pytest.mark.parametrize("first", [[" \n"], []])
def test_the_articles_of_a_stream_of_lines_are_groups(tmp_path: Path, first: list[str]) -> None:
    """Only a title between empty lines starts one: sections and formulas do not. No token is added for it."""
    rng = random.Random(0)
    formula = " = 1 rad / s and a nominal impedance k = \n"
    articles = [
        [f" = Title {i} = \n", " \n", f" {sentence(rng, 30, 80)} \n", formula, " \n", " = = Part = = \n",
         " \n", f" {sentence(rng, 30, 80)} \n", " \n"]
        for i in range(20)
    ]  # fmt: skip
    store = _wikitext(tmp_path, [*first, *(line for lines in articles for line in lines)])
    tokenizer, text = store.tokenizer(), "".join(first)
    starts = []
    for lines in articles:
        starts.append(1 + len(tokenizer(text)["input_ids"]))
        text += "".join(lines)
    assert store["test"].tokens.tolist() == [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
    starts[0] = 1  # what is before the first title belongs to it
    assert store["test"].column("documents").tolist() == starts
    assert len(np.unique(Windows(store["test"], 32, whole=False).groups())) == 20
