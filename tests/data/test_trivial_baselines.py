"""Trivial references: computed from a store alone, on exactly its splits, and kept beside it."""

import json
import math
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data import Store, Windows, load_file, load_task, open_store, prepare
from oelm.data import store as stores
from oelm.data import trivial_baselines as references
from oelm.data.trivial_baselines import CACHE, compute_in_background, second_start, trivial_baselines
from oelm.errors import UserError
from oelm.system.files import locked_folder

GOOD, BAD = ["splendid", "lovely", "bright"], ["dreadful", "awful", "grey"]
PLAIN = ["film", "story", "actor", "music", "ending", "scene", "plot"]


def _table(path: Path, **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _review(rng: random.Random, good: bool) -> str:
    words = [rng.choice(PLAIN) for _ in range(6)] + [rng.choice(GOOD if good else BAD)]
    rng.shuffle(words)
    return " ".join(words)


def _reviews(folder: Path, **options: Any) -> Store:
    """Texts whose class one word gives away; two in three are good."""
    rng = random.Random(0)
    rows = [(i % 3 > 0, f"{_review(rng, i % 3 > 0)} {i}") for i in range(300)]
    _table(folder / "r.parquet", text=[t for _, t in rows], label=["good" if g else "bad" for g, _ in rows])
    return prepare(load_file(folder / "r.parquet"), tokenizer="train:400", cache=folder / "cache", **options)


def _pairs(folder: Path, tokenizer: str = "train:400") -> Store:
    """Pairs whose second text alone gives the class away; the first only says the contrary at random."""
    rng = random.Random(1)
    rows = [(_review(rng, rng.random() < 0.5), f"{_review(rng, i % 2 > 0)} {i}", i % 2) for i in range(400)]
    one, two, label = ([row[k] for row in rows] for k in range(3))
    _table(folder / "p.parquet", a=one, b=two, label=label)
    data = load_file(folder / "p.parquet", text="a", text_pair="b")
    return prepare(data, tokenizer=tokenizer, cache=folder / "cache")


def _corpus(folder: Path) -> Store:
    rng = random.Random(2)
    for split, size in (("train", 200), ("validation", 31), ("test", 17)):
        _table(folder / "wikitext-2-raw" / f"{split}.parquet", text=[_review(rng, True) for _ in range(size)])
    return prepare(load_task("wikitext-2", data_dir=folder), tokenizer="train:300", cache=folder / "cache")


def _bert(folder: Path) -> str:
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *GOOD, *BAD, *PLAIN])}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder / "bert")
    return str(folder / "bert")


def test_a_text_classifier_has_its_majority_and_a_linear_reference(tmp_path: Path) -> None:
    store = _reviews(tmp_path)
    found = trivial_baselines(store)
    assert set(found) == {"majority", "tfidf_logreg"}
    for split in ("validation", "test"):
        share = (store[split].labels == 1).mean()
        assert found["majority"][split]["accuracy"] == pytest.approx(share)
        assert found["majority"][split]["f1_macro"] == pytest.approx(share / (1 + share))
        assert set(found["majority"][split]) == {"accuracy", "f1_macro", "f1_weighted"}
        assert found["tfidf_logreg"][split]["accuracy"] == 1
        assert found["tfidf_logreg"][split]["trained_on"] == len(store["train"])


def test_a_store_copied_elsewhere_gives_the_same(tmp_path: Path) -> None:
    store = _reviews(tmp_path)
    shutil.copytree(store.folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "cache", ignore_errors=False)
    (tmp_path / "r.parquet").unlink()
    copy = open_store(tmp_path / "copy")
    first = trivial_baselines(copy)
    (copy.folder / CACHE).unlink()
    assert trivial_baselines(copy) == first


@pytest.mark.parametrize("kind", ["bpe", "bert"])
def test_pairs_have_a_premise_blind_reference(tmp_path: Path, kind: str) -> None:
    store = _pairs(tmp_path, _bert(tmp_path) if kind == "bert" else "train:400")
    assert (store["test"].second is not None) == (kind == "bert")
    found = trivial_baselines(store)
    assert set(found) == {"majority", "tfidf_logreg", "premise_blind"}
    assert found["premise_blind"]["test"]["accuracy"] == 1
    assert found["tfidf_logreg"]["test"]["accuracy"] < 1


def test_texts_come_back_from_the_tokens(tmp_path: Path) -> None:
    rows = pyarrow.parquet.read_table
    store = _pairs(tmp_path)
    table = rows(tmp_path / "p.parquet").to_pydict()
    reader, split = references.StoreTexts(store), store["test"]
    both = list(reader.read(split, np.arange(len(split)), blind=False))
    blind = list(reader.read(split, np.arange(len(split)), blind=True))
    assert [text.strip() for text in blind] == [table["b"][i] for i in split.ids]
    whole = [" ".join(text.split()) for text in both]
    assert whole == [f"{table['a'][i]} [SEP] {table['b'][i]}" for i in split.ids]


