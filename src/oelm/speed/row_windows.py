"""An embedding trains, some steps at a time, on the rows that the texts of those steps contain.

AdamW reads and writes every row and its two moments at every step, though the texts of a step have words for
few of them. The others coast: their moments decay and move them a little. For a small model this is a large
part of a step, and nearly all of it is waiting for memory. Which rows the next steps need is known, so these
are gathered in a small table, which stands in for the embedding in the optimizer. When the window ends they
go back, and the other rows take the steps that they missed one after another while they are at hand. Every
row takes the same steps, in the same order, with the same arithmetic; only when is different.

Whoever wants the embedding itself, to evaluate or to save it, calls `fold` before.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from oelm.data import Epoch, Plan, Split, Store
from oelm.data.assemble import pinned
from oelm.data.batches import ranges
from oelm.speed.adamw import coast, fresh_state

if TYPE_CHECKING:
    from oelm.speed.live_rows import LiveEmbedding

STEPS = 16  # of a window, at most
SHARE = 4  # the table has at most 1/4 of the embedding's rows, or more where one batch needs them
VECTOR = 16  # numbers that a processor's instruction takes at once, at most
ROOM = 1.25  # how many more rows it has than the first windows need


def make_windows(
    live: "LiveEmbedding", optimizer: torch.optim.Optimizer, store: Store, plan: Plan
) -> "RowWindows | None":
    """None where steps need so many rows that little would be gained, and where bits would change: PyTorch's
    optimizer rounds numbers that fill no vector of the processor otherwise than others."""
    if not optimizer.defaults.get("fused") or live.weight.shape[1] % VECTOR:
        return None
    largest = plan.batch_tokens or int(np.sort(plan.lengths)[-(plan.batch_size or 1) :].sum())
    epoch, split = plan.epoch(0), store["train"]

    def needed(steps: int) -> int:
        """Rows, by the first windows of so many steps."""
        firsts = range(0, min(4 * STEPS, len(epoch)), steps)
        return max(len(_tokens(split, epoch, k, min(k + steps, len(epoch)))) for k in firsts)

    capacity = max(largest + 2, min(len(live.weight) // SHARE, int(ROOM * needed(STEPS))))
    if 2 * capacity > len(live.weight) or needed(STEPS // 2) + 2 > capacity:
        return None
    live.windows = RowWindows(live, optimizer, split, store.pad_id, capacity)
    return live.windows


def _tokens(split: Split, epoch: Epoch, first: int, end: int) -> np.ndarray:
    """The tokens of an epoch's batches from `first` to before `end`, each once."""
    items = epoch.order[epoch.bounds[first] : epoch.bounds[end]]
    tokens = split.tokens[ranges(split.offsets[items], split.lengths[items])]
    return np.flatnonzero(np.bincount(tokens))


class RowWindows:
    """The window that an embedding trains through. `capacity` rows must be enough for any batch."""

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
        self.place = torch.full_like(live.place, -1)  # of every token, in the table
        self.row_of = live.place.cpu().numpy()
        # The row whose gradient is not wanted is always the first; a CUDA graph knows it by its number.
        always = [token for token in dict.fromkeys((live.padding_idx, pad_id)) if token is not None]
        self.always = np.array(always, dtype=np.int64)
        self.padding = None if live.padding_idx is None else 0
        self.rows = torch.empty(0, dtype=torch.int64, device=weight.device)
        self.batches: Epoch | None = None  # those of the epoch that the window lies in; None: it is closed
        self.first = self.end = 0
        self.taken: int | None = None  # steps that the embedding has taken
        self.missed: list[float] = []  # the rates of those that the rest of it has not

    def prepare(self, batches: Epoch, k: int) -> None:
        """Have the rows of batch k of an epoch in the table."""
        if self.batches is batches and self.first <= k < self.end and len(self.missed) < STEPS:
            return
        self.fold()
        self._open(batches, k)

    def count(self, rate: float) -> None:
        """A step was taken."""
        rate *= float(self.group.get("scale", 1.0))
        self.missed.append(float(np.float32(rate)) if isinstance(self.group["lr"], Tensor) else rate)

    @torch.no_grad()
    def fold(self) -> None:
        """Let the embedding and its moments be what they would be without windows."""
        if not self.missed:
            return
        assert self.taken is not None
        state = self.optimizer.state[self.live.weight]
        tables = _tables(self.live.weight, state)
        coast(*tables, self.missed, self.taken, self.steps, self.group)
        for table, mine in zip(tables, self.tables, strict=True):
            table.index_copy_(0, self.rows, mine[: len(self.rows)])
        self.taken += len(self.missed)
        state["step"].copy_(self.steps)
        self.missed.clear()

    def close(self) -> None:
        """Forget a window that was folded: what it stands for is given other values."""
        self.batches, self.taken = None, None

    @torch.no_grad()
    def _open(self, batches: Epoch, k: int) -> None:
        """Where windows begin and end follows from the epoch alone: a run that resumes has the same ones."""
        size = STEPS
        while True:
            self.first, self.end = k // size * size, min(k // size * size + size, len(batches))
            found = _tokens(self.split, batches, self.first, self.end)
            tokens = np.concatenate([self.always, found[~np.isin(found, self.always)]])
            if len(tokens) <= self.capacity or size == 1:
                break
            size //= 2
        weight = self.live.weight
        state = self.optimizer.state[weight]
        if not state:  # the first step of a run
            state |= fresh_state(weight)
        if self.taken is None:
            self.taken = int(state["step"])
        places = np.zeros((2, self.capacity), dtype=np.int64)  # tokens and their rows; the rest stands idle
        places[:, : len(tokens)] = tokens, self.row_of[tokens]
        there = pinned(torch.from_numpy(places), weight.device).to(weight.device, non_blocking=True)
        self.rows = there[1, : len(tokens)]
        for table, mine in zip(_tables(weight, state), self.tables, strict=True):
            torch.index_select(table, 0, there[1], out=mine)
        self.steps.copy_(state["step"])
        self.place.fill_(-1)
        self.place[there[0, : len(tokens)]] = torch.arange(len(tokens), device=weight.device)
        self.batches = batches


def _tables(weight: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What has a row for every row of an embedding."""
    return weight, state["exp_avg"], state["exp_avg_sq"]
