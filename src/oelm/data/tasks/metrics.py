"""What is measured: pure functions from predictions to plain numbers, ready for JSON.

Shares lie between 0 and 1. Only numpy and the standard library are needed.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

# A word is what stands between spaces; a character of a script that has none (kana, Han) is its own.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
Entity = tuple[str, int, int]  # type, first place, place after the last


def classification(labels: Any, predictions: Any, num_classes: int) -> dict[str, Any]:
    """Accuracy, F1 and the confusion matrix (rows = truth).

    All `num_classes` classes count for `f1_macro`; one that is neither present nor predicted has F1 = 0.
    """
    truth, found = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    _check_lengths(len(truth), len(found))
    for name, values in (("label", truth), ("prediction", found)):
        if values.min() < 0 or values.max() >= num_classes:
            raise ValueError(f"a {name} is outside 0..{num_classes - 1}")
    confusion = np.bincount(truth * num_classes + found, minlength=num_classes**2)
    confusion = confusion.reshape(num_classes, num_classes)
    right, support = np.diag(confusion), confusion.sum(axis=1)
    f1 = 2 * right / np.maximum(support + confusion.sum(axis=0), 1)  # = 2 tp / (2 tp + fp + fn)
    return {
        "accuracy": float(right.sum() / len(truth)),
        "f1_macro": float(f1.mean()),
        "f1_weighted": float((f1 * support).sum() / len(truth)),
        "confusion": confusion.tolist(),
    }


def language(nll_sum: float, tokens: int, num_bytes: int) -> dict[str, float]:
    """Mean loss in nats, perplexity and bits per byte of `tokens` predictions that cover `num_bytes` of text.

    Perplexity is inf where it does not fit a float (a loss above 709).
    """
    if tokens < 1 or num_bytes < 1:
        raise ValueError(f"nothing to measure: {tokens} tokens, {num_bytes} bytes")
    loss = float(nll_sum) / tokens
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    return {
        "loss": loss,
        "perplexity": perplexity,
        "bits_per_byte": float(nll_sum) / math.log(2) / num_bytes,
    }


def tagging(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Token accuracy and, where all tags are O, B-* or I-*, precision, recall and F1 of whole entities.

    Entities are read as conlleval does: an I- that continues nothing of its type begins an entity. They
    count when type and extent are right, over all sequences together; no entities at all give 0.
    """
    return tagging_totals(tagged_items(truth, predicted))


def tagged_items(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    """Per sequence: `tags` and how many of them are `right`; and where all tags are O, B-* or I-*:
    `entities`, `entities_predicted`, and how many of those are right (`entities_right`)."""
    _check_lengths(len(truth), len(predicted))
    for number, (true, found) in enumerate(zip(truth, predicted, strict=True)):
        if len(true) != len(found):
            raise ValueError(f"sequence {number} has {len(true)} tags and {len(found)} predictions")
    pairs = [*zip(truth, predicted, strict=True)]
    counts = {
        "tags": [len(true) for true in truth],
        "right": [sum(a == b for a, b in zip(true, found, strict=True)) for true, found in pairs],
    }
    tags = {tag for rows in (truth, predicted) for row in rows for tag in row}
    if all(tag == "O" or tag.startswith(("B-", "I-")) for tag in tags):
        entities = [(_entities(true), _entities(found)) for true, found in pairs]
        counts["entities"] = [len(here) for here, _ in entities]
        counts["entities_predicted"] = [len(there) for _, there in entities]
        counts["entities_right"] = [len(here & there) for here, there in entities]
    return {name: np.array(values, dtype=np.int64) for name, values in counts.items()}


def tagging_totals(items: dict[str, np.ndarray]) -> dict[str, float]:
    """The metrics of `tagging` from the counts of `tagged_items`."""
    total = {name: int(counts.sum()) for name, counts in items.items()}
    scores = {"token_accuracy": _ratio(total["right"], total["tags"])}
    if "entities" not in total:
        return scores
    real, claimed, hits = total["entities"], total["entities_predicted"], total["entities_right"]
    return scores | {
        "entity_precision": _ratio(hits, claimed),
        "entity_recall": _ratio(hits, real),
        "entity_f1": _ratio(2 * hits, real + claimed),
    }


def _entities(tags: Sequence[str]) -> set[Entity]:
    entities: set[Entity] = set()
    start = 0
    inside: str | None = None  # the type of the entity we are in
    for place, tag in enumerate([*tags, "O"]):
        kind = None if tag == "O" else tag[2:]
        if inside is not None and (kind != inside or tag.startswith("B-")):
            entities.add((inside, start, place))
            inside = None
        if kind is not None and inside is None:
            inside, start = kind, place
    return entities


def question_answering(references: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
    """SQuAD's exact match and F1 over words: for each question the best of its references, then the mean.

    A question without references has the right answer "" (and only an empty answer matches an empty one).
    """
    return means(answer_scores(references, predictions))


def answer_scores(references: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, np.ndarray]:
    """Per question: exact match (1 or 0) and F1, each for the best of its references."""
    _check_lengths(len(references), len(predictions))
    exact, overlap = [], []
    for right, answer in zip(references, predictions, strict=True):
        said = _answer_words(answer)
        pairs = [(_answer_words(text), said) for text in right or [""]]
        exact.append(float(max(expected == said for expected, said in pairs)))
        overlap.append(max(_word_f1(expected, said) for expected, said in pairs))
    return {"exact_match": np.array(exact), "f1": np.array(overlap)}


def means(items: dict[str, np.ndarray]) -> dict[str, float]:
    """The mean of every array, added up in the order of the items."""
    return {name: sum(values.tolist()) / len(values) for name, values in items.items()}


def written_texts(references: Sequence[str], predictions: Sequence[str]) -> dict[str, np.ndarray]:
    """Per text: whether it is the reference (1 or 0), and F1 over words, as often as they occur.

    Spaces aside, texts are compared as they stand: case and punctuation count, unlike in SQuAD's answers.
    """
    _check_lengths(len(references), len(predictions))
    pairs = [*zip(references, predictions, strict=True)]
    return {
        "exact_match": np.array([float(plain_text(right) == plain_text(said)) for right, said in pairs]),
        "f1": np.array([_word_f1(_WORD.findall(right), _WORD.findall(said)) for right, said in pairs]),
    }


def plain_text(text: str) -> str:
    """A text with single spaces: what tokenizers do to the others says nothing of a model."""
    return " ".join(text.split())


def _answer_words(text: str) -> list[str]:
    """Lower case, without punctuation and articles, in SQuAD's order of doing so."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _word_f1(expected: list[str], said: list[str]) -> float:
    if not expected or not said:
        return float(expected == said)
    common = (Counter(expected) & Counter(said)).total()
    return 2 * common / (len(expected) + len(said))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _check_lengths(truth: int, predictions: int) -> None:
    if truth != predictions:
        raise ValueError(f"{truth} items and {predictions} predictions; one for each is needed")
    if not truth:
        raise ValueError("nothing to measure: there are no items")