texts = st.lists(st.integers(0, 3), max_size=5)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=8), st.lists(st.integers(2, 4), min_size=1))
def test_the_second_text_starts_after_the_first_joiner(
    pairs: list[tuple[list[int], list[int]]], joiner: list[int]
) -> None:
    items = [[*a, *joiner, *b] for a, b in pairs]
    starts = [second_start(item, joiner) for item in items]
    size = len(joiner)
    expected = [
        next(i + size for i in range(len(item) - size + 1) if item[i : i + size] == joiner) for item in items
    ]
    assert starts == expected


def test_a_pair_without_a_joiner_has_no_second_text() -> None:
    assert second_start([1, 7], [7, 8]) == 2


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_unigram_reference_counts_what_an_evaluation_counts(tmp_path: Path, size: int) -> None:
    store = _corpus(tmp_path)
    train = Counter(np.asarray(store["train"].tokens[1:]).tolist())
    total = train.total() + store.vocab_size
    scores = trivial_baselines(store)["unigram"]["test"]
    windows = Windows(store["test"], size, whole=False)
    targets = windows.batch(np.arange(len(windows))).targets["labels"].numpy()
    costs = [-math.log((train[token] + 1) / total) for token in targets[targets >= 0].tolist()]
    assert scores["loss"] == pytest.approx(np.mean(costs))
    assert scores["perplexity"] == pytest.approx(math.exp(np.mean(costs)))
    assert scores["bits_per_byte"] == pytest.approx(sum(costs) / math.log(2) / store["test"].bytes)


def test_counting_in_blocks_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _corpus(tmp_path)
    expected = trivial_baselines(store)
    (store.folder / CACHE).unlink()
    monkeypatch.setattr(stores, "COUNTED", 5)
    assert trivial_baselines(store) == expected


def test_the_most_frequent_tag_of_each_word(tmp_path: Path) -> None:
    folder = tmp_path / "conll2003"  # 0 = O, 1 = B-PER, 5 = B-LOC
    _table(
        folder / "train.parquet",
        tokens=[["ann", "ran"], ["ann", "sat"], ["rome"]],
        ner_tags=[[5, 0], [1, 0], [5]],
    )
    for split in ("validation", "test"):
        _table(folder / f"{split}.parquet", tokens=[["ann", "ran"], ["bob"]], ner_tags=[[1, 0], [1]])
    data = load_task("conll2003", data_dir=tmp_path)
    store = prepare(data, tokenizer="train:600", cache=tmp_path / "cache")
    scores = trivial_baselines(store)["most_frequent_tag"]["test"]
    assert scores["token_accuracy"] == pytest.approx(2 / 3)
    assert scores["entity_precision"] == 1  # ann is B-PER as often as B-LOC: the first of them
    assert (
        scores["entity_recall"] == 1 / 2
    )  # bob's first piece was never seen: O, the first of the two commonest


def test_the_cache_is_used_and_replaced_by_a_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _corpus(tmp_path)
    both = trivial_baselines(store)
    assert set(both["unigram"]) == {"validation", "test"}
    assert trivial_baselines(store, ["test"]) == {"unigram": {"test": both["unigram"]["test"]}}

    path = store.folder / CACHE
    shutil.move(store.folder / "train.tokens.npy", tmp_path)
    assert trivial_baselines(store) == both  # read, not computed
    shutil.move(tmp_path / "train.tokens.npy", store.folder)
    kept = json.loads(path.read_text())
    kept["references"]["unigram"]["test"]["loss"] = -1.0
    path.write_text(json.dumps(kept))
    assert trivial_baselines(store) == both  # what was changed on disk is computed again
    monkeypatch.setattr(references, "VERSION", references.VERSION + 1)
    assert trivial_baselines(store) == both
    for broken in ("", "[]", "{", '{"version": 2}'):
        path.write_text(broken)
        assert trivial_baselines(store) == both
    assert [file.name for file in store.folder.glob("references*")] == [CACHE]


def test_another_process_computes_them_once_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _corpus(tmp_path)
    with locked_folder(store.folder):  # it has to wait, too
        compute_in_background(store)
        time.sleep(0.2)
        assert not (store.folder / CACHE).exists()
    assert references._COMPUTING.pop().wait(120) == 0
    monkeypatch.setattr(references, "_compute", lambda *given: pytest.fail("it is there"))
    assert trivial_baselines(store)["unigram"]["test"]["perplexity"] > 1
    monkeypatch.setattr(references.subprocess, "Popen", lambda *given, **options: pytest.fail("it is there"))
    compute_in_background(store)


