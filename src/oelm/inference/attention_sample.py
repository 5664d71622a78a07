"""The texts on which a trained model's heads are measured: from its own dataset, or lines of a file."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oelm.data.assemble import Layout
from oelm.data.store import Store
from oelm.data.tasks import make_objective
from oelm.data.tokenizer import Encoder
from oelm.errors import UserError
from oelm.inference.attention_statistics import AttentionStatistics, measure_heads
from oelm.inference.prediction import open_lines
from oelm.inference.trained import Trained, reader_of
from oelm.models.build import build_model
from oelm.models.fit import agree_on_padding, takes_segments


def explain_model(trained: Trained, texts: int, split: str, lines: Path | None) -> AttentionStatistics:
    """The statistics of a model's heads on `texts` evenly spaced items of its dataset's split, or on
    lines."""
    if texts < 1:
        raise UserError("--texts must be at least 1")
    if trained.config is None and lines is None:
        raise UserError(
            f"{trained.folder} is a model without a run's dataset: name a file of texts with --lines"
        )
    start, notes = None, []
    store: Store | None = None
    try:
        if trained.config is None:
            raise UserError("it is not a run of this package")
        store = trained.store({})
        start, _ = build_model(trained.config, store)
    except UserError as error:
        if lines is None and store is None:
            raise
        notes.append(f"the distance from the start is not known: {error}")
    agree_on_padding(trained.model, trained.tokenizer)
    if lines is not None:
        passes, sample = _of_lines(trained, lines, texts), lines.name
    else:
        assert store is not None
        passes, sample = _of_split(trained, store, split, texts), f"{store.task}, {split}"
    statistics = measure_heads(trained.model, passes, start, notes, sample)
    if not statistics.heads:
        raise UserError(f"{sample}: no text has two tokens or more, and less says nothing about attention")
    return statistics


def _of_split(trained: Trained, store: Store, split: str, texts: int) -> Iterator[int]:
    objective = make_objective(store, trained.max_length)
    store[split]  # raises an error that lists the splits
    items = len(objective.plan(split, 1, None, None).lengths)
    layout = Layout(segments=takes_segments(trained.model))
    for item in np.unique(np.linspace(0, items - 1, min(texts, items)).round().astype(int)):
        batch = objective.batch(split, np.array([item]), layout).to(trained.device)
        objective.loss(trained.model, batch)
        yield batch.tokens


def _of_lines(trained: Trained, path: Path, texts: int) -> Iterator[int]:
    lines = list(islice((line for line in open_lines(path) if line and line.strip()), texts))
    if not lines:
        raise UserError(f"{path} holds no text")
    if trained.model.can_generate() and not trained.writes:  # a language model answers no lines
        encoder = Encoder(trained.tokenizer, trained.max_length)
        for line in lines:
            ids = torch.from_numpy(encoder.texts([line])[0].astype(np.int64))[None].to(trained.device)
            trained.model(input_ids=ids, use_cache=False)
            yield ids.shape[1]
        return
    reader: Any = reader_of(trained.model)(trained.model, trained.tokenizer, trained.max_length)
    for line in lines:
        if problem := reader.problem(line):
            raise UserError(f"{path}: {problem}")
        items = reader.encode([line])
        for item in range(len(items.lengths)):
            batch = reader.batch(items, np.array([item])).to(trained.device)
            second = None if items.second is None else items.second[[item]]
            reader.outputs(batch.arguments(), second)
            yield batch.tokens
