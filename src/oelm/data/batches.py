"""Which items make a batch, by arithmetic alone: nothing is drawn, nothing is remembered.

The order of an epoch is a function of (seed, epoch). A global batch is the same set of items whatever the
number of processes; each process takes its share of every batch, so all of them make the same number of
steps. Every item is in exactly one batch of an epoch. There is no small last batch: with `batch_size` the
items are spread so that sizes differ by at most one (n items make ceil(n / batch_size) batches); with
`batch_tokens` the last two batches share what is left, and no batch has fewer than half as many items as
would fit if all were longest. So every process has something in every step, and a plan that cannot promise
that is refused by `check` before the first one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oelm.data.shuffle import Array, permutation
from oelm.errors import UserError

CHUNK = 64  # batches whose items are sorted by length together: enough for little padding


@dataclass(frozen=True)
class Epoch:
    """The batches of one epoch: `order[bounds[k]:bounds[k + 1]]` are the items of step k."""

    order: Array
    bounds: Array

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batch(self, step: int) -> Array:
        return self.order[self.bounds[step] : self.bounds[step + 1]]

    def share(self, step: int, part: int, parts: int) -> Array:
        """One of `parts` disjoint shares of the batch, of equal size to one item and of similar lengths.
        Processes and accumulation steps are both parts: process r of w, micro-step a of m is part `a * w + r`
        of `w * m`."""
        return self.batch(step)[part::parts]


@dataclass(frozen=True)
class Plan:
    """How items of these lengths become batches.

    Give `batch_size` (items) or `batch_tokens` (padding included); items of similar length are put together.
    `seed=None` is the order of evaluation: fixed, longest last.
    """

    lengths: Array
    batch_size: int | None = None
    batch_tokens: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.batch_tokens is None):
            raise UserError("give either batch_size or batch_tokens")
        if (self.batch_size or self.batch_tokens or 0) < 1:
            raise UserError("batch_size and batch_tokens must be at least 1")
        if not len(self.lengths):
            raise UserError("there are no items to make batches of")
        longest = int(self.lengths.max())
        if self.batch_tokens is not None and longest > self.batch_tokens:
            raise UserError(
                f"batch_tokens {self.batch_tokens} is less than the longest item ({longest} tokens)"
            )

    def epoch(self, epoch: int = 0) -> Epoch:
        """The batches of an epoch; an evaluation has only one."""
        n = len(self.lengths)
        if self.seed is None:
            order = np.argsort(self.lengths, kind="stable")
        else:
            order = permutation(n, self.seed, epoch)
        if self.batch_size is not None:
            steps = -(-n // self.batch_size)
            bounds = np.arange(steps + 1, dtype=np.int64) * n // steps
            if self.seed is not None:  # sort by length within runs of batches
                run = np.repeat(np.arange(steps) // _run(steps), np.diff(bounds))
                order = order[np.lexsort((self.lengths[order], run))]
            batches = Epoch(order, bounds)
        else:
            batches = self._by_tokens(order)
        return batches if self.seed is None else _shuffled(batches, self.seed, epoch)

    def _by_tokens(self, order: Array) -> Epoch:
        budget = self.batch_tokens or 0
        mean = max(1.0, float(self.lengths.mean()))
        steps = int(self.lengths.sum()) // budget
        # In evaluation all items are sorted already and form one chunk.
        size = len(order) if self.seed is None else max(1, int(_run(steps) * budget / mean))
        done: list[Array] = []
        cuts: list[int] = []  # lengths of batches
        rest = order[:0]
        for start in range(0, len(order), size):
            items = np.concatenate([rest, order[start : start + size]])
            items = items[np.argsort(self.lengths[items], kind="stable")]
            lengths = self.lengths[items]
            ends = fill_batches(lengths, budget)
            if start + size < len(order):
                if len(ends) > 1:
                    ends.pop()  # the last batch is not full: its items go to the next chunk
            elif len(ends) > 1:  # balance the last two batches, so that the last one is not small
                begin, end = (ends[-3] if len(ends) > 2 else 0), ends[-1]
                last = min((end - begin) // 2, budget // int(lengths[end - 1]))
                ends[-2] = min(ends[-2], end - last)
            rest = items[ends[-1] :]
            done.append(items[: ends[-1]])
            cuts.extend(np.diff([0, *ends]).tolist())
        return Epoch(np.concatenate(done), np.concatenate([[0], np.cumsum(cuts)]).astype(np.int64))

    def check(self, parts: int) -> None:
        """Refuse, before the first step, batches that might leave one of `parts` without an item."""
        n = len(self.lengths)
        if self.batch_size is not None:
            guaranteed = n // -(-n // self.batch_size)
        else:
            guaranteed = min(n, max(1, (self.batch_tokens or 0) // (2 * int(self.lengths.max()))))
        if guaranteed < parts:
            raise UserError(
                f"a batch may hold only {guaranteed} item{'s' * (guaranteed > 1)}, too few for {parts} parts "
                "(processes times training.accumulate); use larger batches or fewer parts"
            )

    @property
    def mean_tokens(self) -> float:
        return float(self.batch_tokens or (self.batch_size or 1) * self.lengths.mean())

    def steps(self, epochs: int) -> int:
        if self.batch_size is not None:
            return epochs * -(-len(self.lengths) // self.batch_size)
        return sum(len(self.epoch(epoch)) for epoch in range(epochs))

    def schedule(self, start: int = 0) -> Iterator[tuple[int, int, Epoch]]:
        """(epoch, step within it, its batches) for global step `start`, `start + 1`, ... without end."""
        epoch, batches = 0, self.epoch(0)
        while start >= len(batches):
            start -= len(batches)
            epoch, batches = epoch + 1, self.epoch(epoch + 1)
        while True:
            for step in range(start, len(batches)):
                yield epoch, step, batches
            epoch, start = epoch + 1, 0
            batches = self.epoch(epoch)


def _run(steps: int) -> int:
    """How many batches are sorted by length together: at most a quarter of an epoch, as otherwise the batches
    of a small dataset would have the same members in every epoch."""
    return min(CHUNK, max(1, steps // 4))


def fill_batches(lengths: Array, budget: int) -> list[int]:
    """Ends of batches of ascending lengths, as full as the budget allows when padded to their longest."""
    ends: list[int] = []
    start = 0
    while start < len(lengths):
        some = lengths[start : start + budget // max(1, int(lengths[start]))].astype(np.int64)
        fits = np.arange(1, len(some) + 1) * some <= budget  # true, then false: the product ascends
        start += max(1, int(fits.sum()))
        ends.append(start)
    return ends


def _shuffled(batches: Epoch, seed: int, epoch: int) -> Epoch:
    """The same batches in random order: sorting by length must not become a curriculum."""
    sizes = np.diff(batches.bounds)
    order = permutation(len(sizes), seed, epoch, 1)
    items = ranges(batches.bounds[:-1][order], sizes[order])
    return Epoch(batches.order[items], np.concatenate([[0], np.cumsum(sizes[order])]))


def ranges(starts: Array, lengths: Array) -> Array:
    """start, start + 1, ... (`length` numbers) for each pair, concatenated: the flat indices of many
    items."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
