"""Answers to lines of text: lines are encoded ahead, batched by length, and answered in order."""

import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oelm.data.batches import Plan
from oelm.data.tasks.base import Items, Reader
from oelm.errors import UserError
from oelm.system.terminal import say
from oelm.training.evaluate import tokens_at_once
from oelm.training.parallel import autocast_of
from oelm.training.step import fast_forward

LINES, LETTERS = 8_192, 1 << 22  # the most in a chunk, whose items are sorted by length together
CPU_TOKENS = 4_096  # of a batch on a CPU, to fit its caches; with four times as many it takes a fifth longer
AHEAD = 2  # chunks that are encoded while the model computes another
LONGEST_LINE = 1 << 26  # bytes
PAUSE = 0.5  # seconds for collecting a chunk; lines that come more slowly are answered at once

SILENCE = 2.0  # seconds without a first line after which it is said what is waited for


@dataclass
class Counts:
    """Numbers of lines: answered, empty among them, and cut."""

    done: int = 0
    empty: int = 0
    cut: int = 0


def predict(
    reader: Reader, lines: Iterable[str | None], precision: str, counts: Counts
) -> Iterator[dict[str, Any]]:
    """The answer to every line, with the keys of `Reader.says`; all values are None for an empty line. A line
    that is None marks a pause of the input. If a line cannot be read, all before it are answered first."""
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting: deque[tuple[list[str], Future[Items | None]]] = deque()
        for chunk, late in chunks(_readable(reader, lines)):
            waiting.append((chunk, pool.submit(_encode, reader, chunk)))
            while len(waiting) > (0 if late else AHEAD):
                chunk, encoded = waiting.popleft()
                yield from _answers(reader, chunk, encoded.result(), precision, counts)


def _readable(reader: Reader, lines: Iterable[str | None]) -> Iterator[str | None]:
    number = 0
    for line in lines:
        number += line is not None
        if line and line.strip() and (problem := reader.problem(line)):
            raise UserError(f"line {number} {problem}")
        yield line


def chunks(lines: Iterable[str | None]) -> Iterator[tuple[list[str], bool]]:
    """Chunks of lines that are encoded and sorted together, each with whether it must be answered at once,
    because the next lines are late or it is the last chunk."""
    chunk: list[str] = []
    letters, began = 0, time.monotonic()
    refused: UserError | None = None
    try:
        for line in lines:
            if line is not None:
                chunk.append(line)
                letters += len(line)
            late = line is None or time.monotonic() - began > PAUSE
            if late or len(chunk) >= LINES or letters >= LETTERS:
                yield chunk, late
                chunk, letters, began = [], 0, time.monotonic()
    except UserError as error:
        refused = error
    yield chunk, True
    if refused is not None:
        raise refused


def _encode(reader: Reader, chunk: list[str]) -> Items | None:
    nonempty = [line for line in chunk if line.strip()]
    return reader.encode(nonempty) if nonempty else None


def _answers(
    reader: Reader, chunk: list[str], items: Items | None, precision: str, counts: Counts
) -> Iterator[dict[str, Any]]:
    outputs = [] if items is None else outputs_of(reader, items, precision)
    counts.cut += 0 if items is None else items.cut
    number = end = 0  # of the nonempty line, and of the item after its last one
    for line in chunk:
        answer: dict[str, Any] = dict.fromkeys(reader.says)
        counts.done, counts.empty = counts.done + 1, counts.empty + 1
        if items is not None and line.strip():
            begin, end = end, end + 1
            if items.line is not None:
                end = int(np.searchsorted(items.line, number, side="right"))
            if outputs[begin] is not None:
                answer = reader.answer(line, items, range(begin, end), outputs[begin:end])
                counts.empty -= 1
            number += 1
        yield {"text": line, **answer}


@torch.inference_mode()
def outputs_of(reader: Reader, items: Items, precision: str) -> list[Any]:
    """The model's outputs for every item; None for items without text."""
    outputs: list[Any] = [None] * len(items.lengths)
    read = np.flatnonzero(items.lengths > items.template)
    if not len(read):
        return outputs
    device, lengths = reader.model.device, items.lengths[read]
    tokens = tokens_at_once(device, reader.vocabulary)
    if device.type == "cpu":
        tokens = min(tokens, CPU_TOKENS)
    epoch = Plan(lengths, batch_tokens=max(tokens, int(lengths.max()))).epoch()
    autocast = autocast_of(precision, device)
    computed: list[tuple[np.ndarray, tuple[Any, ...]]] = []
    with fast_forward(reader.model, precision) as packs:
        for step in range(len(epoch)):
            chosen = read[epoch.batch(step)]
            batch = reader.batch(items, chosen, packs and reader.packable).to(device)
            second = None if items.second is None else items.second[chosen]
            with autocast():
                computed.append((chosen, reader.outputs(batch.arguments(), second)))
    for chosen, columns in computed:  # waits for the GPU only here
        rows = [column.cpu().numpy() if isinstance(column, Tensor) else column for column in columns]
        for item, *values in zip(chosen.tolist(), *rows, strict=True):
            outputs[item] = values
    return outputs


def open_lines(path: Path) -> Iterator[str | None]:
    """The lines of a text file, or of standard input for "-". If the first one does not come within SILENCE,
    because a pipe has no writer or nobody types, a note on standard error says what is waited for."""
    lines = _lines_in(path)
    where = "standard input" if str(path) == "-" else path
    reminder = threading.Timer(SILENCE, say, (f"waiting for lines from {where}; Ctrl-C ends", True))
    reminder.daemon = True
    reminder.start()
    try:
        first = [*islice(lines, 1)]
    finally:
        reminder.cancel()
    yield from first
    yield from lines


def _lines_in(path: Path) -> Iterator[str | None]:
    if str(path) == "-":
        yield from lines_of(sys.stdin.buffer)
        return
    if path.suffix.lower() == ".conll":
        raise UserError(f"{path}: CoNLL's columns are not lines of text; oelm evaluate compares its tags")
    try:
        with path.open("rb") as file:
            kind = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
                raise UserError(
                    f"{path} is a device, which may never end; name a file, or - for standard input"
                )
            yield from lines_of(file)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def lines_of(file: Any) -> Iterator[str | None]:
    """The lines of a file, without a byte order mark; None in between when the next lines of a pipe are
    late."""
    number, rest, unanswered = 0, b"", False
    while block := file.read1(1 << 20):
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > LONGEST_LINE:
            most = f"{LONGEST_LINE >> 20} MiB"
            raise UserError(f"line {number + len(lines) + 1} is longer than {most}; is this a file of texts?")
        for number, line in enumerate(lines, number + 1):  # noqa: B020
            yield _decoded(line, number)
        unanswered = unanswered or bool(lines)
        if unanswered and _is_late(file):
            unanswered = False
            yield None
    if rest:
        yield _decoded(rest, number + 1)


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise UserError(f"line {number} is not text in UTF-8; convert the file") from None


def _is_late(file: Any) -> bool:
    """Whether a file has nothing to read at the moment."""
    try:
        return not select.select([file], [], [], 0.05)[0]
    except (OSError, ValueError):  # it has no descriptor, or select does not support it
        return False
