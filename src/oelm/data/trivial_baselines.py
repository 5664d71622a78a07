"""Trivial references: what a model must beat to be worth its training (DESIGN, rule 5).

They are learned from a store's train split alone, measured on exactly its other splits, and kept beside
them in the store as `references.json`. A store copied to another machine is enough to compute them.
"""

import contextlib
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.answers import read_references
from oelm.data.catalogue import CLASSIFICATION, LM, SEQ2SEQ, TOKENS
from oelm.data.shuffle import permutation
from oelm.data.store import IGNORE, Split, Store
from oelm.data.tasks import metrics
from oelm.data.tokenizer import Encoder
from oelm.errors import UserError
from oelm.system.files import read_json, write_json

VERSION = 1  # of what is computed here: another version's cache is not read
CACHE = "references.json"
# The linear classifiers learn from at most so many texts, and from at most so many tokens in all; a larger
# train split is sampled, always in the same way. With the next two they bound memory (about 2 GB) and time
# (half a minute for the catalogue's tasks, some minutes for many classes on one core).
MOST_TEXTS = 100_000
MOST_TOKENS = 8_000_000
MOST_WEIGHTS = 1 << 22  # features x classes; the optimizer keeps some twenty copies of them
MOST_STEPS = 200  # and stops before at scikit-learn's own tolerance: accuracies are good to half a point
BIG_ENOUGH = 1_000  # from so many texts on, a word or pair of words that occurs in only one text is left out
SAMPLE_SEED = 20240607
CHUNK = 2_048  # texts in memory at once while measuring
BLOCK = 1 << 24  # tokens counted at once

Array = np.ndarray
References = dict[str, dict[str, dict[str, Any]]]


def trivial_references(store: Store, splits: Sequence[str] = ("validation", "test")) -> References:
    """Reference name -> split -> metrics, by the names of `oelm.data.tasks.metrics`.

    Classification: `majority` (the most frequent training class) and `tfidf_logreg` (TF-IDF of words and
    pairs of words, logistic regression, C = 8); for pairs also `premise_blind`, the same from the second
    text alone. Both carry `trained_on`, the number of training texts they saw, and are left out where
    scikit-learn is missing or the train split has no words or one class only. Language modelling:
    `unigram` (add-one). Token classification: `most_frequent_tag`. Sequence to sequence: `copy_source`,
    `most_frequent_target`, and `unigram` of the targets. Question answering: nothing.

    Texts are what the store holds: cut at its max_length, as the model sees them.
    """
    wanted = {name: store[name] for name in splits}
    known = _read_cache(store)
    missing = [split for name, split in wanted.items() if name not in known["splits"]]
    if missing:
        fresh, complete = _compute(store, missing)
        for name, by_split in fresh.items():
            known["references"].setdefault(name, {}).update(by_split)
        known["splits"] = sorted({*known["splits"], *(split.name for split in missing)})
        if complete:
            _write_cache(store.folder, known)
    return {
        name: {split: by_split[split] for split in wanted if split in by_split}
        for name, by_split in known["references"].items()
        if any(split in by_split for split in wanted)
    }


def _compute(store: Store, splits: list[Split]) -> tuple[References, bool]:
    """The references, and whether they are all that there can be (and so may be kept)."""
    if store.kind == CLASSIFICATION:
        return _classification(store, splits)
    if store.kind == LM:
        return {"unigram": _unigram(store, splits)}, True
    if store.kind == TOKENS:
        return {"most_frequent_tag": _most_frequent_tag(store, splits)}, True
    if store.kind == SEQ2SEQ:
        return _sequences(store, splits), True
    return {}, True


def _classification(store: Store, splits: list[Split]) -> tuple[References, bool]:
    classes = len(store.label_names)
    majority = int(np.bincount(store["train"].labels, minlength=classes).argmax())
    found: References = {
        "majority": {
            split.name: _class_scores(split, np.full(len(split), majority), classes) for split in splits
        }
    }
    try:
        import sklearn  # noqa: F401
    except ImportError:
        return found, False
    reader = _Reader(store)
    views = {"tfidf_logreg": False} | ({"premise_blind": True} if store.meta["pairs"] else {})
    for name, blind in views.items():
        scores = _linear(store, splits, reader, blind)
        if scores:
            found[name] = scores
    return found, True


