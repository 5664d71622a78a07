"""Which rows are held out: functions of the texts, the labels and a seed, never of the order of the rows."""

import numpy as np

from oelm.data.shuffle import shuffle_keys

Array = np.ndarray


def stratified_order(keys: Array, labels: Array, seed: int) -> Array:
    """All rows in an order of which every prefix is stratified, so that prefixes are nested subsets.

    First one row of each class, so that no class is missing; then row number r of the n rows of its
    class at the place (r + 1/2) / n. `keys` (one per text) and the seed decide r.
    """
    mixed = shuffle_keys(keys, seed)
    by_class = np.lexsort((mixed, labels))
    counts = np.bincount(labels)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = (rank + 0.5) / np.maximum(counts[labels], 1)
    return np.lexsort((mixed, place, rank > 0))


def take_stratified(keys: Array, labels: Array, size: int, seed: int) -> Array:
    """A mask of `size` rows in the classes' own proportions; nested: a larger size only adds rows."""
    mask = np.zeros(len(labels), dtype=bool)
    mask[stratified_order(keys, labels, seed)[:size]] = True
    return mask


def take_groups(keys: Array, groups: Array, share: float, seed: int) -> Array:
    """A mask of about `share` of the rows in whole groups: rows of one group are never parted."""
    names, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(shuffle_keys(names, seed), kind="stable")
    taken = np.zeros(len(names), dtype=bool)
    taken[order[np.cumsum(sizes[order]) <= max(share * len(keys), sizes[order[:1]].sum())]] = True
    return taken[group]


def hold_out_phrases(phrases: list[str], share: float, seed: int, keys: Array) -> tuple[Array, Array]:
    """Masks (held out, dropped) for a set whose rows are phrases of one another.

    A root is a phrase that lies in no other; roots stand for sentences. About `share` of them are held
    out with every phrase that lies only in them. A phrase that lies in roots of both sides belongs to
    neither and is dropped. So no held-out phrase contains, or is contained in, a training phrase.
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
    for place, root in enumerate(order.tolist()):
        side = held if place < share * len(order) else kept
        side[root] = True
        side[inside[root]] = True
    return (held & ~kept)[index], (held & kept)[index]


def _contained_by_root(texts: list[str], unique: dict[str, int]) -> dict[int, list[int]]:
    """For each root the phrases inside it. Longest first, so that only roots are ever taken apart."""
    inside: dict[int, list[int]] = {}
    contained = np.zeros(len(texts), dtype=bool)
    for i in sorted(range(len(texts)), key=lambda i: (-len(texts[i]), texts[i])):
        if contained[i]:
            continue
        text = texts[i]
        gaps = [at for at, letter in enumerate(text) if letter == " "]
        starts, ends = [0, *(at + 1 for at in gaps)], [*gaps, len(text)]
        found = {
            unique[part]
            for first, start in enumerate(starts)
            for end in ends[first:]
            if (part := text[start:end]) in unique
        }
        found.discard(i)
        inside[i] = sorted(found)
        contained[inside[i]] = True
    return inside
