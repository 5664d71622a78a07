"""Trivial baselines, which a model must beat to be worth its training.

They are learned from the train split of a prepared dataset, measured on its other splits, and cached beside
them as `references.json`. They need only the prepared dataset. Each task kind has its own
(`TaskKind.trivial_baselines`); here are their cache and the linear models.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from oelm.data.manifest import digest
from oelm.data.shuffle import Array, permutation
from oelm.data.store import Split, Store, open_store
from oelm.data.tasks import task_kind
from oelm.data.tokenizer import Encoder
from oelm.errors import UserError
from oelm.system.files import locked_folder, read_json, write_json

VERSION = 2  # of the computation here; the cache of another version is not read
CACHE = "references.json"
# The linear models learn from at most so many texts, and from at most so many tokens in all; a larger train
# split is sampled, always in the same way. With MOST_WEIGHTS they bound memory (about 2 GB) and time (half a
# minute for the catalogue's tasks, some minutes for many classes on one core).
MOST_TEXTS = 100_000
MOST_TOKENS = 8_000_000
MOST_WEIGHTS = 1 << 22  # features x classes; the optimizer keeps some twenty copies of them
BIG_ENOUGH = 1_000  # texts from which on words and pairs of words that occur in only one text are left out
SAMPLE_SEED = 20240607
CHUNK = 2_048  # texts in memory at once while measuring

Baselines = dict[str, dict[str, dict[str, Any]]]
_COMPUTING: list[subprocess.Popen[bytes]] = []


def trivial_baselines(store: Store, splits: Sequence[str] = ()) -> Baselines:
    """Baseline -> split (these, or all but train) -> metrics, by the names of the task kind's metrics. Texts
    are what the prepared dataset holds: cut at its max_length, as the model sees them. The linear ones carry
    `trained_on`, the number of training texts they saw, and are left out where scikit-learn is missing or
    nothing can be learned: no words, or one class only."""
    measured = [split for name, split in store.splits.items() if name != "train"]
    wanted = [store[name] for name in splits] or measured
    known = _read_cache(store)
    if known is None:
        with _locked(store):  # another process may be computing them
            known = _read_cache(store) or _compute(store, measured)
    return {name: {split.name: by_split[split.name] for split in wanted} for name, by_split in known.items()}


def compute_in_background(store: Store) -> None:
    """Start a process that computes them, once for all runs, while a GPU trains; `trivial_baselines` waits
    for it. If that process does not know the task kind, of a plugin, that call computes them."""
    if _read_cache(store) is None and os.access(store.folder, os.W_OK):
        command = [sys.executable, "-m", __name__, str(store.folder)]
        env, none = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, subprocess.DEVNULL
        process = subprocess.Popen(
            command, env=env, start_new_session=True, stdin=none, stdout=none, stderr=none
        )
        _COMPUTING.append(process)  # it may outlive its run, as other runs use its result


def _compute(store: Store, measured: list[Split]) -> Baselines:
    known = task_kind(store.kind).trivial_baselines(store, measured)
    if have_sklearn():  # without it some baselines are missing, which must not be cached
        kept = {"version": VERSION, "fingerprint": store.fingerprint, "references": known}
        with contextlib.suppress(OSError):  # a folder that cannot be written to is fine
            write_json(store.folder / CACHE, kept | {"digest": digest(kept)})
    return known


@contextlib.contextmanager
def _locked(store: Store) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks
            stack.enter_context(locked_folder(store.folder, wait=True))
        yield


def _read_cache(store: Store) -> Baselines | None:
    """The cached baselines of this store and version; None if there are none or the file was changed."""
    try:
        known = read_json(store.folder / CACHE)
        same = (known["version"], known["fingerprint"]) == (VERSION, store.fingerprint)
        return known["references"] if same and known["digest"] == digest(known) else None
    except (UserError, KeyError, TypeError):
        return None


def have_sklearn() -> bool:
    return importlib.util.find_spec("sklearn") is not None


def tfidf_baseline(
    texts: "StoreTexts", splits: list[Split], labels: Array, model: Any, most_words: int, blind: bool
) -> tuple[int, dict[str, Array]] | None:
    """TF-IDF of words and pairs of words and a linear model of scikit-learn, fitted to the training `labels`
    once: how many texts it learned from, and its predictions for each split; None if nothing can be learned.
    `blind`: from the second text of pairs."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer

    train = texts.store["train"]
    items = training_items(train.lengths)
    labels = labels[items]
    vectorizer = TfidfVectorizer(
        ngram_range=(1, 2),
        sublinear_tf=True,
        min_df=2 if len(items) >= BIG_ENOUGH else 1,
        max_features=most_words,
    )
    if len(np.unique(labels)) < 2:
        return None
    try:
        features = vectorizer.fit_transform(texts.read(train, items, blind))
    except ValueError:  # raised by scikit-learn if no text has a word
        return None
    with warnings.catch_warnings():  # a baseline need not converge fully
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(features, labels)
    predictions = {}
    for split in splits:
        rest = texts.read(split, np.arange(len(split)), blind)
        parts = []
        while chunk := list(islice(rest, CHUNK)):
            parts.append(model.predict(vectorizer.transform(chunk)))
        predictions[split.name] = np.concatenate(parts)
    return len(items), predictions


def training_items(lengths: Array) -> Array:
    """All items or, of too many, a sample that depends only on their number and lengths."""
    order = permutation(len(lengths), SAMPLE_SEED)[:MOST_TEXTS]
    order = order[np.cumsum(lengths[order]) <= MOST_TOKENS]
    return np.sort(order)


class StoreTexts:
    """Decodes the texts of a prepared dataset from its tokens. Byte-level BPE restores them exactly;
    WordPiece changes case and spaces, which hardly matters to bags of words."""

    def __init__(self, store: Store) -> None:
        self.store, tokenizer = store, store.tokenizer()
        self.backend = tokenizer.backend_tokenizer
        self.pairs = bool(store.meta["pairs"])
        self.joiner = Encoder(tokenizer, store.max_length).pair[1]  # what stands between two texts

    def read(self, split: Split, items: Array, blind: bool) -> Iterator[str]:
        """The items' texts, decoded a chunk at a time; of pairs both, or (blind) the second alone."""
        for at in range(0, len(items), CHUNK):
            chunk = items[at : at + CHUNK].tolist()
            tokens = [split.tokens[split.offsets[i] : split.offsets[i + 1]].tolist() for i in chunk]
            if not self.pairs:
                yield from self._decode(tokens)
                continue
            seconds = [second_start(ids, self.joiner) for ids in tokens]
            if split.second is not None:
                seconds = split.second[chunk].tolist()
            texts = self._decode([ids[start:] for ids, start in zip(tokens, seconds, strict=True)])
            if not blind:  # joined in the same way whatever the tokenizer puts between them
                ends = [start - len(self.joiner) for start in seconds]
                firsts = self._decode([ids[:end] for ids, end in zip(tokens, ends, strict=True)])
                texts = [f"{first} [SEP] {second}" for first, second in zip(firsts, texts, strict=True)]
            yield from texts

    def _decode(self, tokens: list[list[int]]) -> list[str]:
        return self.backend.decode_batch(tokens, skip_special_tokens=True)


def second_start(tokens: list[int], joiner: list[int]) -> int:
    """The index at which a pair's second text starts: after the first joiner, or the end if there is none."""
    size = len(joiner)
    starts = range(len(tokens) - size + 1)
    return next((i + size for i in starts if tokens[i : i + size] == joiner), len(tokens))


if __name__ == "__main__":
    trivial_baselines(open_store(sys.argv[1]))
