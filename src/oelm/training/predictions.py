"""predictions.npz: a run's predictions for every test item, in a local and in a published form.

In a run's folder the file holds all arrays of an evaluation, one entry per item: `ids`, `groups` (items with
the same number belong together), and those of `labels`, `predictions`, `scores`, counts and item scores that
the kind of task has. The published form keeps what a report is computed from; arrays that all runs of a task
share are stored once in a file of their own, `items-<task>-<digest>.npz`, beside or above the runs.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oelm.errors import UserError
from oelm.system.files import folder_name, replacing
from oelm.system.plugins import load_installed

Array = np.ndarray
FILE = "predictions.npz"
SHARED = ("ids", "groups", "labels", "tokens", "tags", "entities")  # the same in all runs of a task
OWN = ("predictions", "scores", "exact_match", "f1", "right", "entities_predicted", "entities_right")
DIGEST, WRONG = "shared", "wrong"  # entries of the published form only
UNREADABLE = (
    OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError, AttributeError, SyntaxError,
    TypeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


# Metrics of the built-in kinds -> whether larger is better; here, so that a report need not import the kinds.
METRICS = {
    **dict.fromkeys(("accuracy", "f1_macro", "f1_weighted", "f1", "exact_match", "pearson"), True),
    **dict.fromkeys(("token_accuracy", "entity_f1", "entity_precision", "entity_recall"), True),
    **dict.fromkeys(("perplexity", "bits_per_byte", "rmse", "loss"), False),
}


def larger_is_better(metric: str) -> bool:
    """Whether a larger value of a metric is better, by the kind of task that measures it."""
    if metric in METRICS:
        return METRICS[metric]
    from oelm.data.tasks import KINDS

    load_installed()
    for kind in KINDS.values():
        if metric in kind.metrics:
            return kind.metrics[metric]
    raise UserError(f"unknown metric {metric!r}; that of a plugin's task kind needs --plugin")


class ItemScores(NamedTuple):
    """Scores of all items in the order of their ids. The metric is sum(scores) / sum(weights), a perplexity
    the exponential and an RMSE the square root of it. `groups` is None for records that have none."""

    scores: Array  # (N,) float64
    weights: Array  # (N,) float64: 1, or how many tokens, tags or entities an item counts for
    groups: Array | None  # (N,)
    ids: Array  # (N,)


def item_scores(metric: str, arrays: Mapping[str, Array]) -> ItemScores | None:
    """The metric item by item; None if it is not a mean over items (macro F1) or was not recorded. Metrics of
    built-in kinds are computed here, so that a report need not import the kinds (and PyTorch); those of a
    plugin's kind by its `TaskKind.item_scores`."""
    scored: tuple[Array, Array | None] | None = None
    if _recorded(arrays, metric):
        scored = arrays[metric], None
    elif metric == "accuracy" and _recorded(arrays, "predictions", "labels"):
        scored = arrays["predictions"] == arrays["labels"], None
    elif metric == "rmse" and _recorded(arrays, "predictions", "labels"):
        scored = (arrays["predictions"].astype(np.float64) - arrays["labels"]) ** 2, None
    elif metric == "token_accuracy" and _recorded(arrays, "right", "tags"):
        scored = arrays["right"], arrays["tags"]
    elif metric == "entity_f1" and _recorded(arrays, "entities_right", "entities", "entities_predicted"):
        predicted = arrays["entities_predicted"].astype(np.float64)
        scored = 2.0 * arrays["entities_right"], arrays["entities"] + predicted
    elif metric in ("perplexity", "loss") and _recorded(arrays, "scores", "tokens"):
        scored = arrays["scores"], arrays["tokens"]  # nats, of so many tokens
    elif metric not in METRICS:
        from oelm.data.tasks import KINDS

        kind = next((kind for kind in KINDS.values() if metric in kind.metrics), None)
        scored = None if kind is None else kind.item_scores(metric, arrays)
    if scored is None:
        return None
    scores, weights = scored
    order = np.argsort(arrays["ids"], kind="stable")
    weights = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
    groups = arrays["groups"][order] if "groups" in arrays else None
    return ItemScores(scores[order].astype(np.float64), weights, groups, arrays["ids"][order])


