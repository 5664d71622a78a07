"""Data and tokenizers that the tests make themselves, in the shapes the real ones have."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from transformers import BertTokenizer

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


def wordpiece() -> Any:
    """A BERT tokenizer with a small vocabulary: whole words, and letters for the rest."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'[]<>|/"
    pieces = [*letters, *("##" + letter for letter in letters)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces, *dict.fromkeys(WORDS)]
    return BertTokenizer(vocab={token: i for i, token in enumerate(dict.fromkeys(tokens))})
