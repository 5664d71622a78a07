"""Metrics against scikit-learn, worked examples and what must hold for any input."""

import json
import math
import re
import string

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oelm.data.tasks.classification import classification_metrics as classification
from oelm.data.tasks.language_modeling import language_metrics as language
from oelm.data.tasks.question_answering import answer_scores, means
from oelm.data.tasks.token_classification import tag_counts, tagging_metrics


def tagging(truth, predicted):
    return tagging_metrics(tag_counts(truth, predicted))


def question_answering(right, answers):
    return means(answer_scores(right, answers))


@st.composite
def predictions(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    classes = draw(st.integers(2, 6))
    rows = draw(st.lists(st.tuples(*[st.integers(0, classes - 1)] * 2), min_size=1, max_size=60))
    return [a for a, _ in rows], [b for _, b in rows], classes


@settings(deadline=None)  # the first call imports scikit-learn
@given(predictions())
def test_classification_agrees_with_scikit_learn(made: tuple[list[int], list[int], int]) -> None:
    from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

    truth, found, classes = made
    labels = list(range(classes))
    scores = classification(np.array(truth), found, classes)
    assert scores["accuracy"] == pytest.approx(accuracy_score(truth, found))
    for average in ("macro", "weighted"):
        expected = f1_score(truth, found, labels=labels, average=average, zero_division=0)
        assert scores[f"f1_{average}"] == pytest.approx(expected)
    assert scores["confusion"] == confusion_matrix(truth, found, labels=labels).tolist()
    assert json.loads(json.dumps(scores)) == scores


def test_a_class_nobody_has_or_predicts_still_counts_for_macro_f1() -> None:
    scores = classification([0, 1], [0, 1], num_classes=4)
    assert scores["accuracy"] == scores["f1_weighted"] == 1
    assert scores["f1_macro"] == 0.5


@given(st.floats(0, 700), st.integers(1, 10**12), st.integers(1, 10**13))
def test_the_three_language_figures_say_the_same(loss: float, tokens: int, num_bytes: int) -> None:
    scores = language(loss * tokens, tokens, num_bytes)
    assert scores["loss"] == pytest.approx(loss)
    assert math.log(scores["perplexity"]) == pytest.approx(loss, abs=1e-12)
    assert scores["bits_per_byte"] == pytest.approx(loss * tokens / num_bytes / math.log(2))


def test_a_uniform_guess_over_bytes_costs_eight_bits() -> None:
    scores = language(1000 * math.log(256), 1000, 1000)
    assert scores["perplexity"] == pytest.approx(256)
    assert scores["bits_per_byte"] == pytest.approx(8)


def test_perplexity_does_not_overflow_and_nan_stays_visible() -> None:
    assert math.isfinite(language(709.0, 1, 1)["perplexity"])
    assert language(1e6, 1, 1)["perplexity"] == math.inf
    assert math.isnan(language(math.nan, 1, 1)["perplexity"])


# Worked by hand from conlleval's rules; 43,561 random cases were also compared with seqeval 1.2.2.
@pytest.mark.parametrize(
    ("truth", "predicted", "precision", "recall"),
    [
        ("B-A I-A O B-B", "B-A I-A O B-B", 1, 1),
        ("B-A I-A O", "B-A O O", 0, 0),  # half an entity is none
        ("B-A I-A O", "I-A I-A O", 1, 1),  # an I- after O begins an entity
        ("O B-A O", "O I-A O", 1, 1),
        ("B-A B-A", "B-A I-A", 0, 0),  # two entities against one
        ("B-A I-A", "B-A I-B", 0, 0),  # a change of type ends one and begins another
        ("B-A B-B", "B-A I-B", 1, 1),
        ("B-A O B-B O", "B-A O B-A B-B", 1 / 3, 1 / 2),
        ("B-A O", "O O", 0, 0),
        ("O O", "B-A O", 0, 0),
        ("O O", "O O", 0, 0),
        ("B-A-B I-A-B", "B-A-B I-A-B", 1, 1),
    ],
)
def test_entities_are_counted_as_conlleval_counts_them(
    truth: str, predicted: str, precision: float, recall: float
) -> None:
    scores = tagging([truth.split()], [predicted.split()])
    assert scores["entity_precision"] == pytest.approx(precision)
    assert scores["entity_recall"] == pytest.approx(recall)
    both = precision + recall
    assert scores["entity_f1"] == pytest.approx(2 * precision * recall / both if both else 0)


spans = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.sampled_from(["PER", "ORG"])), max_size=6)


