"""Held-out parts and subsets: fixed by the texts, stratified, nested, and leak-free."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data.dataset import hold_out_phrases, take_groups, take_stratified
from oelm.data.shuffle import permutation, shuffle_keys, text_key

labelled = st.lists(st.integers(0, 3), min_size=1, max_size=200).map(np.array)


def _keys(n: int) -> np.ndarray:
    return np.array([text_key(f"text {i}") for i in range(n)], dtype=np.uint64)


@given(labelled, st.integers(0, 5), st.data())
def test_subsets_are_nested_stratified_and_of_the_size_asked_for(
    labels: np.ndarray, seed: int, data: st.DataObject
) -> None:
    classes = len(np.unique(labels))
    small = data.draw(st.integers(classes, len(labels)))
    large = data.draw(st.integers(small, len(labels)))
    few = take_stratified(_keys(len(labels)), labels, small, seed)
    many = take_stratified(_keys(len(labels)), labels, large, seed)
    assert few.sum() == small
    assert (many | few).sum() == large
    for label in np.unique(labels):
        fair = small * (labels == label).mean()
        assert (labels[few] == label).sum() >= 1
        assert abs((labels[few] == label).sum() - fair) <= classes


@given(labelled, st.randoms())
def test_which_texts_are_taken_does_not_depend_on_the_order_of_the_rows(
    labels: np.ndarray, random: object
) -> None:
    keys = _keys(len(labels))
    order = permutation(len(labels), 3)
    mask = take_stratified(keys, labels, len(labels) // 2, seed=1)
    moved = take_stratified(keys[order], labels[order], len(labels) // 2, seed=1)
    assert set(keys[mask]) == set(keys[order][moved])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200), st.floats(0.05, 0.5))
def test_groups_are_never_parted(groups: list[int], share: float) -> None:
    names = np.array(groups, dtype=np.uint64)
    mask = take_groups(names, share, seed=0)
    assert mask.any()
    assert not set(names[mask]) & set(names[~mask])


words = st.sampled_from(["a", "b", "c", "d", "e", "f", "ab"])
phrases = st.lists(st.lists(words, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=60)


def _inside(part: str, whole: str) -> bool:
    return f" {part} " in f" {whole} "


@given(phrases, st.floats(0.1, 0.5))
def test_no_held_out_phrase_contains_or_lies_in_a_training_phrase(texts: list[str], share: float) -> None:
    keys = np.array([text_key(text) for text in texts], dtype=np.uint64)
    held, dropped = hold_out_phrases(texts, share, 0, keys)
    assert not (held & dropped).any()
    out = [text for text, mine in zip(texts, held, strict=True) if mine]
    train = [text for text, mine, gone in zip(texts, held, dropped, strict=True) if not mine and not gone]
    assert not any(_inside(one, other) or _inside(other, one) for one in out for other in train)
    # Nothing is dropped without need: it lies inside something that is held out and something that is not.
    roots = [text for text in texts if not any(text != other and _inside(text, other) for other in texts)]
    for text in {text for text, gone in zip(texts, dropped, strict=True) if gone}:
        sides = {root in out for root in roots if _inside(text, root)}
        assert sides == {True, False}


def test_keys_are_pinned() -> None:
    """A change would silently change every fixed split and every data order."""
    assert text_key("a film", "of films") == KEY
    assert shuffle_keys(np.arange(3), 1, 2).tolist() == KEYS
    assert permutation(8, 0).tolist() == ORDER


def test_a_pair_is_not_its_concatenation() -> None:
    assert text_key("ab", "c") != text_key("a", "bc")


def test_keys_look_random() -> None:
    low = (shuffle_keys(np.arange(100_000), 5) % np.uint64(64)).astype(int)
    counts = np.bincount(low, minlength=64)
    assert ((counts - 1562.5) ** 2 / 1562.5).sum() == pytest.approx(63, abs=40)  # chi-square, 63 degrees


KEY = 13774770206061871775
KEYS = [10258996963251528848, 6421440969257814226, 7662318359279189528]
ORDER = [5, 0, 4, 3, 6, 7, 2, 1]
