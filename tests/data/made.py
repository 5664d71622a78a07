"""Data and tokenizers that the tests make themselves, in the shapes the real ones have."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BartTokenizer, BertTokenizer, T5Tokenizer

from oelm.data.dataset import SPLITS, Dataset, concatenated

LEXICON = """the film was good bad very nice story about a dog and cat who run far away from home to see
mountains rivers with friends because they love music dance food light dark cold warm rain"""
WORDS = LEXICON.split()


def sentence(rng: random.Random, low: int = 3, high: int = 20) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def parquet(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def write_csv(path: Path, header: list[str], rows: list[list[Any]], **options: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([header, *rows])
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def labelled(path: Path, rows: int = 60, classes: tuple[str, ...] = ("no", "yes"), seed: int = 0) -> Path:
    """A CSV of distinct texts with columns body and topic."""
    rng = random.Random(seed)
    lines = [[f"{sentence(rng)} {i}", classes[i % len(classes)]] for i in range(rows)]
    return write_csv(path, ["body", "topic"], lines)


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'[]<>|/"


def wordpiece() -> Any:
    """A BERT tokenizer with a small vocabulary: whole words, and letters for the rest."""
    pieces = [*LETTERS, *("##" + letter for letter in LETTERS)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces, *dict.fromkeys(WORDS)]
    return BertTokenizer(vocab={token: i for i, token in enumerate(dict.fromkeys(tokens))})


def unigram_pieces() -> Any:
    """A T5 tokenizer of the same kind: a text ends with </s>, and nothing stands before it."""
    words = [f"▁{word}" for word in dict.fromkeys(WORDS)]
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0), *((word, -4.0) for word in words)]
    return T5Tokenizer(vocab=[*scored, *((letter, -6.0) for letter in LETTERS)], extra_ids=0)


def byte_pairs() -> Any:
    """A BART tokenizer of the same kind: <s> before a text, </s> after it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*WORDS, *(f" {word}" for word in WORDS)] * 2, trainer)
    learned = json.loads(backend.to_str())["model"]
    return BartTokenizer(vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]])


def ciphers(path: Path, rows: int = 100, low: int = 2, high: int = 4, seed: int = 0) -> Path:
    """A CSV of distinct sources whose targets are copies of them in other words, one for each."""
    rng = random.Random(seed)
    words = list(dict.fromkeys(WORDS))[:20]
    other = dict(zip(words, [*words[7:], *words[:7]], strict=True))
    lines: dict[str, str] = {}
    while len(lines) < rows:
        source = [rng.choice(words) for _ in range(rng.randint(low, high))]
        lines[" ".join(source)] = " ".join(other[word] for word in source)
    return write_csv(path, ["source", "target"], [[*pair] for pair in lines.items()])


def split_sizes(data: Dataset) -> dict[str, int]:
    """Rows per split."""
    codes = concatenated(data.parts, "split")
    return {name: int((codes == code).sum()) for code, name in enumerate(SPLITS)}
