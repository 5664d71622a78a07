"""Answers for lines of text: labels, numbers, tags of words, answers to questions, or what a model writes."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from oelm.data.tasks import KINDS, task_kind
from oelm.data.tasks.base import Reader
from oelm.errors import UserError
from oelm.models.fit import agree_on_padding

TEXTS = 32  # per batch


def answer_lines(
    model: Any, tokenizer: Any, max_length: int, lines: Iterable[str], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """For every line one answer; for an empty line one that says nothing. Where a line cannot be read, all
    before it are answered first."""
    done = empty = 0
    agree_on_padding(model, tokenizer)
    reader = reader_of(model)(model, tokenizer, max_length)
    remaining = enumerate(lines, 1)
    refused: UserError | None = None
    while refused is None:
        group: list[str] = []
        try:
            for number, line in islice(remaining, TEXTS):
                if line.strip() and (problem := reader.problem(line)):
                    raise UserError(f"line {number} {problem}")
                group.append(line)
        except UserError as error:
            refused = error
        if not group:
            break
        read = [reader.reads(line) for line in group]
        asked = [line for line, there in zip(group, read, strict=True) if there]
        answers = iter(reader.answers(asked) if asked else ())
        done, empty = done + len(group), empty + len(group) - len(asked)
        for line, there in zip(group, read, strict=True):
            yield {"text": line, **(next(answers) if there else dict.fromkeys(reader.says))}
    if empty:
        say(f"{empty} of {done} lines said nothing; their answers are null")
    if reader.cut:
        say(f"{reader.cut} of {done} lines were cut: this model reads {max_length} tokens")
    if refused is not None:
        raise refused


def reader_of(model: Any) -> type[Reader]:
    """How a model answers lines: as the kind of task that its config names or, in a checkpoint that was not
    trained here, that its class fits."""
    name = getattr(model.config, "task_kind", None)
    kinds = [task_kind(name)] if name else [kind for kind in KINDS.values() if kind.fits(model)]
    for kind in kinds:
        if kind.reader is not None:
            return kind.reader
    raise UserError(f"{type(model).__name__} predicts nothing of texts; `oelm generate` lets a model write")
