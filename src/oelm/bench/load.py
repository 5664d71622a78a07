"""A case: its data, a store's own or made-up texts, and the operations of a window of steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oelm.data import Split, Store
from oelm.data.batches import ranges
from oelm.data.shuffle import Array, permutation
from oelm.models.gpt_config import OelmGPTConfig, gpt_config
from oelm.models.gpt_sizes import PRESETS, size_name

# (median, spread) of a log-normal: sentence pairs as in XNLI, film reviews as in IMDB, in GPT-2's tokens.
MADE_LENGTHS = {"pairs": (35.0, 0.4), "reviews": (270.0, 0.6)}
CUT = 512  # tokens at which the reviews were cut when MADE_LENGTHS was measured
PAD_ID = 0


@dataclass
class Case:
    """The model and the texts that every arm of a comparison trains."""

    work: str
    name: str
    store: Store
    size: str
    batch_size: int
    length: int
    device: torch.device
    checkpointing: bool = False  # gradient checkpointing

    @cached_property
    def config(self) -> OelmGPTConfig:
        """The size of every arm: as `oelm train` would build it for this store; for another model, a GPT with
        as many weights in its blocks."""
        fields: dict[str, Any] = {"num_labels": len(self.store.label_names)} if self.store.label_names else {}
        fields["vocab_size"] = self.store.vocab_size
        if (other := other_model(self.size)) is not None:
            fields |= {"d_model": other.hidden_size, "num_layers": other.num_hidden_layers}
            fields["d_ff"] = getattr(other, "intermediate_size", 4 * other.hidden_size)
            return OelmGPTConfig(num_heads=other.num_attention_heads, **fields)
        fields["max_position_embeddings"] = max(gpt_config(self.size).max_position_embeddings, self.length)
        return gpt_config(self.size, **fields)

    @property
    def model(self) -> dict[str, Any]:
        """The model as it is recorded: name, architecture and shape."""
        other, config = other_model(self.size), self.config
        architecture = "gpt" if other is None else other.model_type
        shape = {"layers": config.num_layers, "d_model": config.d_model}
        return {"name": Path(self.size).name, "architecture": architecture, **shape}


def other_model(size: str) -> Any:
    """The config of a model that is not a reference GPT; None for a reference GPT."""
    if size_name(size) in PRESETS:
        return None
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(size)


@dataclass(frozen=True)
class Load:
    """The size of the texts of one window, without padding."""

    texts: int
    tokens: int
    squares: int  # the sum of the texts' squared lengths, to which attention is proportional

    @classmethod
    def of(cls, lengths: Any) -> "Load":
        lengths = np.asarray(lengths, dtype=np.int64)
        return cls(len(lengths), int(lengths.sum()), int((lengths**2).sum()))

    def operations(self, config: OelmGPTConfig, kind: str, causal: bool) -> float:
        """Forward and backward: per token 6 x the matrices' weights + 12 L d T, the latter halved if causal.

        T is the length of the token's own text. The language model's head computes every token, a
        classifier's one per text. Neither recomputation nor the work that freezing saves changes the count:
        the same texts are the same work for every method.
        """
        d, layers = config.d_model, config.num_layers
        blocks = layers * (4 * d * d + 2 * d * config.d_ff)
        head = config.vocab_size * self.tokens if kind == "lm" else int(config.num_labels or 0) * self.texts
        attention = 12 * layers * d * self.squares / (2 if causal else 1)
        return 6.0 * (blocks * self.tokens + d * head) + attention


class MemorySplit(Split):
    """A split whose columns are arrays in memory."""

    def __init__(self, columns: dict[str, Array], **meta: Any) -> None:
        super().__init__(Path(), "train", meta | {"columns": sorted(columns)})
        self.columns = columns

    def column(self, name: str) -> Array:
        return self.columns[name]


class MemoryStore(Store):
    """A store in memory with only a training split: a sample of another store, or made-up texts."""

    def __init__(self, meta: dict[str, Any], train: MemorySplit, source: Store | None = None) -> None:
        super().__init__(Path(), meta | {"splits": {}})
        self.splits, self.source = {"train": train}, source

    def used_tokens(self) -> Array:
        """For a sample, the tokens used by its whole source; for made-up texts, all tokens."""
        return np.ones(self.vocab_size, dtype=bool) if self.source is None else self.source.used_tokens()

    def tokenizer(self) -> Any:
        return padding_tokenizer(PAD_ID) if self.source is None else self.source.tokenizer()


def sample_texts(store: Store, texts: int) -> MemoryStore:
    """A random sample of so many texts of a classification store, or all if it has fewer."""
    split = store["train"]
    items = permutation(len(split), 0)[:texts]
    lengths = split.lengths[items]
    tokens = np.array(split.tokens[ranges(split.offsets[items], lengths)])
    train = _texts(tokens, lengths, split.labels[items], split.ids[items], split.meta["class_counts"])
    return MemoryStore(store.meta, train, store)


def _texts(tokens: Array, lengths: Array, labels: Array, ids: Array, class_counts: list[int]) -> MemorySplit:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = {"tokens": tokens, "offsets": offsets, "labels": labels, "ids": ids}
    return MemorySplit(columns, items=len(lengths), class_counts=class_counts)


def sample_stream(store: Store, tokens: int) -> MemoryStore:
    """The beginning of a corpus."""
    columns = {"tokens": np.array(store["train"].tokens[: tokens + 1])}
    return MemoryStore(store.meta, MemorySplit(columns, items=0), store)


def made_texts(name: str, lengths: Sequence[int] | Array, vocab_size: int, longest: int) -> MemoryStore:
    """Classification texts of these lengths, with token frequencies like those of words."""
    lengths = np.asarray(lengths, dtype=np.int64)
    rng = np.random.default_rng(0)
    tokens = _words(rng, int(lengths.sum()), vocab_size)  # before the labels: one generator draws both
    train = _texts(tokens, lengths, rng.integers(0, 2, len(lengths)), np.arange(len(lengths)), [1, 1])
    return _made_store(name, "classification", vocab_size, longest, train)


def made_lengths(kind: str, texts: int, longest: int) -> Array:
    """Random lengths like those of real texts, cut at `longest`; scaled down if that is below CUT."""
    median, spread = MADE_LENGTHS[kind]
    drawn = np.random.default_rng(1).lognormal(np.log(median * min(1.0, longest / CUT)), spread, texts)
    return np.clip(drawn.astype(np.int64), 2, longest)


def made_stream(tokens: int, vocab_size: int, longest: int) -> MemoryStore:
    columns = {"tokens": _words(np.random.default_rng(0), tokens + 1, vocab_size)}
    return _made_store("made-stream", "lm", vocab_size, longest, MemorySplit(columns, items=0))


def _words(rng: np.random.Generator, count: int, vocab_size: int) -> Array:
    """Random tokens by Zipf's law, as repeated tokens matter to the embedding's gradient."""
    weights = 1.0 / (np.arange(vocab_size - 1) + 2.7)
    bounds = np.cumsum(weights) / weights.sum()
    drawn = np.searchsorted(bounds[:-1], rng.random(count)) + 1  # 0 is the padding
    return drawn.astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _made_store(name: str, kind: str, vocab_size: int, longest: int, train: MemorySplit) -> MemoryStore:
    metric, labels = ("perplexity", []) if kind == "lm" else ("accuracy", ["no", "yes"])
    tokenizer = {"name": "made", "vocab_size": vocab_size, "pad_id": PAD_ID}
    meta: dict[str, Any] = {"task": name, "kind": kind, "metric": metric, "label_names": labels}
    meta |= {"max_length": longest, "tokenizer": tokenizer, "fingerprint": "made", "warnings": []}
    return MemoryStore(meta, train)


def padding_tokenizer(pad_id: int) -> Any:
    """A tokenizer that can only pad, as a collator needs it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": pad_id}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
