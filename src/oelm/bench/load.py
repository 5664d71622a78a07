"""How much work a window of steps is, and the data it is made of: a store's own texts, or made ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data import Split, Store
from oelm.data.batches import ranges
from oelm.data.shuffle import permutation
from oelm.errors import UserError
from oelm.models.gpt_config import OelmGPTConfig

Array = np.ndarray

# (median, spread) of a log-normal: sentence pairs as in XNLI, film reviews as in IMDB, in GPT-2's tokens.
MADE_LENGTHS = {"pairs": (35.0, 0.4), "reviews": (270.0, 0.6)}
CUT = 512  # where the reviews were cut when those numbers were taken
PAD_ID = 0


@dataclass(frozen=True)
class Load:
    """What the texts of one window amount to, padding not counted."""

    texts: int
    tokens: int
    squares: int  # the sum of the texts' squared lengths: what attention grows with

    @classmethod
    def of(cls, lengths: Any) -> "Load":
        lengths = np.asarray(lengths, dtype=np.int64)
        return cls(len(lengths), int(lengths.sum()), int((lengths**2).sum()))

    def operations(self, config: OelmGPTConfig, kind: str, causal: bool) -> float:
        """Forward and backward: per token 6 x the matrices' weights + 12 L d T, the latter halved if causal.

        T is the length of the token's own text. The language model's head sees every token, a classifier's
        one per text. Recomputation is not counted, and neither is what freezing leaves out: the same texts
        are the same work for every method.
        """
        d, layers = config.d_model, config.num_layers
        blocks = layers * (4 * d * d + 2 * d * config.d_ff)
        head = config.vocab_size * self.tokens if kind == "lm" else int(config.num_labels or 0) * self.texts
        attention = 12 * layers * d * self.squares / (2 if causal else 1)
        return 6.0 * (blocks * self.tokens + d * head) + attention


class MemorySplit(Split):
    """A split whose columns are arrays at hand."""

    def __init__(self, columns: dict[str, Array], meta: dict[str, Any]) -> None:
        super().__init__(Path(), "train", meta | {"columns": sorted(columns)})
        self.columns = columns

    def column(self, name: str) -> Array:
        return self.columns[name]


class MemoryStore(Store):
    """A store with nothing but a training split, in memory."""

    def __init__(
        self, meta: dict[str, Any], train: MemorySplit, tokenizer: Any, source: Store | None = None
    ) -> None:
        super().__init__(Path(), meta | {"splits": {}})
        self.splits, self._tokenizer, self.source = {"train": train}, tokenizer, source

    def used_tokens(self) -> Array:
        """A sample stands for all of the data; made texts stand for any."""
        return np.ones(self.vocab_size, dtype=bool) if self.source is None else self.source.used_tokens()

    def tokenizer(self) -> Any:
        return self._tokenizer


def sample_texts(store: Store, texts: int) -> MemoryStore:
    """So many texts of a classification store, drawn evenly; all of them where it has fewer."""
    split = store["train"]
    items = permutation(len(split), 0)[:texts]
    lengths = split.lengths[items]
    columns = {
        "tokens": np.array(split.tokens[ranges(split.offsets[items], lengths)]),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "labels": split.labels[items],
        "ids": split.ids[items],
    }
    meta = {"items": len(items), "class_counts": split.meta["class_counts"]}
    return MemoryStore(store.meta, MemorySplit(columns, meta), store.tokenizer(), store)


def sample_stream(store: Store, tokens: int) -> MemoryStore:
    """The beginning of a corpus."""
    train = np.array(store["train"].tokens[: tokens + 1])
    return MemoryStore(store.meta, MemorySplit({"tokens": train}, {"items": 0}), store.tokenizer())


def made_texts(name: str, lengths: Sequence[int] | Array, vocab_size: int, longest: int) -> MemoryStore:
    """Classification texts of these lengths, of tokens as frequent as words are."""
    lengths = np.asarray(lengths, dtype=np.int64)
    rng = np.random.default_rng(0)
    columns = {
        "tokens": _words(rng, int(lengths.sum()), vocab_size),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "labels": rng.integers(0, 2, len(lengths)),
        "ids": np.arange(len(lengths)),
    }
    meta = _meta(name, "classification", vocab_size, longest)
    split = MemorySplit(columns, {"items": len(lengths), "class_counts": [1, 1]})
    return MemoryStore(meta, split, padding_tokenizer())


def made_lengths(kind: str, texts: int, longest: int) -> Array:
    """Lengths as real texts have them, cut at `longest`; for small models the whole is scaled down."""
    median, spread = MADE_LENGTHS[kind]
    drawn = np.random.default_rng(1).lognormal(np.log(median * min(1.0, longest / CUT)), spread, texts)
    return np.clip(drawn.astype(np.int64), 2, longest)


def made_stream(tokens: int, vocab_size: int, longest: int) -> MemoryStore:
    columns = {"tokens": _words(np.random.default_rng(0), tokens + 1, vocab_size)}
    return MemoryStore(
        _meta("made-stream", "lm", vocab_size, longest),
        MemorySplit(columns, {"items": 0}),
        padding_tokenizer(),
    )


def _words(rng: np.random.Generator, count: int, vocab_size: int) -> Array:
    """Zipf's law: repeated rows are what an embedding's gradient has to add up."""
    if vocab_size < 3:
        raise UserError(f"--vocab-size {vocab_size}: made texts need at least 3 tokens")
    weights = 1.0 / (np.arange(vocab_size - 1) + 2.7)
    bounds = np.cumsum(weights) / weights.sum()
    drawn = np.searchsorted(bounds[:-1], rng.random(count)) + 1  # 0 is the padding
    return drawn.astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _meta(name: str, kind: str, vocab_size: int, longest: int) -> dict[str, Any]:
    return {
        "task": name,
        "kind": kind,
        "metric": "perplexity" if kind == "lm" else "accuracy",
        "label_names": [] if kind == "lm" else ["no", "yes"],
        "max_length": longest,
        "tokenizer": {"name": "made", "vocab_size": vocab_size, "pad_id": PAD_ID},
        "fingerprint": "made",
        "warnings": [],
    }


def padding_tokenizer() -> Any:
    """A tokenizer that can do the one thing a collator asks of it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": PAD_ID, "<unk>": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
