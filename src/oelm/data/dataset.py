"""A dataset before it is tokenised: its sources, the split of each row, dropped rows and warnings."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oelm.data.files import Chunk, Source
from oelm.data.shuffle import Array, shuffle_keys, text_key
from oelm.data.tasks import task_kind
from oelm.errors import UserError
from oelm.system.messages import Notice, notice

SPLITS = ("train", "validation", "test")
DROPPED = -1
HOLD_OUT_SEED = 20240607  # for the catalogue's held-out parts; changing it would change the tasks
VERSION = 1  # of the rules in this file; part of every fingerprint


@dataclass
class Part:
    """One source and the role of its rows. Filled in by `read_rows` and by the assignment to splits."""

    source: Source
    columns: dict[str, str]  # role -> column
    role: str  # the split its rows belong to, unless held out
    keys: Array = field(init=False)  # one per row: equal = duplicate
    groups: Array = field(init=False)  # equal = kept in one split
    numbers: Array = field(init=False)  # of the groups within a split: 0, 1, ...
    labels: Array = field(init=False)
    split: Array = field(init=False)  # index into SPLITS, or DROPPED
    values: list[Any] = field(default_factory=list)  # labels as in the source, until they become `labels`

    def rows(self) -> Iterator[tuple[int, Chunk]]:
        """The chunks, each with the number of its first row, and with columns named by role."""
        first = 0
        for chunk in self.source.chunks(list(self.columns.values())):
            named = {role: chunk[column] for role, column in self.columns.items()}
            yield first, named
            first += len(next(iter(named.values())))


@dataclass
class Dataset:
    """The result of `load_task` and `load_file`, from which `prepare` makes a store."""

    name: str
    kind: str  # a name in `oelm.data.tasks`
    parts: list[Part]
    metric: str
    label_names: list[str]
    identity: dict[str, Any]  # all settings that decide which row goes where
    separate: bool = True  # a corpus: are rows documents?
    held_out: dict[str, float] = field(default_factory=dict)  # split -> share of the training rows
    dropped: dict[str, int] = field(default_factory=dict)
    warnings: list[Notice] = field(default_factory=list)
    duplicates: dict[str, int] = field(default_factory=dict)  # "train/test" -> items of test also in train

    def fingerprint(self) -> dict[str, Any]:
        sources = [
            {"digest": part.source.digest(), "columns": part.columns, "role": part.role}
            for part in self.parts
        ]
        about = {"version": VERSION, "kind": self.kind, "labels": self.label_names, "sources": sources}
        return about | self.identity

    @property
    def splits(self) -> tuple[str, ...]:
        """All of SPLITS, without validation if no source has it and nothing is held out for it."""
        present = {"train", "test", *self.held_out, *(part.role for part in self.parts)}
        return tuple(split for split in SPLITS if split in present)

    def drop(self, part: Part, mask: Array, why: str) -> None:
        mask = mask & (part.split != DROPPED)
        if mask.any():
            part.split[mask] = DROPPED
            self.dropped[why] = self.dropped.get(why, 0) + int(mask.sum())


def read_rows(dataset: Dataset, part: Part, whole_pairs: bool = False) -> None:
    """Read a part once and fill in its keys, groups and labels; values that are not text are refused, empty
    rows dropped. With `whole_pairs` a pair with one empty text counts as empty."""
    kind = task_kind(dataset.kind)
    keys: list[int] = []
    groups: list[int] = []
    empty: list[bool] = []
    half_empty = 0
    for first, chunk in part.rows():
        columns = {role: values for role, values in chunk.items() if role != "label"}
        for role, values in columns.items():
            check_values(part, role, values, first)
        for row in zip(*columns.values(), strict=True):
            texts = kind.item_texts(dict(zip(columns, row, strict=True)))
            keys.append(text_key(*(texts[:1] if kind.writes else texts)))
            groups.append(text_key(texts[0]))
            has_text = [bool(text and not text.isspace()) for text in texts]
            empty.append(not (all(has_text) if kind.writes or whole_pairs else any(has_text)))
            half_empty += whole_pairs and any(has_text) and not all(has_text)
        part.values.extend(chunk.get("label", []))
    part.keys = np.array(keys, dtype=np.uint64)
    part.groups = np.array(groups, dtype=np.uint64)
    part.labels = np.zeros(len(keys), dtype=np.int64)
    part.split = np.full(len(keys), SPLITS.index(part.role), dtype=np.int8)
    dataset.drop(part, np.array(empty, dtype=bool), "empty")
    if half_empty:  # older stores kept such rows, so the fingerprint must differ
        dataset.identity["whole_pairs"] = True


def check_values(part: Part, role: str, values: list[Any], first: int) -> None:
    """Refuse a value that is not text, naming its row; None becomes an empty text, in place."""
    for i, value in enumerate(values):
        if role in ("tags", "answers", "id"):
            continue
        if value is None:
            values[i] = [] if role == "tokens" else ""
            continue
        words = value if role == "tokens" and isinstance(value, list) else [value]
        for word in words:
            if not isinstance(word, str):
                raise UserError(
                    f"{part.source.where(first + i)}: column {part.columns[role]!r} holds "
                    f"{type(word).__name__} {str(word)[:30]!r} where text was expected"
                )


def concatenated(parts: list[Part], name: str) -> Array:
    return np.concatenate([getattr(part, name) for part in parts])


def _divide(parts: list[Part], name: str, values: Array) -> None:
    """Set attribute `name` of every part to its piece of an array over all parts."""
    ends = np.cumsum([len(part.keys) for part in parts])
    for part, piece in zip(parts, np.split(values, ends[:-1]), strict=True):
        setattr(part, name, piece)


def hold_out(dataset: Dataset, split: str, share: float, seed: int, group: str | None = None) -> None:
    """Move a share of the training rows to another split: stratified, or in whole groups."""
    parts = [part for part in dataset.parts if part.role == "train"]
    codes = concatenated(parts, "split")
    rows = np.flatnonzero(codes == 0)
    keys = concatenated(parts, "keys")[rows]
    if group == "contains":
        phrases = [text for part in parts for _, chunk in part.rows() for text in chunk["text"]]
        held, both = hold_out_phrases([phrases[row] for row in rows], share, seed, keys)
        dataset.dropped["mixed_phrases"] = int(both.sum())
        codes[rows[both]] = DROPPED
    elif group == "text":
        held = take_groups(concatenated(parts, "groups")[rows], share, seed)
    else:
        labels = concatenated(parts, "labels")[rows]
        held = take_stratified(keys, labels, max(round(share * len(rows)), len(np.unique(labels))), seed)
    codes[rows[held]] = SPLITS.index(split)
    _divide(parts, "split", codes)


def take_train_subset(dataset: Dataset, size: int, seed: int) -> None:
    """Keep a nested, stratified subset of the training rows: a larger size keeps these and adds others."""
    parts = [part for part in dataset.parts if part.role == "train"]
    codes = concatenated(parts, "split")
    rows = np.flatnonzero(codes == 0)
    labels = concatenated(parts, "labels")[rows]
    classes = len(np.unique(labels))
    if not max(1, classes) <= size <= len(rows):
        raise UserError(
            f"train_size {size} does not fit {dataset.name}: it has {len(rows)} training rows"
            + (f" in {classes} classes" if classes > 1 else "")
        )
    codes[rows[~take_stratified(concatenated(parts, "keys")[rows], labels, size, seed)]] = DROPPED
    _divide(parts, "split", codes)
    if size < len(rows):
        dataset.dropped["beyond_train_size"] = len(rows) - size


def check_and_number(dataset: Dataset) -> None:
    """Check that no split is empty, count duplicates between splits, number the groups of each split."""
    import pandas

    codes, keys, labels = (concatenated(dataset.parts, name) for name in ("split", "keys", "labels"))
    for split in dataset.splits:
        code = SPLITS.index(split)
        if not (codes == code).any():
            raise UserError(f"{dataset.name}: the {split} split is empty; nothing can be trained or measured")
        task_kind(dataset.kind).check_split(dataset, split, labels[codes == code])
    for one, other in itertools.combinations(dataset.splits, 2):
        rows = codes == SPLITS.index(other)
        twice = int(np.isin(keys[rows], keys[codes == SPLITS.index(one)]).sum())
        dataset.duplicates[f"{one}/{other}"] = twice
        if twice:
            values = {"count": twice, "total": int(rows.sum())}
            dataset.warnings.append(notice("data.duplicates", **values, split=other, other=one))
    for why, count in dataset.dropped.items():
        if count and why != "beyond_train_size":
            dataset.warnings.append(notice("data.dropped", count=count, why=why))
    for part in dataset.parts:
        part.values.clear()
    groups = concatenated(dataset.parts, "groups")
    numbers = np.zeros(len(groups), dtype=np.int64)
    for code in range(len(SPLITS)):  # 0, 1, ... in each split, in the order in which they first appear
        numbers[codes == code] = pandas.factorize(groups[codes == code])[0]
    _divide(dataset.parts, "numbers", numbers)


# The rows that are held out depend on the texts, the labels and a seed, never on the order of the rows.


def take_stratified(keys: Array, labels: Array, size: int, seed: int) -> Array:
    """A mask of `size` rows in the proportions of the classes; nested: a larger size only adds rows.

    One row of each class comes first, so that no class is missing. Then rows are taken in the order of
    (r + 1/2) / n for row number r of the n rows of its class; `keys` (one per text) and the seed decide r.
    """
    mixed = shuffle_keys(keys, seed)
    by_class = np.lexsort((mixed, labels))
    counts = np.bincount(labels)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    position = (rank + 0.5) / np.maximum(counts[labels], 1)
    mask = np.zeros(len(labels), dtype=bool)
    mask[np.lexsort((mixed, position, rank > 0))[:size]] = True
    return mask


def take_groups(groups: Array, share: float, seed: int) -> Array:
    """A mask of about `share` of the rows, in whole groups."""
    names, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(shuffle_keys(names, seed), kind="stable")
    taken = np.zeros(len(names), dtype=bool)
    taken[order[np.cumsum(sizes[order]) <= max(share * len(groups), sizes[order[:1]].sum())]] = True
    return taken[group]


def hold_out_phrases(phrases: list[str], share: float, seed: int, keys: Array) -> tuple[Array, Array]:
    """Masks (held out, dropped) for a dataset whose rows are phrases of one another.

    A root is a phrase that no other phrase contains, in general a sentence. About `share` of the roots are
    held out, with every phrase that only they contain. A phrase in roots of both sides is dropped. So no
    held-out phrase contains, or is contained in, a training phrase.
    """
    texts = [" ".join(phrase.split()) for phrase in phrases]
    unique = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    first_key = np.zeros(len(unique), dtype=np.uint64)
    index = np.array([unique[text] for text in texts], dtype=np.int64)
    first_key[index] = keys
    inside = _contained_by_root(list(unique), unique)
    roots = np.fromiter(inside, dtype=np.int64, count=len(inside))
    held = np.zeros(len(unique), dtype=bool)
    kept = np.zeros(len(unique), dtype=bool)
    order = roots[np.argsort(shuffle_keys(first_key[roots], seed), kind="stable")]
    for rank, root in enumerate(order.tolist()):
        side = held if rank < share * len(order) else kept
        side[root] = True
        side[inside[root]] = True
    return (held & ~kept)[index], (held & kept)[index]


def _contained_by_root(texts: list[str], unique: dict[str, int]) -> dict[int, list[int]]:
    """The phrases inside each root. Phrases are visited longest first, so that only roots are split up."""
    inside: dict[int, list[int]] = {}
    contained = np.zeros(len(texts), dtype=bool)
    for i in sorted(range(len(texts)), key=lambda i: (-len(texts[i]), texts[i])):
        if contained[i]:
            continue
        text = texts[i]
        spaces = [at for at, letter in enumerate(text) if letter == " "]
        starts, ends = [0, *(at + 1 for at in spaces)], [*spaces, len(text)]
        phrases = {
            unique[part]
            for first, start in enumerate(starts)
            for end in ends[first:]
            if (part := text[start:end]) in unique
        }
        phrases.discard(i)
        inside[i] = sorted(phrases)
        contained[inside[i]] = True
    return inside
