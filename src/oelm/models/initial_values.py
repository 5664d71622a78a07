"""The initial weights of the reference GPT, each drawn by a generator of its own; gpt.py has the table.

They do not depend on one another. So a run whose shapes are known early draws them in a thread while Python
imports torch and transformers, and a large model draws them in several threads. The values are always the
same.
"""

import contextlib
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from oelm.config import RunConfig
from oelm.models.gpt_sizes import SIZES
from oelm.orthogonal import NORMAL_STD, draw_blocks, generator, to_weight

Array = np.ndarray
DrawKey = tuple[int, str, tuple[int, ...], int]  # the arguments of `initial_value`
MOST_AHEAD = 1 << 28  # numbers (1 GiB) that are drawn before the model is built, or kept for several models
LARGE = 1 << 26  # numbers that take one thread half a second
_FUTURES: dict[DrawKey, "Future[Array]"] = {}
_DEFERRED: deque[Callable[[], None]] = deque()  # calls that start to draw the next weight
_KEPT: dict[DrawKey, Array] = {}  # within `sharing_draws`: drawn weights, of at most `_keeps` numbers
_keeps = 0


def initial_value(seed: int, name: str, shape: tuple[int, ...], heads: int) -> Array:
    """The initial value of a weight, by its name in `OelmGPTModel`. Q and K are drawn head by head in
    float64, as blocks of the kind "normal"."""
    key = (seed, name, shape, heads)
    if key in _KEPT:
        return _KEPT[key]
    drawn = _FUTURES.pop(key, None)
    if drawn is None:
        value = _draw(*key)
    else:
        if _DEFERRED:
            _DEFERRED.popleft()()
        value = drawn.result()
    if sum(kept.size for kept in _KEPT.values()) + value.size <= _keeps:
        _KEPT[key] = value
    return value


@contextlib.contextmanager
def sharing_draws() -> Iterator[None]:
    """A context in which each weight is drawn once for all models that are built, up to MOST_AHEAD
    numbers."""
    global _keeps
    _keeps = MOST_AHEAD
    try:
        yield
    finally:
        _keeps = 0
        _KEPT.clear()


@contextlib.contextmanager
def drawing_in_threads(keys: Iterable[DrawKey], threads: int) -> Iterator[None]:
    """A context in which the weights of a large model are drawn by several threads, in the order of `keys`, a
    few of them ahead of `initial_value`."""
    left = [key for key in keys if key not in _FUTURES and key not in _KEPT]
    if threads < 2 or sum(math.prod(shape) for _, _, shape, _ in left) < LARGE:
        yield
        return

    def draw(key: DrawKey) -> None:
        _FUTURES[key] = pool.submit(_draw, *key)

    with ThreadPoolExecutor(threads) as pool:
        _DEFERRED.extend(partial(draw, key) for key in left)
        for _ in range(min(2 * threads, len(left))):
            _DEFERRED.popleft()()
        try:
            yield
        finally:
            _DEFERRED.clear()
            for key in left:
                _FUTURES.pop(key, None)


@contextlib.contextmanager
def drawing_ahead(config: RunConfig) -> Iterator[None]:
    """A context in which a thread draws the weights of a run ahead, in the order in which its model needs
    them. It does nothing unless the run names a size and a prepared dataset, which give their shapes."""
    if wanted := _wanted(config):
        _FUTURES.update({key: Future() for key in wanted})
        threading.Thread(target=_draw_all, args=(dict(_FUTURES),), daemon=True).start()
    try:
        yield
    finally:
        _FUTURES.clear()


def _wanted(config: RunConfig) -> list[DrawKey]:
    size, data = SIZES.get(config.model.name or ""), config.task.data
    if size is None or data is None:
        return []
    try:
        vocabulary = int(json.loads(Path(data, "store.json").read_text())["tokenizer"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):  # not a prepared dataset, or a damaged one
        return []
    keys, left = [], MOST_AHEAD
    for name, shape in _weights(*size, vocabulary):
        left -= math.prod(shape)
        if left >= 0:
            keys.append((config.training.seed, name, shape, size[2]))
    return keys


def _weights(
    layers: int, width: int, _: int, positions: int, vocabulary: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (vocabulary, width)
    yield "wpe.weight", (positions, width)
    for layer in range(layers):
        for part in "qkvo":
            yield f"h.{layer}.attn.{part}_proj.weight", (width, width)
        yield f"h.{layer}.mlp.fc_in.weight", (4 * width, width)
        yield f"h.{layer}.mlp.fc_out.weight", (width, 4 * width)


def _draw_all(futures: dict[DrawKey, "Future[Array]"]) -> None:
    for key, future in futures.items():
        try:
            future.set_result(_draw(*key))
        except BaseException as error:  # raised by the thread that reads the result
            future.set_exception(error)


def _draw(seed: int, name: str, shape: tuple[int, ...], heads: int) -> Array:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        width = shape[1]
        return to_weight(draw_blocks("normal", width, heads, width // heads, seed=seed, name=name))
    value = generator(seed, name).standard_normal(shape, dtype="float32")
    value *= NORMAL_STD
    return value
