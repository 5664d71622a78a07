"""Evaluate a model on a split: every item once, whatever the number of processes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oelm.data.assemble import PADDED, Array, Layout
from oelm.data.tasks.base import Measured, Objective
from oelm.training.parallel import gather_values, process_state, reshard

TOKENS = 16_384  # per batch and process, padding included
LARGE_GPU, MORE_TOKENS = 40e9, 65_536  # a GPU of so many bytes is kept busy only by larger batches
LOGITS = {"cpu": 1 << 26, "cuda": 1 << 29}  # a language model's largest tensor: tokens x vocabulary


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    split: str,
    autocast: Any,
    layout: Layout = PADDED,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """The metrics of a split, equal on every process. `autocast` is a callable that opens the context.

    `on_batch(done, total)` is called before every batch; an exception from it ends the evaluation. Every
    process takes its share of every batch. If a batch has fewer items than there are processes, the others
    run one dummy item (sharded models need every process) and drop the result.
    """
    state = process_state()
    tokens = tokens_at_once(state.device, objective.store.vocab_size * objective.kind.predicts_tokens)
    longest = int(objective.plan(split, 1, None, None).lengths.max())
    plan = objective.plan(split, None, max(tokens, longest), None)
    epoch = plan.epoch()
    training = model.training
    model.eval()
    losses: list[Tensor] = []
    count = 0
    collected: dict[str, list[Tensor | Array]] = {}
    for step in range(len(epoch)):
        on_batch(step, len(epoch))
        items = epoch.share(step, state.process_index, state.num_processes)
        kept = len(items) > 0
        batch = objective.batch(split, items if kept else epoch.batch(step)[:1], layout).to(state.device)
        with autocast():
            loss, outputs = objective.outputs(model, batch)
        if kept:
            losses.append(loss)
            count += objective.count(split, items)
            for key, value in {"ids": batch.ids, "order": np.asarray(items), **outputs}.items():
                collected.setdefault(key, []).append(value)
    model.train(training)
    reshard(model)
    loss_sum = sum(torch.stack(losses).tolist()) if losses else 0.0  # in float64, batch after batch
    joined = {key: _joined(values) for key, values in collected.items()}
    parts = gather_values((loss_sum, count, joined), state)
    keys = parts[0][2]
    arrays = {key: np.concatenate([part[2][key] for part in parts if part[2]]) for key in keys}
    order = np.argsort(arrays.pop("order"), kind="stable")
    arrays = {key: value[order] for key, value in arrays.items()}
    arrays["groups"] = objective.groups(split)
    # fsum-like: add in float64 in a fixed order of processes.
    return objective.measure(split, sum(p[0] for p in parts), sum(p[1] for p in parts), arrays)


def tokens_at_once(device: torch.device, vocabulary: int = 0) -> int:
    """The number of tokens in an evaluation batch; with a `vocabulary`, limited by the size of the logits."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU
    tokens = MORE_TOKENS if large else TOKENS
    return min(tokens, LOGITS.get(device.type, 1 << 26) // vocabulary) if vocabulary else tokens


def _joined(values: list[Tensor | Array]) -> Array:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.cat(tensors).cpu().numpy() if tensors else np.concatenate(values)
