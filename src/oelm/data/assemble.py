"""Batches of tensors from a store, gathered from its flat token array by index, without a loop over items."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from oelm.data.batches import Array, ranges
from oelm.data.store import IGNORE, Split
from oelm.errors import UserError


@dataclass(frozen=True)
class Layout:
    """The memory layout of a batch."""

    packed: bool = False  # texts end to end instead of padded
    round_widths: bool = False  # training batches have few different shapes, as CUDA graphs need one each
    segments: bool = True  # the second text of a pair is marked in token_type_ids


PADDED = Layout()


class Packing(NamedTuple):
    """The texts in one packed row of N tokens: text s is [bounds[s]:bounds[s + 1]].

    `bounds` is int32 on the tokens' device; texts of length zero are allowed, so that its size can be fixed.
    Every token belongs to a text. `longest` is at least the length of every text.
    """

    bounds: torch.Tensor
    longest: int


@dataclass
class Batch:
    """One process's share of a batch, under the argument names of Hugging Face models.

    Padded: `input_ids`, `attention_mask` (B, L) and, for pairs, `token_type_ids`. Packed: `input_ids`,
    `position_ids` and perhaps `token_type_ids` (1, N), `bounds` (B + 1,): text k is
    `[bounds[k]:bounds[k + 1]]`. Targets are `labels`: (B,) classes or values, (B, L) tags, (B, T) targets;
    or `start` and `end` (B,) of an answer.
    """

    ids: Array  # (B,) the items' ids in the store
    inputs: dict[str, torch.Tensor]
    targets: dict[str, torch.Tensor]
    tokens: int  # without padding
    longest: int | None = None  # of packed texts; None: padded, or windows

    def to(self, device: torch.device) -> "Batch":
        def move(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {k: pinned(v, device).to(device, non_blocking=True) for k, v in tensors.items()}

        return replace(self, inputs=move(self.inputs), targets=move(self.targets))

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the model's forward method."""
        inputs: dict[str, Any] = dict(self.inputs)
        if self.longest is not None:
            inputs["packing"] = Packing(inputs.pop("bounds"), self.longest)
        return inputs


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor in pinned memory, so that a GPU can copy it while it computes; unchanged for a CPU."""
    if device.type != "cuda":
        return tensor
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(staged.numpy(), tensor.numpy())  # by one thread; torch would start all of its threads
    return staged


def round_up(n: int) -> int:
    """The next round size: a multiple of 128, and at most sixteen sizes in each doubling, so that there are
    few shapes and little padding."""
    return -(-n // _step(n)) * _step(n)


def _step(n: int) -> int:
    return max(128, 1 << max(0, (n - 1).bit_length() - 5))


def fill_to_round_sizes(batch: Batch, longest: int, pad_id: int) -> Batch:
    """The packed batch with padding up to round sizes, so that few shapes occur: texts of at most `longest`
    padding tokens, then empty texts, all with the label IGNORE."""
    tokens, items = batch.tokens, len(batch.ids)
    extra = round_up(tokens) - tokens
    lengths = [longest] * (extra // longest) + ([extra % longest] if extra % longest else [])
    # As many texts as the largest rounding needs, so that their number depends on the round sizes alone.
    texts = -(-(items + -(-_step(tokens) // longest)) // 8) * 8
    added = np.full(texts - items, tokens + extra, dtype=np.int32)
    added[: len(lengths)] = tokens + np.cumsum(lengths)
    positions = np.concatenate([np.zeros(0, np.int64), *(np.arange(length) for length in lengths)])
    # In numpy, as torch would start all of its threads for these few numbers.
    join = lambda tensor, more: torch.from_numpy(np.append(tensor.numpy(), more))  # noqa: E731
    inputs = {
        "input_ids": join(batch.inputs["input_ids"], np.full(extra, pad_id))[None],
        "position_ids": join(batch.inputs["position_ids"], positions)[None],
        "bounds": join(batch.inputs["bounds"], added),
    }
    if "token_type_ids" in batch.inputs:
        inputs["token_type_ids"] = join(batch.inputs["token_type_ids"], np.zeros(extra, np.int64))[None]
    targets = {name: join(values, np.full(len(added), IGNORE)) for name, values in batch.targets.items()}
    return replace(batch, inputs=inputs, targets=targets, longest=longest)


def _token_indices(offsets: Array, items: Array) -> tuple[Array, Array]:
    """Flat indices of the items' tokens, and the items' lengths."""
    starts = offsets[items]
    lengths = offsets[items + 1] - starts
    return ranges(starts, lengths), lengths


def pad_rows(flat: Array, lengths: Array, fill: int, widest: int | None = None) -> tuple[Array, Array]:
    """Flat values as padded rows (B, L), and a mask (B, L) that is true where there is a value."""
    longest = int(lengths.max())
    width = longest if widest is None else max(longest, min(round_width(longest), widest))
    real = np.arange(width) < lengths[:, None]
    rows = np.full(real.shape, fill, dtype=np.int64)
    rows[real] = flat
    return rows, real


def round_width(n: int) -> int:
    """The next round width of a padded batch: a multiple of 8, at most eight widths in each doubling."""
    step = max(8, 1 << max(0, (n - 1).bit_length() - 4))
    return -(-n // step) * step


def packed_batch(split: Split, items: Array, segments: bool = False) -> Batch:
    """The items of a share, packed. `segments`: mark the second text of a pair."""
    indices, lengths = _token_indices(split.offsets, items)
    inputs = packed_inputs(split.tokens[indices], lengths)
    if segments and split.second is not None:
        marks = inputs["position_ids"].numpy()[0] >= np.repeat(split.second[items], lengths)
        inputs["token_type_ids"] = _long(marks)[None]
    targets = {"labels": torch.from_numpy(split.labels[items])} if split.has("labels") else {}
    return Batch(split.ids[items], inputs, targets, len(indices), int(lengths.max()))


def packed_inputs(tokens: Array, lengths: Array) -> dict[str, torch.Tensor]:
    """The inputs of a packed batch, from the texts' tokens end to end and their lengths."""
    ends = np.cumsum(lengths)
    positions = np.arange(len(tokens)) - np.repeat(ends - lengths, lengths)
    return {
        "input_ids": _long(tokens)[None],
        "position_ids": torch.from_numpy(positions)[None],
        "bounds": torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
    }