def _written(placed: list[tuple[int, int, str]]) -> tuple[list[str], set[tuple[str, int, int]]]:
    """Spans as (gap before, length, type) to 40 tags and to what was meant."""
    tags, meant = [], set()
    for gap, length, kind in placed:
        tags += ["O"] * gap
        meant.add((kind, len(tags), len(tags) + length))
        tags += [f"B-{kind}", *[f"I-{kind}"] * (length - 1)]
    return tags + ["O"] * (40 - len(tags)), meant


@given(st.lists(st.tuples(spans, spans), min_size=1, max_size=4))
def test_well_formed_entities_are_found_again(rows: list[tuple[list, list]]) -> None:
    truth = [_written(a) for a, _ in rows]
    found = [_written(b) for _, b in rows]
    hits = sum(len(a & b) for (_, a), (_, b) in zip(truth, found, strict=True))
    real, claimed = sum(len(a) for _, a in truth), sum(len(b) for _, b in found)
    scores = tagging([tags for tags, _ in truth], [tags for tags, _ in found])
    assert scores["entity_precision"] == pytest.approx(hits / claimed if claimed else 0)
    assert scores["entity_recall"] == pytest.approx(hits / real if real else 0)
    assert scores["entity_f1"] == pytest.approx(2 * hits / (real + claimed) if real + claimed else 0)


any_tags = st.lists(st.sampled_from(["O", "B-A", "I-A", "B-B", "I-B"]), max_size=12)


@given(st.lists(any_tags, min_size=1, max_size=5))
def test_a_perfect_tagger_is_perfect_and_an_entity_ends_with_its_sequence(rows: list[list[str]]) -> None:
    assume(any(tag != "O" for row in rows for tag in row))
    assert set(tagging(rows, rows).values()) == {1.0}
    joined = [[tag for row in rows for tag in [*row, "O"]]]
    swapped = [["I-A" if tag == "B-A" else tag for tag in row] for row in rows]
    flat = [[tag for row in swapped for tag in [*row, "O"]]]
    one, other = tagging(rows, swapped), tagging(joined, flat)
    assert one["entity_f1"] == pytest.approx(other["entity_f1"])


def test_other_tags_have_no_entities() -> None:
    assert tagging([["NN", "VB"], ["DT"]], [["NN", "NN"], ["DT"]]) == {"token_accuracy": pytest.approx(2 / 3)}
    assert tagging([["O", "B-A"]], [["O", "NN"]]) == {"token_accuracy": 0.5}


@pytest.mark.parametrize(
    ("references", "prediction", "exact", "f1"),
    [
        (["The Denver Broncos"], "denver broncos!", 1, 1),
        (["Denver Broncos", "Broncos"], "the Broncos", 1, 1),
        (["Denver Broncos"], "Broncos", 0, 2 / 3),
        (["a b c d"], "b c x", 0, 2 * 2 / (3 + 3)),  # "a" is an article
        (["to be or not to be"], "to be", 0, 2 * 2 / (6 + 2)),
        (["well-known"], "well known", 0, 0),  # punctuation goes without leaving a space
        (["theatre"], "atre", 0, 0),  # articles are whole words
        (["U.S."], "us", 1, 1),
        (["Denver"], "", 0, 0),
        ([], "", 1, 1),
        ([], "Denver", 0, 0),
    ],
)
def test_answers_are_compared_as_squad_does(
    references: list[str], prediction: str, exact: float, f1: float
) -> None:
    scores = question_answering([references], [prediction])
    assert scores == {"exact_match": pytest.approx(exact), "f1": pytest.approx(f1)}


words = st.lists(st.sampled_from(["cat", "dog", "the", "An", "sun,", "1990"]), max_size=6).map(" ".join)


@given(st.lists(st.tuples(st.lists(words, min_size=1, max_size=3), words), min_size=1, max_size=6))
def test_exact_answers_are_full_answers_and_questions_are_averaged(rows: list) -> None:
    scores = question_answering([a for a, _ in rows], [b for _, b in rows])
    single = [question_answering([a], [b]) for a, b in rows]
    assert all(0 <= each["exact_match"] <= each["f1"] <= 1 for each in single)
    for name in ("exact_match", "f1"):
        assert scores[name] == pytest.approx(np.mean([each[name] for each in single]))


@given(words, st.randoms())
def test_case_punctuation_and_spaces_do_not_matter(text: str, random: object) -> None:
    noisy = re.sub(" ", "  ", text.upper()) + random.choice(string.punctuation)  # type: ignore[attr-defined]
    assert question_answering([[text]], [noisy]) == {"exact_match": 1, "f1": 1}
