"""A run's test metric as a mean of values of independent test items, for estimating its variance over items.

Items that belong together (hypotheses of one premise, windows of one document) are one cluster: only
clusters are independent. A metric that is not a mean (macro F1, an F1 over entities, RMSE, a correlation) is
a function of sums over items, and a cluster's value is its jackknife pseudo-value.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from oelm.training.predictions import item_scores, larger_is_better

Array = np.ndarray
MEANS = ("accuracy", "perplexity")  # of items, as every record has them
ROUNDING = 1e-3  # of scores that were saved in single precision


class ItemValues(NamedTuple):
    """One entry per cluster, in the order of the clusters. The mean of `values` weighted by `sizes` is the
    metric or, where smaller is better, its logarithm (of bits per byte up to a constant)."""

    values: Array  # (C,)
    sizes: Array  # (C,)
    items: int


def item_values(metric: str, arrays: Mapping[str, Array]) -> ItemValues | None:
    """The metric by cluster; None if a run did not record the columns it needs."""
    order = np.argsort(arrays["ids"], kind="stable")
    arrays = {name: column[order] for name, column in arrays.items()}
    if metric in FUNCTIONS:
        columns, function = FUNCTIONS[metric]
        try:
            rows = columns(arrays)
        except KeyError:
            return None
        sums = _by_cluster(rows, arrays.get("groups"))
        return ItemValues(_pseudo_values(sums, function), np.ones(len(sums)), len(rows))
    items = item_scores(metric, arrays)
    if items is None:
        return None
    sums = _by_cluster(np.stack([items.scores, items.weights], 1), items.groups)
    sums = sums[sums[:, 1] > 0]
    if metric == "perplexity" or larger_is_better(metric):  # a perplexity's scores are logarithms already
        return ItemValues(sums[:, 0] / sums[:, 1], sums[:, 1], len(items.scores))
    return ItemValues(_pseudo_values(sums, _log_mean), np.ones(len(sums)), len(items.scores))


def agrees(metric: str, values: ItemValues, test: float) -> bool:
    """Whether the items give the test score of the run; if not, they are of another run or were changed."""
    if metric not in MEANS:
        return True
    score = test if larger_is_better(metric) else np.log(test)
    return bool(abs(np.average(values.values, weights=values.sizes) - score) < ROUNDING)


def stand_in_values(
    metric: str, arrays: Mapping[str, Array], other: float, score: float
) -> ItemValues | None:
    """The metric by cluster of a trivial baseline with this score; `arrays` are those of a run on the same
    items whose score is `other`.

    For classes, the values of always predicting the class that gives this score. Otherwise every cluster has
    the same value, so that the baseline does not vary over items.
    """
    if metric in ("accuracy", "f1_macro", "f1_weighted") and "labels" in arrays:
        for label in np.unique(arrays["labels"]):
            answers = {**arrays, "predictions": np.full_like(arrays["labels"], label)}
            values = item_values(metric, answers)
            if values is not None and abs(np.average(values.values, weights=values.sizes) - score) < 1e-6:
                return values
    measured = item_values(metric, arrays)
    if measured is None:
        return None
    shift = score - other if larger_is_better(metric) else np.log(score / other)
    mean = np.average(measured.values, weights=measured.sizes) + shift
    return measured._replace(values=np.full(len(measured.values), mean))


def _by_cluster(rows: Array, groups: Array | None) -> Array:
    """Sums (C, k) of the rows (N, k) of each cluster; without groups every row is one."""
    if groups is None:
        return rows
    _, numbers = np.unique(groups, return_inverse=True)
    return np.stack([np.bincount(numbers, column) for column in rows.T], 1)


def _pseudo_values(sums: Array, function: Callable[[Array], Array]) -> Array:
    """What each cluster contributes to a function of the sums; their mean is the function's value."""
    total, clusters = sums.sum(axis=0), len(sums)
    whole = function(total)
    values = clusters * whole - (clusters - 1) * function(total - sums)
    return values + (whole - values.mean())


def _classes(arrays: Mapping[str, Array]) -> Array:
    """Three columns per class, for each item: twice whether it is a true positive, how often it is the label
    or the prediction, whether it is the label."""
    labels, predictions = (arrays[name].astype(np.int64) for name in ("labels", "predictions"))
    classes = int(max(labels.max(), predictions.max())) + 1
    actual, predicted = np.eye(classes)[labels], np.eye(classes)[predictions]
    return np.concatenate([2 * actual * predicted, actual + predicted, actual], axis=1)


def _macro_f1(sums: Array) -> Array:
    twice_correct, labelled_or_predicted, _ = np.split(sums, 3, axis=-1)
    return (twice_correct / np.maximum(labelled_or_predicted, 1)).mean(axis=-1)


def _weighted_f1(sums: Array) -> Array:
    twice_correct, labelled_or_predicted, labelled = np.split(sums, 3, axis=-1)
    return (twice_correct / np.maximum(labelled_or_predicted, 1) * labelled).sum(axis=-1) / labelled.sum(
        axis=-1
    )


def _entities(arrays: Mapping[str, Array]) -> Array:
    names = ("entities_right", "entities", "entities_predicted")
    return np.stack([arrays[name].astype(np.float64) for name in names], 1)


def _nats(arrays: Mapping[str, Array]) -> Array:
    return np.stack([arrays["scores"].astype(np.float64), arrays["tokens"]], 1)


def _log_mean(sums: Array) -> Array:
    return np.log(sums[..., 0] / sums[..., 1])


def _numbers(arrays: Mapping[str, Array]) -> Array:
    x, y = (arrays[name].astype(np.float64) for name in ("predictions", "labels"))
    x, y = x - y.mean(), y - y.mean()
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], 1)


def _log_rmse(sums: Array) -> Array:
    n, _, _, xx, yy, xy = np.moveaxis(sums, -1, 0)
    return 0.5 * np.log((xx + yy - 2 * xy) / n)


def _correlation(sums: Array) -> Array:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    return (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))


# Metrics that are functions of sums over items: what is summed, and the function.
FUNCTIONS: dict[str, tuple[Callable[[Mapping[str, Array]], Array], Callable[[Array], Array]]] = {
    "f1_macro": (_classes, _macro_f1),
    "f1_weighted": (_classes, _weighted_f1),
    "entity_f1": (_entities, lambda sums: 2 * sums[..., 0] / np.maximum(sums[..., 1] + sums[..., 2], 1)),
    "entity_recall": (_entities, lambda sums: sums[..., 0] / np.maximum(sums[..., 1], 1)),
    "entity_precision": (_entities, lambda sums: sums[..., 0] / np.maximum(sums[..., 2], 1)),
    "loss": (_nats, _log_mean),
    "bits_per_byte": (_nats, _log_mean),
    "rmse": (_numbers, _log_rmse),
    "pearson": (_numbers, _correlation),
}