def padded_batch(split: Split, items: Array, pad_id: int, widest: int | None = None) -> Batch:
    """The items of a share, padded to the longest of them or, with `widest`, to a round width of at most
    that, so that few shapes occur."""
    indices, lengths = _token_indices(split.offsets, items)
    tokens, real = pad_rows(split.tokens[indices], lengths, pad_id, widest)
    batch = Batch(split.ids[items], {}, {}, len(indices))
    batch.inputs |= {"input_ids": torch.from_numpy(tokens), "attention_mask": _long(real)}
    if split.second is not None:
        segments = (np.arange(real.shape[1]) >= split.second[items][:, None]) & real
        batch.inputs["token_type_ids"] = _long(segments)
    if split.has("labels"):
        batch.targets["labels"] = torch.from_numpy(split.labels[items])
    if split.has("values"):
        batch.targets["labels"] = torch.from_numpy(np.array(split.values[items]))
    if split.has("tags"):
        tags, _ = pad_rows(split.tags[indices], lengths, IGNORE, widest)
        batch.targets["labels"] = torch.from_numpy(tags)
    if split.has("target_tokens"):
        indices, lengths = _token_indices(split.target_offsets, items)
        targets, _ = pad_rows(split.target_tokens[indices], lengths, IGNORE, widest)
        batch.targets["labels"] = torch.from_numpy(targets)
        batch.tokens += len(indices)
    if split.has("starts"):
        batch.targets |= {side: _long(split.column(f"{side}s")[items]) for side in ("start", "end")}
    return batch


@dataclass(frozen=True)
class Windows:
    """A stream cut into windows of `size` tokens that do not overlap; each token is predicted once.

    Training leaves out a shorter last window; an evaluation (`whole=False`) includes it, so that all tokens
    but the boundary at the start of the stream are counted exactly once.
    """

    split: Split
    size: int
    whole: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"a window needs at least one token, not {self.size}")
        if not len(self):
            raise UserError(
                f"the {self.split.name} split has {len(self.split.tokens):,} tokens, less than one window of "
                f"{self.size:,}; use shorter windows"
            )

    def __len__(self) -> int:
        targets = len(self.split.tokens) - 1
        return targets // self.size if self.whole else -(-targets // self.size)

    @property
    def lengths(self) -> Array:
        """The lengths for `Plan`: all windows count as equally long."""
        return np.broadcast_to(np.int64(self.size), len(self))

    def groups(self) -> Array:
        """For each window, the number of the document that contains its first target. Documents in which no
        window begins are not numbered."""
        first = np.arange(len(self)) * self.size + 1
        documents = np.searchsorted(self.split.column("documents"), first, side="right")
        return np.unique(documents, return_inverse=True)[1]

    def count(self, items: Array) -> int:
        """The number of tokens that these windows predict."""
        return int(np.minimum(self.size, len(self.split.tokens) - 1 - items * self.size).sum())

    def batch(self, items: Array) -> Batch:
        """The windows of a share. Labels are shifted by one already, with IGNORE after the end of the stream,
        so the model must not shift them again."""
        indices = items[:, None] * self.size + np.arange(self.size + 1)
        last = len(self.split.tokens) - 1
        tokens = self.split.tokens[np.minimum(indices, last)].astype(np.int64)
        labels = torch.from_numpy(np.where(indices[:, 1:] <= last, tokens[:, 1:], IGNORE))
        inputs = {"input_ids": torch.from_numpy(tokens[:, :-1].copy())}
        return Batch(items, inputs, {"labels": labels}, self.count(items))


def _long(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))