def _recorded(arrays: Mapping[str, Array], *names: str) -> bool:
    """Whether all of these arrays exist, with one number per item."""
    return all(name in arrays and arrays[name].ndim == 1 for name in names)


def compact(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: _smallest(values) for name, values in arrays.items()}


def _smallest(values: Array) -> Array:
    """The values in their smallest type: integers exactly, others as float32, class probabilities (two axes)
    as float16."""
    if values.dtype.kind == "f":
        if values.ndim > 1 or not np.isin(values, (0, 1)).all():
            return values.astype(np.float16 if values.ndim > 1 else np.float32)
        values = values.astype(np.uint8)  # right or wrong
    if values.dtype.kind not in "iu" or not values.size:
        return values
    low, high = int(values.min()), int(values.max())
    kinds = (np.uint8, np.uint16, np.uint32, np.uint64) if low >= 0 else (np.int8, np.int16, np.int32)
    fits = (kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return values.astype(next(fits, values.dtype))


def write_predictions(folder: Path, arrays: Mapping[str, Array]) -> None:
    _write(folder / FILE, compact(arrays))


def publish_predictions(folder: Path, arrays: Mapping[str, Array], root: Path, task: str) -> None:
    """Write the published form into a run's folder below `root`, and the shared arrays once into `root`.
    Texts, class probabilities and positions in a text are left out. Predicted classes are written as label
    XOR prediction, which is mostly zeros and compresses well."""
    arrays = compact(arrays)
    shared = {name: arrays[name] for name in SHARED if _numbers(arrays, name)}
    own = {name: arrays[name] for name in OWN if _numbers(arrays, name)}
    if "scores" in own and "tokens" not in shared:
        del own["scores"]  # scores of answer spans, which no report uses
    if _numbers(own, "predictions", "iu") and _numbers(shared, "labels", "iu"):
        own[WRONG] = _smallest(np.bitwise_xor(own.pop("predictions"), shared["labels"]))
    digest = _digest(shared)
    path = root / f"items-{folder_name(task, 60)}-{digest[:12]}.npz"
    if not path.exists():
        _write(path, shared)
    _write(folder / FILE, own | {DIGEST: np.frombuffer(bytes.fromhex(digest), dtype=np.uint8)})


def _numbers(arrays: Mapping[str, Array], name: str, kinds: str = "iuf") -> bool:
    return name in arrays and arrays[name].ndim == 1 and arrays[name].dtype.kind in kinds


def read_predictions(folder: Path) -> dict[str, Array] | None:
    """The arrays of a run's folder, from either form; None if they are missing or damaged."""
    try:
        arrays = _read(folder / FILE)
        if DIGEST not in arrays:
            return arrays
        digest = arrays.pop(DIGEST).tobytes().hex()
        shared = _find_shared(folder, digest)
        if shared is None:
            return None
        if WRONG in arrays:
            arrays["predictions"] = np.bitwise_xor(arrays.pop(WRONG), shared["labels"])
        return shared | arrays
    except UNREADABLE:
        return None


def is_published(folder: Path) -> bool:
    """Whether a run's folder holds the published form, which needs the shared file to be complete."""
    try:
        return DIGEST in _read(folder / FILE)
    except UNREADABLE:
        return False


def _find_shared(folder: Path, digest: str) -> dict[str, Array] | None:
    """The shared arrays of this digest, from the nearest folder above that has them."""
    folder = folder.resolve()
    for above in (folder, *folder.parents):
        for path in above.glob(f"items-*-{digest[:12]}.npz"):
            if path.is_symlink():  # records of someone else may contain links to other files
                continue
            shared = _read(path)
            return shared if _digest(shared) == digest else None
    return None


def _digest(arrays: Mapping[str, Array]) -> str:
    """The SHA-256 of the arrays' contents, independent of the compression."""
    total = hashlib.sha256()
    for name, values in sorted(arrays.items()):
        total.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        total.update(np.ascontiguousarray(values).tobytes())
    return total.hexdigest()


def _write(path: Path, arrays: Mapping[str, Array]) -> None:
    with replacing(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _read(path: Path) -> dict[str, Array]:
    if not path.is_file():  # reading a pipe would block
        raise FileNotFoundError(path)
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # np.load leaves it open
        return {name: arrays[name] for name in arrays.files}
