"""The catalogue: the real sets where they are, and every other schema on files made here."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.data import TASKS, Choice, Plan, Store, Windows, load_task, packed_batch, padded_batch, prepare
from oelm.data.catalogue import HELD_OUT
from oelm.data.checks import describe, render
from oelm.data.dataset import Dataset
from oelm.data.sources import HubSource
from oelm.data.tokenizer import load_tokenizer, train_tokenizer
from oelm.data.writer import copy_store
from oelm.errors import UserError
from tests.data.made import parquet, sentence, split_sizes

# Rows of the shared folder's README, as our splits take them.
SIZES = {
    "imdb": (22_500, 2_500, 25_000),
    "ag_news": (45_603, 5_067, 7_600),
    "snli": (99_890, 9_842, 9_824),
    "xnli": (12_022, 2_490, 5_010),
    "sst2": (None, None, 872),
    "mnli": (None, None, 9_815),
    "ptb-pos": (3_831, 426, 474),
}


def _check_batches(store: Store) -> None:
    """Every item of every split comes once, padded and packed alike."""
    for split in store.splits.values():
        batches = Plan(split.lengths, batch_tokens=16_384, seed=1).epoch(0)
        seen = [padded_batch(split, batches.batch(step), store.pad_id) for step in range(0, len(batches), 7)]
        for k, batch in enumerate(seen):
            flat = packed_batch(split, batches.batch(7 * k))
            real = batch.inputs["attention_mask"].bool()
            assert batch.inputs["input_ids"][real].tolist() == flat.inputs["input_ids"][0].tolist()
        assert sorted(batches.order.tolist()) == list(range(len(split)))
        assert len(split) == len(split.ids)
    report = describe(store)
    assert {name: split["items"] for name, split in report["splits"].items()} == {
        name: len(split) for name, split in store.splits.items()
    }
    assert store.task in render(report)


@pytest.mark.parametrize("name", sorted(SIZES))
def test_the_real_sets_load_and_are_batched(name: str, data_dir: Path) -> None:
    """Tokenised with a small trained vocabulary where the set is large: the sizes are what is asked."""
    size = 2_000 if name in ("imdb", "ag_news", "snli", "sst2") else None
    full = load_task(name, data_dir=data_dir)
    for found, expected in zip(split_sizes(full).values(), SIZES[name], strict=True):
        assert expected in (None, found)
    data = load_task(name, data_dir=data_dir, train_size=size) if size else full
    assert {k: v for k, v in split_sizes(data).items() if k != "train"} == {
        k: v for k, v in split_sizes(full).items() if k != "train"
    }
    if name != "imdb":  # its 25,000 long test texts are tokenised in the benchmark and in the test below
        _check_batches(prepare(data, tokenizer="train:1024", max_length=128))


def test_imdb_with_the_real_tokenizer(data_dir: Path, tokenizer_dir: Path) -> None:
    data = load_task("imdb", data_dir=data_dir, train_size=500)
    for part in data.parts:  # a tenth of the test texts, for time
        part.split[(part.split > 0) & (np.arange(len(part.split)) % 10 > 0)] = -1
    store = prepare(data, tokenizer=str(tokenizer_dir / "gpt2"), max_length=512)
    _check_batches(store)
    assert store["train"].meta["class_counts"] == [250, 250]
    assert store["train"].tokens.dtype == np.uint16
    assert 0.08 < store["test"].meta["truncated"] / len(store["test"]) < 0.2


def test_imdb_texts_in_train_and_test_are_counted(data_dir: Path) -> None:
    found = load_task("imdb", data_dir=data_dir).duplicates
    assert found["train/test"] + found["validation/test"] == 123
    assert found["train/validation"] == 0


def test_sst2_is_held_out_by_sentence(data_dir: Path) -> None:
    data = load_task("sst2", data_dir=data_dir)
    sizes = split_sizes(data)
    assert 0.07 < sizes["validation"] / 67_349 < 0.13
    assert data.dropped["mixed_phrases"] < 2_500
    part = data.parts[0]
    texts = [" ".join(text.split()) for _, chunk in part.rows() for text in chunk["text"]]
    train = {text for text, code in zip(texts, part.split, strict=True) if code == 0}
    held = {text for text, code in zip(texts, part.split, strict=True) if code == 1}
    for one, other in ((train, held), (held, train)):
        assert not {part for text in one for part in _parts(text)} & other
    balance = [part.labels[part.split == code].mean() for code in (0, 1)]
    assert balance[0] == pytest.approx(balance[1], abs=0.03)


def _parts(text: str) -> set[str]:
    words = text.split()
    return {" ".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def test_mnli_premises_stay_on_one_side(data_dir: Path) -> None:
    data = load_task("mnli", data_dir=data_dir)
    part = data.parts[0]
    assert not set(part.groups[part.split == 0]) & set(part.groups[part.split == 1])
    assert split_sizes(data)["validation"] == pytest.approx(0.05 * 12_022, rel=0.1)


def test_xnli_trains_on_what_is_named(data_dir: Path) -> None:
    both = load_task("xnli", data_dir=data_dir, train_on="snli+mnli")
    assert split_sizes(both)["train"] == 99_890 + 12_022
    with pytest.raises(UserError, match="xnli cannot train on 'sst2'; choose from: mnli, snli"):
        load_task("xnli", data_dir=data_dir, train_on="sst2")
    with pytest.raises(UserError, match="imdb trains on its own split"):
        load_task("imdb", data_dir=data_dir, train_on="mnli")


@pytest.mark.parametrize("name", ["wikitext-2", "tinystories"])
def test_the_real_corpora(name: str, data_dir: Path, tokenizer_dir: Path) -> None:
    store = prepare(load_task(name, data_dir=data_dir), tokenizer=str(tokenizer_dir / "gpt2"))
    for split in store.splits.values():
        assert 3.5 < split.bytes / (len(split.tokens) - 1) < 5
    assert Windows(store["train"], 512).batch(np.arange(3)).inputs["input_ids"].shape == (3, 512)


def test_imdb_text_takes_the_unsupervised_part(data_dir: Path) -> None:
    data = load_task("imdb-text", data_dir=data_dir)
    assert [Path(part.source.name).name for part in data.parts] == ["unsupervised.parquet", "test.parquet"]


def _pairs(rows: int, first: str, second: str, classes: int, seed: int = 0) -> dict[str, list[Any]]:
    rng = random.Random(seed)
    made: dict[str, list[Any]] = {first: [], second: [], "label": []}
    for i in range(rows):
        made[first].append(f"{sentence(rng)} {i // 3}")  # three rows to a first text
        made[second].append(f"{sentence(rng)} {i}")
        made["label"].append(i % classes)
    return made


@pytest.mark.parametrize("name", ["qnli", "qqp", "mrpc", "rte"])
def test_glue_pairs_in_their_hub_schema(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    first, second = task.columns["text"], task.columns["text_pair"]
    for split, rows in (("train", 120), ("validation", 30)):
        columns = _pairs(rows, first, second, 2, seed=rows)
        parquet(tmp_path / name / f"{split}.parquet", idx=list(range(rows)), **columns)
    data = load_task(name, data_dir=tmp_path)
    assert sum(split_sizes(data).values()) == 150
    assert split_sizes(data)["test"] == 30
    part = data.parts[0]
    assert not set(part.groups[part.split == 0]) & set(part.groups[part.split == 1])
    _check_batches(prepare(data, tokenizer="train:400"))


@pytest.mark.parametrize("name", ["openwebtext", "wikitext-103"])
def test_large_corpora_in_their_hub_schema(name: str, tmp_path: Path) -> None:
    task, rng = TASKS[name], random.Random(0)
    splits = {*task.train, task.validation, task.test} - {HELD_OUT}
    for split in splits:
        texts = [f"{sentence(rng)} {i}\n" for i in range(6_000 if name == "openwebtext" else 100)]
        half = len(texts) // 2  # large sets come in several files
        parquet(tmp_path / task.folder / f"{split}-00000-of-00002.parquet", text=texts[:half])
        parquet(tmp_path / task.folder / f"{split}-00001-of-00002.parquet", text=texts[half:])
    store = prepare(load_task(name, data_dir=tmp_path), tokenizer="train:400")
    assert sum(len(split) for split in store.splits.values()) == (6_000 if name == "openwebtext" else 300)


def _snli(folder: Path, labels: list[int]) -> None:
    for split in ("train", "validation", "test"):
        columns = _pairs(len(labels), "premise", "hypothesis", 3, seed=len(split)) | {"label": labels}
        parquet(folder / "snli" / f"{split}.parquet", **columns)


def test_snli_rows_without_a_label_are_dropped_and_counted(tmp_path: Path) -> None:
    _snli(tmp_path, [0, 1, 2, -1] * 10)
    data = load_task("snli", data_dir=tmp_path)
    assert data.dropped == {"unlabelled": 30}
    assert split_sizes(data) == {"train": 30, "validation": 30, "test": 30}
    store = prepare(data, tokenizer="train:400")
    assert store["train"].meta["class_counts"] == [10, 10, 10]
    assert store["train"].labels.max() == 2


def test_hidden_labels_are_refused_by_name(tmp_path: Path) -> None:
    for split, labels in (("train", [0, 1] * 20), ("validation", [-1] * 10)):
        columns = _pairs(len(labels), "sentence1", "sentence2", 2) | {"label": labels}
        parquet(tmp_path / "rte" / f"{split}.parquet", **columns)
    with pytest.raises(UserError, match=r"validation.parquet, row 1: label -1 means unlabelled, and rte has"):
        load_task("rte", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 1, 7], r"train.parquet, row 3: label 7 is not 0 to 1"),
        ([0, -1, 1], r"train.parquet, row 2: label -1 means unlabelled, and rte has labels"),
        ([0, 0, 0], r"rte: no training text has the label not_entailment"),
    ],
)
def test_labels_a_task_does_not_have(tmp_path: Path, labels: list[int], said: str) -> None:
    for split in ("train", "validation"):
        columns = _pairs(60, "sentence1", "sentence2", 2) | {"label": labels * 20}
        parquet(tmp_path / "rte" / f"{split}.parquet", **columns)
    with pytest.raises(UserError, match=said):
        load_task("rte", data_dir=tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rte needs .*rte/train.parquet, which is not there"):
        load_task("rte", data_dir=tmp_path)
    parquet(tmp_path / "rte" / "train.parquet", a=[1])
    parquet(tmp_path / "rte" / "validation.parquet", a=[1])
    with pytest.raises(UserError, match=r"train.parquet has no column 'sentence1'; it has: a"):
        load_task("rte", data_dir=tmp_path)
    with pytest.raises(UserError, match="there is no task 'imbd'; known: ag_news, conll2003"):
        load_task("imbd")
    with pytest.raises(UserError, match=r"data folder .* does not exist"):
        load_task("rte", data_dir=tmp_path / "nowhere")
    with pytest.raises(UserError, match="ptb-pos is not on the hub"):
        _without_folder("ptb-pos")


def _without_folder(name: str) -> Dataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OELM_DATA_DIR", raising=False)
        return load_task(name)


def test_a_table_of_the_datasets_library_is_a_source(tmp_path: Path) -> None:
    """What `load_dataset` returns for a hub set, here for a local file."""
    import datasets

    texts = [f"text {i}" for i in range(1100)]
    path = parquet(tmp_path / "x.parquet", text=texts, label=[0, 1] * 550)
    table = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "c")
    )
    source = HubSource("x", table)
    chunks = list(source.chunks(["text", "label"]))
    assert [text for chunk in chunks for text in chunk["text"]] == texts
    assert {label for chunk in chunks for label in chunk["label"]} == {0, 1}
    assert source.digest() == HubSource("other name", table).digest()
    with pytest.raises(UserError, match="x has no column 'body'; it has: text, label"):
        list(source.chunks(["body"]))


def test_the_catalogue_is_complete() -> None:
    assert set(TASKS) == {
        "imdb", "ag_news", "sst2", "mnli", "xnli", "snli", "qnli", "qqp", "mrpc", "rte", "tinystories",
        "openwebtext", "wikitext-103", "wikitext-2", "imdb-text", "conll2003", "ptb-pos", "squad",
    }  # fmt: skip
    for task in TASKS.values():
        assert task.hub is not None or task.name == "ptb-pos"
        assert (task.kind == "classification") <= bool(task.labels)
        assert (task.kind == "lm") <= (task.metric == "perplexity")


def test_a_named_task_is_found_prepared_in_the_data_folder(tmp_path: Path) -> None:
    """Without the original files, by the choices that it was prepared with and by no others."""
    rng, raw, prepared = random.Random(0), tmp_path / "raw", tmp_path / "prepared"
    for split in ("train", "test"):
        texts = [sentence(rng) for _ in range(60)]
        parquet(raw / "imdb" / f"{split}.parquet", text=texts, label=[0, 1] * 30)
    options: dict[str, Any] = {"tokenizer": "train:300", "max_length": 16, "train_size": 20}
    choice = Choice("imdb", data_dir=raw, **options)
    whole = choice.store()
    copy_store(whole, prepared / "any name", choice.named())

    found = Choice("imdb", data_dir=prepared, **options).store()
    assert found.folder == prepared / "any name"
    assert found.fingerprint == whole.fingerprint
    others: dict[str, tuple[Any, str]] = {
        "max_length": (32, "max_length 16, not 32"), "train_size": (None, "train_size 20, not none"),
        "tokenizer": ("train:400", "tokenizer train:300, not train:400"),
    }  # fmt: skip
    for key, (value, why) in others.items():
        with pytest.raises(UserError, match=f"any name was prepared with {why}; prepare imdb again"):
            Choice("imdb", data_dir=prepared, **options | {key: value}).store()
    with pytest.raises(UserError, match="train_size 20, not 9 and max_length 16, not 8; prepare"):
        Choice("imdb", data_dir=prepared, **options | {"max_length": 8, "train_size": 9}).store()
    with pytest.raises(UserError, match="which is not there"):
        Choice("sst2", data_dir=prepared).store()


def test_a_tokenizer_in_another_folder_finds_what_was_prepared_with_it(tmp_path: Path) -> None:
    """Its files may say where it cuts and how it pads, as those of sentence-transformers do."""
    rng, raw = random.Random(0), tmp_path / "raw"
    texts = [sentence(rng) for _ in range(60)]
    for split in ("train", "test"):
        parquet(raw / "imdb" / f"{split}.parquet", text=texts, label=[0, 1] * 30)
    for place, size in (("here", 300), ("there", 300), ("other", 320)):
        tokenizer = train_tokenizer(texts, size)
        tokenizer.backend_tokenizer.enable_truncation(8)
        tokenizer.backend_tokenizer.enable_padding(length=8)
        tokenizer.save_pretrained(tmp_path / place)
    assert load_tokenizer(str(tmp_path / "there")).backend_tokenizer.truncation is not None
    choice = Choice("imdb", data_dir=raw, tokenizer=str(tmp_path / "here"), max_length=16)
    whole = choice.store()
    prepared = copy_store(whole, tmp_path / "prepared" / "imdb", choice.named())
    shutil.rmtree(tmp_path / "here")

    wanted = {"data_dir": prepared.folder.parent, "max_length": 16}
    for tokenizer in (tmp_path / "there", prepared.folder / "tokenizer"):
        assert Choice("imdb", tokenizer=str(tokenizer), **wanted).store().fingerprint == whole.fingerprint
    with pytest.raises(UserError, match=r"prepared with tokenizer \S*here, not \S*other; prepare imdb again"):
        Choice("imdb", tokenizer=str(tmp_path / "other"), **wanted).store()