def _class_scores(split: Split, predictions: Array, classes: int) -> dict[str, Any]:
    scores = metrics.classification(split.labels, predictions, classes)
    del scores["confusion"]
    return scores


def _linear(store: Store, splits: list[Split], reader: "_Reader", blind: bool) -> dict[str, dict[str, Any]]:
    """TF-IDF and logistic regression, fitted once, measured on each split; {} if nothing can be learned."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    train, classes = store["train"], len(store.label_names)
    items = _training_items(train.lengths)
    labels = train.labels[items]
    vectorizer = TfidfVectorizer(
        ngram_range=(1, 2),
        sublinear_tf=True,
        min_df=2 if len(items) >= BIG_ENOUGH else 1,
        max_features=MOST_WEIGHTS // (1 if classes == 2 else classes),
    )
    texts = reader.texts(train, items, blind)
    if len(np.unique(labels)) < 2:
        return {}
    try:
        features = vectorizer.fit_transform(texts)
    except ValueError:  # so scikit-learn says that no text has a word
        return {}
    model = LogisticRegression(C=8.0, max_iter=MOST_STEPS)
    with warnings.catch_warnings():  # a reference that has not quite converged is still one
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(features, labels)
    found = {}
    for split in splits:
        texts = reader.texts(split, np.arange(len(split)), blind)
        parts = []
        while chunk := list(islice(texts, CHUNK)):
            parts.append(model.predict(vectorizer.transform(chunk)))
        predictions = np.concatenate(parts)
        found[split.name] = _class_scores(split, predictions, classes) | {"trained_on": len(items)}
    return found


def _training_items(lengths: Array) -> Array:
    """All items, or where they are too many a sample that only their number and lengths decide."""
    order = permutation(len(lengths), SAMPLE_SEED)[:MOST_TEXTS]
    order = order[np.cumsum(lengths[order]) <= MOST_TOKENS]
    return np.sort(order)


class _Reader:
    """Texts back from a store's tokens. Byte-level BPE gives them back exactly; WordPiece lower-cases and
    spaces them, which changes hardly a word."""

    def __init__(self, store: Store) -> None:
        tokenizer = store.tokenizer()
        self.backend = tokenizer.backend_tokenizer
        self.pairs = bool(store.meta["pairs"])
        self.joiner = Encoder(tokenizer, store.max_length).pair[1]  # what stands between two texts

    def texts(self, split: Split, items: Array, blind: bool) -> Iterator[str]:
        """The items' texts, decoded a chunk at a time; of pairs both, or (blind) the second alone."""
        starts, ends = split.offsets[:-1], split.offsets[1:]
        seconds = starts + second_starts(split, self.joiner) if self.pairs else starts
        for at in range(0, len(items), CHUNK):
            chunk = items[at : at + CHUNK]
            texts = self._decode(split, seconds[chunk], ends[chunk])
            if self.pairs and not blind:  # written alike whatever the tokenizer puts between them
                firsts = self._decode(split, starts[chunk], seconds[chunk] - len(self.joiner))
                texts = [f"{first} [SEP] {second}" for first, second in zip(firsts, texts, strict=True)]
            yield from texts

    def _decode(self, split: Split, starts: Array, ends: Array) -> list[str]:
        ids = [split.tokens[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
        return self.backend.decode_batch(ids, skip_special_tokens=True)


def second_starts(split: Split, joiner: Sequence[int]) -> Array:
    """Where each pair's second text starts in its item: as the store says, or after the first joiner."""
    if split.second is not None:
        return split.second
    tokens, offsets = split.tokens, split.offsets
    places = np.arange(max(0, len(tokens) - len(joiner) + 1))
    for shift, token in enumerate(joiner):
        places = places[tokens[places + shift] == token]
    items = np.searchsorted(offsets, places, side="right") - 1
    whole = places + len(joiner) <= offsets[items + 1]  # not across two items
    found, first = np.unique(items[whole], return_index=True)
    starts = split.lengths.copy()  # a pair without a joiner has no second text
    starts[found] = places[whole][first] + len(joiner) - offsets[found]
    return starts


def _unigram(store: Store, splits: list[Split]) -> dict[str, dict[str, Any]]:
    """Add-one smoothed frequencies. What is counted is what `Windows(split, size, whole=False)` predicts
    for any size: every token but the boundary at the start of the stream."""
    cost = _unigram_cost(_count(store["train"].tokens[1:], store.vocab_size))
    found = {}
    for split in splits:
        counts = _count(split.tokens[1:], store.vocab_size)
        found[split.name] = metrics.language(float(counts @ cost), int(counts.sum()), split.bytes)
    return found


def _unigram_cost(seen: Array) -> Array:
    """Nats for each token."""
    return np.log(float(seen.sum() + len(seen))) - np.log(seen + 1.0)


def _count(tokens: Array, vocabulary: int) -> Array:
    counts = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, len(tokens), BLOCK):
        counts += np.bincount(tokens[start : start + BLOCK], minlength=vocabulary)
    return counts


def _sequences(store: Store, splits: list[Split]) -> References:
    """What can be written without reading (the most frequent target of train; ties: the first by its
    tokens), and without understanding (the source itself)."""
    train = store["train"]
    bounds = train.target_offsets
    targets = [train.target_tokens[a:b].tobytes() for a, b in pairwise(bounds.tolist())]
    # The commonest, and of equally common ones the first: the order of the rows must not matter.
    most = min(Counter(targets).items(), key=lambda item: (-item[1], item[0]))[0]
    ids = np.frombuffer(most, dtype=train.target_tokens.dtype).tolist()
    common = store.tokenizer().backend_tokenizer.decode(ids, skip_special_tokens=True)
    found: References = {"copy_source": {}, "most_frequent_target": {}, "unigram": {}}
    cost = _unigram_cost(_count(train.target_tokens, store.vocab_size))
    for split in splits:
        texts = read_references(split).values()
        right = [record["target"] for record in texts]
        for name, written in (
            ("copy_source", [record["source"] for record in texts]),
            ("most_frequent_target", [common] * len(right)),
        ):
            scores = metrics.written_texts(right, written)
            found[name][split.name] = {key: float(values.mean()) for key, values in scores.items()}
        counts = _count(split.target_tokens, store.vocab_size)
        found["unigram"][split.name] = metrics.language(
            float(counts @ cost), int(counts.sum()), split.meta["target_bytes"]
        )
    return found


def _most_frequent_tag(store: Store, splits: list[Split]) -> dict[str, dict[str, Any]]:
    """Each token id's most frequent training tag, the overall one for ids never seen; ties: the first tag."""
    tags = np.asarray(store["train"].tags, dtype=np.int64)
    tagged = tags != IGNORE
    classes = len(store.label_names)
    cells, counts = np.unique(
        np.asarray(store["train"].tokens[tagged], dtype=np.int64) * classes + tags[tagged],
        return_counts=True,
    )
    best = np.full(store.vocab_size, np.bincount(tags[tagged], minlength=classes).argmax())
    order = np.lexsort((-cells, counts))  # rising counts, so that the last one written is the best
    best[cells[order] // classes] = cells[order] % classes
    return {split.name: _tag_scores(store, split, best) for split in splits}


def _tag_scores(store: Store, split: Split, best: Array) -> dict[str, Any]:
    names = np.array(store.label_names, dtype=object)
    tags = np.asarray(split.tags, dtype=np.int64)
    tagged = tags != IGNORE
    before = np.concatenate([[0], np.cumsum(tagged)])  # tagged tokens before each place
    bounds = before[split.offsets[1:-1]]
    truth = np.split(names[tags[tagged]], bounds)
    predicted = np.split(names[best[split.tokens[tagged]]], bounds)
    return metrics.tagging([row.tolist() for row in truth], [row.tolist() for row in predicted])


def _read_cache(store: Store) -> dict[str, Any]:
    """What was computed before for this store by this version; empty if nothing, or nothing readable."""
    empty = {"version": VERSION, "fingerprint": store.fingerprint, "splits": [], "references": {}}
    try:
        known = read_json(store.folder / CACHE)
        same = all(known[key] == empty[key] for key in ("version", "fingerprint"))
        return known if same and known.pop("digest") == _digest(known) else empty
    except (UserError, KeyError, TypeError, AttributeError):
        return empty


def _write_cache(folder: Path, known: dict[str, Any]) -> None:
    """A folder that cannot be written to is fine: then nothing is kept."""
    with contextlib.suppress(OSError):
        write_json(folder / CACHE, known | {"digest": _digest(known)})


def _digest(known: dict[str, Any]) -> str:
    """Numbers that were changed on disk are computed again."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
