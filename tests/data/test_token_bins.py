"""Token files as training scripts write them: read, checked, trained on, written again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oelm.data import Choice, open_store
from oelm.data.token_bins import write_bins
from oelm.data.tokenizer import load_tokenizer, train_tokenizer
from oelm.errors import UserError

TEXTS = ["a small house", "the old man and the sea", "über Äpfel — naïve", "one more story, and the end"] * 40


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """`tokenizer/`, and `bins/` with the texts of each split as flat uint16."""
    root = tmp_path_factory.mktemp("bins")
    train_tokenizer(TEXTS, 300).save_pretrained(root / "tokenizer")
    tokenizer = load_tokenizer(str(root / "tokenizer"))
    flat = [i for text in TEXTS for i in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    (root / "bins").mkdir()
    for name in ("train", "val"):
        np.array(flat, dtype=np.uint16).tofile(root / "bins" / f"{name}.bin")
    return root


def store_of(world: Path, folder: Path, **more):
    return Choice(str(folder), tokenizer=str(world / "tokenizer"), max_length=16, **more).store(
        world / "cache"
    )


def test_tokens_documents_and_bytes_are_the_texts(world):
    store = store_of(world, world / "bins")
    train, flat = store["train"], np.fromfile(world / "bins" / "train.bin", np.uint16)
    end = store.tokenizer().eos_token_id
    assert train.tokens[0] == end and np.array_equal(train.tokens[1:], flat)
    assert len(train) == len(TEXTS) == len(train.column("documents"))
    assert train.bytes == sum(len(text.encode()) for text in TEXTS)
    starts = train.column("documents").astype(int)
    assert (np.asarray(train.tokens)[starts - 1] == end).all() and (
        np.asarray(train.tokens)[starts] != end
    ).all()
    # Without a test.bin, val.bin is halved between documents.
    assert len(store["validation"]) == len(store["test"]) == len(TEXTS) // 2
    assert store["validation"].bytes + store["test"].bytes == train.bytes


def test_four_bytes_are_recognised_and_give_the_same(world, tmp_path):
    for name in ("train", "val"):
        np.fromfile(world / "bins" / f"{name}.bin", np.uint16).astype("<u4").tofile(tmp_path / f"{name}.bin")
    one, other = store_of(world, world / "bins"), store_of(world, tmp_path)
    assert np.array_equal(one["train"].tokens, other["train"].tokens)
    assert one["test"].bytes == other["test"].bytes


def test_what_was_read_is_written_again(world, tmp_path):
    store = store_of(world, world / "bins")
    write_bins(store, tmp_path / "again")
    again = store_of(world, tmp_path / "again")
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == ["test.bin", "train.bin", "val.bin"]
    for split in ("train", "validation", "test"):
        assert np.array_equal(store[split].tokens, again[split].tokens)
        assert store[split].bytes == again[split].bytes
    with pytest.raises(UserError, match="exists already"):
        write_bins(store, tmp_path / "again")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda f: (f / "val.bin").unlink(), "no val.bin"),
        (lambda f: (f / "val.bin").write_bytes(b""), "is empty"),
        (lambda f: (f / "val.bin").write_bytes(b"abc"), "no whole number of tokens"),
        (lambda f: np.array([5, 60000], np.uint16).tofile(f / "val.bin"), "holds the token 60,000"),
        (lambda f: np.arange(1, 65, dtype=np.int64).tofile(f / "val.bin"), "eight bytes a token"),
        (lambda f: np.zeros(1, np.uint16).tofile(f / "train.bin"), "only end tokens"),
    ],
)
def test_files_that_cannot_be_right_are_refused(world, tmp_path, write, message):
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes((world / "bins" / f"{name}.bin").read_bytes())
    write(tmp_path)
    with pytest.raises(UserError, match=message):
        store_of(world, tmp_path)


def test_a_tokenizer_must_be_named_and_ends_may_be_missing(world, tmp_path):
    with pytest.raises(UserError, match="name their tokenizer"):
        Choice(str(world / "bins")).store(world / "cache")
    for name in ("train", "val"):
        np.full(100, 7, np.uint16).tofile(tmp_path / f"{name}.bin")
    warnings = [str(warning) for warning in store_of(world, tmp_path).warnings]
    assert any("no document ends in the training tokens" in w or "no document ends" in w for w in warnings)


@pytest.mark.slow
def test_a_model_is_trained_on_them(world, tmp_path):
    environment = os.environ | {"OELM_CACHE_DIR": str(tmp_path / "cache")}
    oelm = [sys.executable, "-m", "oelm"]
    words = ["--data", str(world / "bins"), "--tokenizer", str(world / "tokenizer"), "--max-length", "16"]
    done = subprocess.run(
        [*oelm, "train", *words, "--model", "Tiny", "--steps", "4", "--out", str(tmp_path / "run")],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["task"] == "bins" and results["test"]["metrics"]["perplexity"] > 1
    done = subprocess.run(
        [*oelm, "data", "prepare", str(world / "bins"), *words[2:], "--bins", str(tmp_path / "out")],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert open_store(done.stdout.strip())["train"].bytes and (tmp_path / "out" / "train.bin").is_file()