def test_a_store_that_cannot_be_written_to_is_fine(tmp_path: Path) -> None:
    store = _corpus(tmp_path)
    (store.folder / CACHE).mkdir()  # refuses root too, unlike a folder without write permission
    store.folder.chmod(0o555)
    try:
        assert trivial_baselines(store)["unigram"]
    finally:
        store.folder.chmod(0o755)
    assert [file.name for file in store.folder.glob("references*")] == [CACHE]


def test_without_scikit_learn_the_linear_references_are_absent_and_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _reviews(tmp_path)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "sklearn", None)
        assert set(trivial_baselines(store)) == {"majority"}
    assert set(trivial_baselines(store)) == {"majority", "tfidf_logreg"}


def test_texts_without_words_have_only_a_majority(tmp_path: Path) -> None:
    _table(tmp_path / "x.parquet", text=[f"! {'?' * i}" for i in range(40)], label=[i % 2 for i in range(40)])
    store = prepare(load_file(tmp_path / "x.parquet"), tokenizer="train:300", cache=tmp_path / "cache")
    assert set(trivial_baselines(store)) == {"majority"}


def test_a_large_train_split_is_sampled_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _reviews(tmp_path)
    monkeypatch.setattr(references, "MOST_TEXTS", 100)
    found = trivial_baselines(store)["tfidf_logreg"]["test"]
    assert found["trained_on"] == 100
    (store.folder / CACHE).unlink()
    assert trivial_baselines(store)["tfidf_logreg"]["test"] == found


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 100), st.integers(50, 3000))
def test_the_sample_keeps_to_both_bounds(lengths: list[int], texts: int, tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "MOST_TEXTS", texts)
        patch.setattr(references, "MOST_TOKENS", tokens)
        items = references.training_items(np.array(lengths))
    assert 1 <= len(items) <= texts
    assert np.array(lengths)[items].sum() <= tokens
    assert len(np.unique(items)) == len(items)
    if len(lengths) <= texts and sum(lengths) <= tokens:
        assert items.tolist() == list(range(len(lengths)))


def test_questions_have_no_reference_and_unknown_splits_are_refused(tmp_path: Path) -> None:
    contexts = [f"Ann number {i} lives in Rome." for i in range(40)]
    answers = [{"text": ["Rome"], "answer_start": [c.index("Rome")]} for c in contexts]
    rows = {"id": [str(i) for i in range(40)], "question": ["Where?"] * 40, "context": contexts}
    _table(tmp_path / "squad" / "train.parquet", **rows, answers=answers)
    others = {**rows, "context": [c.replace("Ann", "Bob") for c in contexts]}
    _table(tmp_path / "squad" / "validation.parquet", **others, answers=answers)
    data = load_task("squad", data_dir=tmp_path)
    store = prepare(data, tokenizer="train:300", max_length=64, cache=tmp_path / "cache")
    assert trivial_baselines(store) == {}
    with pytest.raises(UserError, match="no split 'dev'"):
        trivial_baselines(store, ["dev"])


def _real(name: str, tokenizer: Path, folder: Path, data: Path, **options: Any) -> Store:
    return prepare(load_task(name, data_dir=data, **options), tokenizer=str(tokenizer), cache=folder)


def test_a_sample_of_real_reviews_is_told_apart(data_dir: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    store = _real("sst2", tokenizer_dir / "gpt2", tmp_path, data_dir, train_size=4000)
    found = trivial_baselines(store)
    assert found["majority"]["test"]["accuracy"] == pytest.approx(444 / 872)
    assert found["tfidf_logreg"]["test"]["accuracy"] > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["gpt2", "bert-base-uncased"])
@pytest.mark.parametrize(
    ("task", "reference", "measured"),
    [
        ("sst2", "tfidf_logreg", 0.8257),
        ("ag_news", "tfidf_logreg", 0.9130),
        ("snli", "premise_blind", 0.6274),
    ],
)
def test_real_tasks_reach_the_figures_measured_on_their_texts(
    data_dir: Path,
    tokenizer_dir: Path,
    tmp_path: Path,
    task: str,
    reference: str,
    measured: float,
    tokenizer: str,
) -> None:
    """Measured while planning, from the sources' texts and (but for snli) without a held-out part."""
    store = _real(task, tokenizer_dir / tokenizer, tmp_path, data_dir)
    assert trivial_baselines(store)[reference]["test"]["accuracy"] == pytest.approx(measured, abs=0.012)
