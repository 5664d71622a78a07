"""Corpora: each token predicted once, bytes counted, cuts without a trace, memory that does not grow."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data import IGNORE, Plan, Store, Windows, load_task, prepare
from oelm.data.tasks.language_modeling import pieces
from oelm.data.tokenizer import Encoder, train_tokenizer
from oelm.errors import UserError
from tests.data.made import parquet, sentence


def _stories(folder: Path, count: int = 400, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    texts = [f"{sentence(rng)} – {i}\n" for i in range(count)]
    parquet(folder / "tinystories" / "train.parquet", text=[*texts, "", None])
    parquet(folder / "tinystories" / "validation.parquet", text=["the end\n", "", "of it"])
    return texts


@pytest.fixture
def stories(tmp_path: Path) -> Store:
    _stories(tmp_path)
    return prepare(load_task("tinystories", data_dir=tmp_path), tokenizer="train:300")


def test_documents_are_separated_and_none_is_lost(stories: Store, tmp_path: Path) -> None:
    tokenizer = stories.tokenizer()
    end = tokenizer.eos_token
    texts = {
        name: tokenizer.decode(split.tokens, clean_up_tokenization_spaces=False)
        for name, split in stories.splits.items()
    }
    assert texts["test"] == f"{end}the end\n{end}of it{end}"
    found = {name: text.removeprefix(end).removesuffix(end).split(end) for name, text in texts.items()}
    assert sorted(found["train"] + found["validation"]) == sorted(_stories(tmp_path))
    for name, split in stories.splits.items():
        assert split.bytes == sum(len(text.encode()) for text in found[name])


def test_the_held_out_documents_do_not_depend_on_their_order(tmp_path: Path) -> None:
    def held_out(folder: Path, texts: list[str]) -> set[str]:
        parquet(folder / "tinystories" / "train.parquet", text=texts)
        parquet(folder / "tinystories" / "validation.parquet", text=["x"])
        store = prepare(load_task("tinystories", data_dir=folder), tokenizer="train:300")
        text = store.tokenizer().decode(store["validation"].tokens, clean_up_tokenization_spaces=False)
        return set(text.split(store.tokenizer().eos_token))

    texts = _stories(tmp_path / "a")
    assert held_out(tmp_path / "a", texts) == held_out(tmp_path / "b", texts[::-1])


def test_lines_of_a_stream_are_one_text(tmp_path: Path) -> None:
    lines = [" \n", " = Title = \n", " \n", " Some words . \n"] * 3
    for split in ("train", "validation", "test"):
        parquet(tmp_path / "wikitext-2-raw" / f"{split}.parquet", text=lines)
    store = prepare(load_task("wikitext-2", data_dir=tmp_path), tokenizer="train:300")
    tokenizer = store.tokenizer()
    whole = tokenizer("".join(lines))["input_ids"]
    assert store["train"].tokens.tolist() == [tokenizer.eos_token_id, *whole]


@given(st.text(st.sampled_from("ab .\n\té"), max_size=300), st.integers(2, 40))
def test_pieces_put_together_are_the_text(text: str, size: int) -> None:
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    assert all(len(part) <= size for part in parts)


words = st.lists(st.sampled_from(["good", "film", ",", "don't", "42", "–", "a\nb"]), min_size=1, max_size=80)


@given(words.map(" ".join), st.integers(20, 60))
def test_cutting_a_long_text_changes_no_token(text: str, size: int) -> None:
    encoder = _encoder()
    cut = [token for ids in encoder.ids(list(pieces(text, size))) for token in ids]
    assert cut == encoder.ids([text])[0]


_made: list[Encoder] = []


def _encoder() -> Encoder:
    if not _made:
        _made.append(Encoder(train_tokenizer(["a good film , don't 42 –"] * 5, 320), 1 << 20))
    return _made[0]


@given(st.integers(2, 200), st.integers(1, 50), st.integers(1, 9))
def test_evaluation_windows_count_each_token_once(length: int, size: int, batch: int) -> None:
    split = _Stream(np.arange(length, dtype=np.uint16))
    windows = Windows(split, size, whole=False)  # type: ignore[arg-type]
    batches = Plan(windows.lengths, batch_size=batch).epoch()
    seen: list[int] = []
    for step in range(len(batches)):
        found = windows.batch(batches.batch(step))
        labels = found.targets["labels"]
        real = labels != IGNORE
        assert (found.inputs["input_ids"][real] + 1 == labels[real]).all()  # each target follows its input
        assert found.tokens == real.sum()
        seen += labels[real].tolist()
    assert sorted(seen) == list(range(1, length))


@given(st.integers(2, 200), st.integers(1, 50))
def test_training_windows_are_whole(length: int, size: int) -> None:
    split = _Stream(np.arange(length, dtype=np.uint16))
    if length - 1 < size:
        with pytest.raises(UserError, match="less than one window"):
            Windows(split, size)  # type: ignore[arg-type]
        return
    windows = Windows(split, size)  # type: ignore[arg-type]
    batch = windows.batch(np.arange(len(windows)))
    assert batch.targets["labels"].flatten().tolist() == list(range(1, len(windows) * size + 1))


class _Stream:
    """The part of a split that windows read."""

    name = "train"

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "tinystories" / "train.parquet", text=["a story"] * 50)
    parquet(tmp_path / "tinystories" / "validation.parquet", text=["", ""])
    with pytest.raises(UserError, match=r"tinystories: the .* split is empty"):
        prepare(load_task("tinystories", data_dir=tmp_path), tokenizer="train:300")


def test_train_size_is_not_for_corpora(tmp_path: Path) -> None:
    _stories(tmp_path)
    with pytest.raises(UserError, match="tinystories is a corpus"):
        load_task("tinystories", data_dir=tmp_path, train_size=5)


def test_a_row_that_is_not_text_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "tinystories" / "train.parquet", text=[1, 2])
    parquet(tmp_path / "tinystories" / "validation.parquet", text=["x"])
    with pytest.raises(UserError, match=r"train.parquet, row 1: column 'text' holds int"):
        prepare(load_task("tinystories", data_dir=tmp_path), tokenizer="train:300")


MEMORY = """
import resource, sys
import tokenizers, transformers, pyarrow.parquet, oelm.data
from oelm.data import load_task, prepare
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1])
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the imports
before = peak()
prepare(load_task("openwebtext", data_dir=sys.argv[1]), tokenizer=sys.argv[2], cache=sys.argv[1])
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Token files of a 50 MB and a 500 MB corpus: the same peak above the imports, to 20 %."""
    rng = random.Random(0)
    vocabulary = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(20_000)
    ]
    train_tokenizer((" ".join(rng.choices(vocabulary, k=1000)) for _ in range(300)), 4096).save_pretrained(
        tmp_path / "tokenizer"
    )
    peaks = {}
    for megabytes in (50, 500):
        folder = tmp_path / str(megabytes)
        _large(folder / "openwebtext" / "train.parquet", megabytes, vocabulary, rng)
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(folder), str(tmp_path / "tokenizer")],
            text=True, capture_output=True, check=True,
        )  # fmt: skip
        peaks[megabytes] = int(done.stdout)
    assert peaks[500] <= 1.2 * peaks[50], peaks
    assert peaks[500] < 400_000, peaks  # kB: less than the corpus


def _large(path: Path, megabytes: int, vocabulary: list[str], rng: random.Random) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True)
    schema = pyarrow.schema({"text": pyarrow.string()})
    size = 0
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while size < megabytes * 1_000_000:
            texts: list[Any] = [" ".join(rng.choices(vocabulary, k=800)) for _ in range(500)]
            size += sum(map(len, texts))
            writer.write_table(pyarrow.table({"text": texts}, schema=schema))
