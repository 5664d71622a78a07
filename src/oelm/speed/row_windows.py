"""Train an embedding, for some steps at a time, on the rows that the texts of these steps contain.

AdamW reads and writes every row and its two moments at every step, though the texts of a step contain few of
the tokens. The other rows take steps without a gradient: their moments decay and move them slightly. For a
small model this is a large part of a step, limited by memory bandwidth. The rows that the next steps need are
known, so they are gathered in a small table (a window), which replaces the embedding in the optimizer. At the
end of the window they are written back, and the other rows take all their missed steps at once, while they
are in the cache. Every row takes the same steps, in the same order, with the same arithmetic, only at another
time.

Before the embedding itself is evaluated or saved, `write_back` must be called.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from oelm.data import Epoch, Plan, Split, Store
from oelm.data.assemble import pinned
from oelm.data.batches import ranges
from oelm.speed.adamw import fresh_state, step_without_gradients

if TYPE_CHECKING:
    from oelm.speed.live_rows import LiveEmbedding

STEPS = 16  # of a window, at most
SHARE = 4  # the table has at most 1/4 of the embedding's rows, or more where one batch needs them
VECTOR = 16  # the most numbers in a vector instruction of a processor
ROOM = 1.25  # rows of the table, as a multiple of those that the first windows need


def make_windows(
    live: "LiveEmbedding", optimizer: torch.optim.Optimizer, store: Store, plan: Plan
) -> "RowWindows | None":
    """The windows of a live embedding. None if steps need so many rows that little would be gained, or if
    bits would change: PyTorch's optimizer rounds numbers that do not fill a processor's vector
    differently."""
    if not optimizer.defaults.get("fused") or live.weight.shape[1] % VECTOR:
        return None
    largest = plan.batch_tokens or int(np.sort(plan.lengths)[-(plan.batch_size or 1) :].sum())
    epoch, split = plan.epoch(0), store["train"]

    def needed(steps: int) -> int:
        """The most rows in the first windows of so many steps."""
        firsts = range(0, min(4 * STEPS, len(epoch)), steps)
        return max(len(_tokens(split, epoch, k, min(k + steps, len(epoch)))) for k in firsts)

    capacity = max(largest + 2, min(len(live.weight) // SHARE, int(ROOM * needed(STEPS))))
    if 2 * capacity > len(live.weight) or needed(STEPS // 2) + 2 > capacity:
        return None
    live.windows = RowWindows(live, optimizer, split, store.pad_id, capacity)
    return live.windows


def _tokens(split: Split, epoch: Epoch, first: int, end: int) -> np.ndarray:
    """The distinct tokens of an epoch's batches `first` to `end`, `end` excluded."""
    items = epoch.order[epoch.bounds[first] : epoch.bounds[end]]
    tokens = split.tokens[ranges(split.offsets[items], split.lengths[items])]
    return np.flatnonzero(np.bincount(tokens))


class RowWindows:
    """The table through which an embedding trains. `capacity` rows must be enough for any batch."""

    def __init__(
        self,
        live: "LiveEmbedding",
        optimizer: torch.optim.Optimizer,
        split: Split,
        pad_id: int,
        capacity: int,
    ) -> None:
        weight = live.weight
        self.live, self.optimizer, self.split, self.capacity = live, optimizer, split, capacity
        self.group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
        self.weight = nn.Parameter(weight.new_zeros(capacity, weight.shape[1]))
        self.group["params"].append(self.weight)
        state = optimizer.state[self.weight] = fresh_state(self.weight)
        self.steps, self.tables = state["step"], _tables(self.weight.data, state)
        self.place = torch.full_like(live.place, -1)  # token -> its row of the table
        self.row_of = live.place.cpu().numpy()
        # The padding's row is always the first, as its number is fixed in a CUDA graph.
        always = [token for token in dict.fromkeys((live.padding_idx, pad_id)) if token is not None]
        self.always = np.array(always, dtype=np.int64)
        self.padding = None if live.padding_idx is None else 0
        self.rows = torch.empty(0, dtype=torch.int64, device=weight.device)
        self.batches: Epoch | None = None  # the epoch of the window; None: it is closed
        self.first = self.end = 0
        self.taken: int | None = None  # steps that the embedding has taken
        self.missed: list[float] = []  # learning rates of the steps that its other rows have missed

    def prepare(self, batches: Epoch, k: int) -> None:
        """Make sure that the rows of batch k of an epoch are in the table."""
        if self.batches is batches and self.first <= k < self.end and len(self.missed) < STEPS:
            return
        self.write_back()
        self._open(batches, k)

    def count(self, lr: float) -> None:
        """Count a step that was taken with this learning rate."""
        lr *= float(self.group.get("scale", 1.0))
        self.missed.append(float(np.float32(lr)) if isinstance(self.group["lr"], Tensor) else lr)

    @torch.no_grad()
    def write_back(self) -> None:
        """Bring the embedding and its moments to the values that they would have without windows."""
        if not self.missed:
            return
        assert self.taken is not None
        state = self.optimizer.state[self.live.weight]
        tables = _tables(self.live.weight, state)
        step_without_gradients(*tables, self.missed, self.taken, self.steps, self.group)
        for table, window in zip(tables, self.tables, strict=True):
            table.index_copy_(0, self.rows, window[: len(self.rows)])
        self.taken += len(self.missed)
        state["step"].copy_(self.steps)
        self.missed.clear()

    def close(self) -> None:
        """Close a window that was written back, as the embedding gets other values."""
        self.batches, self.taken = None, None

    @torch.no_grad()
    def _open(self, batches: Epoch, k: int) -> None:
        """Open the window of batch k. Its bounds depend on the epoch alone, so a run that resumes has the
        same."""
        size = STEPS
        while True:
            self.first, self.end = k // size * size, min(k // size * size + size, len(batches))
            used = _tokens(self.split, batches, self.first, self.end)
            tokens = np.concatenate([self.always, used[~np.isin(used, self.always)]])
            if len(tokens) <= self.capacity or size == 1:
                break
            size //= 2
        weight = self.live.weight
        state = self.optimizer.state[weight]
        if not state:  # the first step of a run
            state |= fresh_state(weight)
        if self.taken is None:
            self.taken = int(state["step"])
        index = np.zeros((2, self.capacity), dtype=np.int64)  # tokens and their rows; the rest is unused
        index[:, : len(tokens)] = tokens, self.row_of[tokens]
        on_device = pinned(torch.from_numpy(index), weight.device).to(weight.device, non_blocking=True)
        self.rows = on_device[1, : len(tokens)]
        for table, window in zip(_tables(weight, state), self.tables, strict=True):
            torch.index_select(table, 0, on_device[1], out=window)
        self.steps.copy_(state["step"])
        self.place.fill_(-1)
        self.place[on_device[0, : len(tokens)]] = torch.arange(len(tokens), device=weight.device)
        self.batches = batches


def _tables(weight: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The weight and its moments, which have a row for every row of an embedding."""
    return weight, state["exp_avg"], state["exp_avg_sq"]
