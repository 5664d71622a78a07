"""How the weights of the reference GPT start, each drawn by a generator of its own: gpt.py has the table.

None depends on another, so a run whose shapes are known early has them drawn by a thread while Python imports
torch and transformers, and a large model by several threads. What is drawn is the same either way.
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
Asked = tuple[int, str, tuple[int, ...], int]  # the arguments of `initial_value`
MOST_AHEAD = 1 << 28  # numbers: 1 GiB of a model that is not built yet, or of several that are equal
LARGE = 1 << 26  # numbers that take one thread half a second
_AHEAD: dict[Asked, "Future[Array]"] = {}
_LATER: deque[Callable[[], None]] = deque()  # each starts to draw one more
_KEPT: dict[Asked, Array] = {}  # while `drawn_once` lasts, up to so many numbers
_keeps = 0


def initial_value(seed: int, name: str, shape: tuple[int, ...], heads: int) -> Array:
    """The first value of a weight, by its name in `OelmGPTModel`. Q and K are drawn head by head, the same
    draws as blocks of the kind "normal", in float64."""
    key = (seed, name, shape, heads)
    if key in _KEPT:
        return _KEPT[key]
    drawn = _AHEAD.pop(key, None)
    if drawn is None:
        value = _draw(*key)
    else:
        if _LATER:
            _LATER.popleft()()
        value = drawn.result()
    if sum(kept.size for kept in _KEPT.values()) + value.size <= _keeps:
        _KEPT[key] = value
    return value


@contextlib.contextmanager
def drawn_once() -> Iterator[None]:
    """Draw each weight once for all models that are built while this lasts, if there is memory for that."""
    global _keeps
    _keeps = MOST_AHEAD
    try:
        yield
    finally:
        _keeps = 0
        _KEPT.clear()


@contextlib.contextmanager
def drawn_together(asked: Iterable[Asked], threads: int) -> Iterator[None]:
    """Draw the weights of a large model by so many threads, a few of them before it asks for them, in this
    order."""
    left = [key for key in asked if key not in _AHEAD and key not in _KEPT]
    if threads < 2 or sum(math.prod(shape) for _, _, shape, _ in left) < LARGE:
        yield
        return

    def draw(key: Asked) -> None:
        _AHEAD[key] = pool.submit(_draw, *key)

    with ThreadPoolExecutor(threads) as pool:
        _LATER.extend(partial(draw, key) for key in left)
        for _ in range(min(2 * threads, len(left))):
            _LATER.popleft()()
        try:
            yield
        finally:
            _LATER.clear()
            for key in left:
                _AHEAD.pop(key, None)


@contextlib.contextmanager
def drawn_ahead(config: RunConfig) -> Iterator[None]:
    """Draw the weights of a run that names a size and a prepared dataset in a thread, in the order in which
    its model asks for them. Nothing happens where they are not known yet."""
    if wanted := _wanted(config):
        _AHEAD.update({asked: Future() for asked in wanted})
        threading.Thread(target=_draw_all, args=(dict(_AHEAD),), daemon=True).start()
    try:
        yield
    finally:
        _AHEAD.clear()


def _wanted(config: RunConfig) -> list[Asked]:
    size, data = SIZES.get(config.model.name or ""), config.task.data
    if size is None or data is None:
        return []
    try:
        vocabulary = int(json.loads(Path(data, "store.json").read_text())["tokenizer"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):  # no prepared dataset, or none that can be read
        return []
    asked, left = [], MOST_AHEAD
    for name, shape in _weights(*size, vocabulary):
        left -= math.prod(shape)
        if left >= 0:
            asked.append((config.training.seed, name, shape, size[2]))
    return asked


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


def _draw_all(asked: dict[Asked, "Future[Array]"]) -> None:
    for key, drawn in asked.items():
        try:
            drawn.set_result(_draw(*key))
        except BaseException as error:  # for the one who asks
            drawn.set_exception(error)


def _draw(seed: int, name: str, shape: tuple[int, ...], heads: int) -> Array:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        width = shape[1]
        return to_weight(draw_blocks("normal", width, heads, width // heads, seed=seed, name=name))
    value = generator(seed, name).standard_normal(shape, dtype="float32")
    value *= NORMAL_STD
    return value
