"""Batches of tensors from a store: gathered from the flat array by index, without a loop over items."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from oelm.data.batches import ranges
from oelm.data.store import IGNORE, Split
from oelm.errors import UserError

Array = np.ndarray


@dataclass(frozen=True)
class Layout:
    """How the texts of a batch lie in memory."""

    packed: bool = False  # end to end instead of padded
    round_widths: bool = False  # training batches have few shapes, as CUDA graphs want it
    segments: bool = True  # the second text of a pair is marked


class Packing(NamedTuple):
    """How one row of N tokens divides into texts: text s is [bounds[s]:bounds[s + 1]].

    `bounds` is int32 on the tokens' device; texts of length zero are allowed, so that its size can be fixed.
    All N tokens belong to a text. `longest` is at least the length of every text.
    """

    bounds: torch.Tensor
    longest: int


@dataclass
class Padded:
    """Items side by side, padded on the right to the longest of them."""

    ids: Array  # (B,) the items' ids in the store
    input_ids: torch.Tensor  # (B, L)
    attention_mask: torch.Tensor  # (B, L) 1 = token, 0 = padding
    labels: torch.Tensor | None = None  # (B,) classes or values, (B, L) tags, or (B, T) targets
    token_type_ids: torch.Tensor | None = None  # (B, L)
    start_positions: torch.Tensor | None = None  # (B,) question answering
    end_positions: torch.Tensor | None = None  # (B,)

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a Hugging Face model is called with, the labels aside."""
        named = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return named if self.token_type_ids is None else named | {"token_type_ids": self.token_type_ids}

    def targets(self) -> dict[str, torch.Tensor]:
        """What is to be learned, by name."""
        named = {"labels": self.labels, "start": self.start_positions, "end": self.end_positions}
        return {name: values for name, values in named.items() if values is not None}


@dataclass
class Packed:
    """Items end to end, without padding: item k is `[cu_seqlens[k]:cu_seqlens[k + 1]]`."""

    ids: Array  # (B,)
    input_ids: torch.Tensor  # (N,)
    position_ids: torch.Tensor  # (N,) from 0 in every item
    cu_seqlens: torch.Tensor  # (B + 1,) int32
    longest: int
    labels: torch.Tensor | None = None  # (B,) classes


def round_up(n: int) -> int:
    """The next round size: sixteen in each doubling, but multiples of 128. Few shapes, and little waste."""
    return -(-n // _step(n)) * _step(n)


def _step(n: int) -> int:
    return max(128, 1 << max(0, (n - 1).bit_length() - 5))


def filled(batch: Packed, longest: int, pad_id: int) -> Packed:
    """The batch with tokens and texts added up to round sizes, so that few shapes occur.

    What is added are texts of at most `longest` padding tokens, then empty ones, with the label IGNORE.
    """
    tokens = len(batch.input_ids)
    extra = round_up(tokens) - tokens
    lengths = [longest] * (extra // longest) + ([extra % longest] if extra % longest else [])
    # Room for as many added texts as a rounding can ever make, so that their number does not vary.
    most = len(batch.ids) + -(-_step(tokens) // longest)
    texts = -(-most // 8) * 8
    ends = np.cumsum([tokens, *lengths])[1:] if lengths else np.zeros(0)
    added = np.full(texts - len(batch.ids), tokens + extra, dtype=np.int32)
    added[: len(ends)] = ends
    positions = np.concatenate([np.arange(length) for length in lengths]) if lengths else np.zeros(0)
    # In numpy: torch would start all its threads for these few numbers, and wait for the slowest.
    join = lambda tensor, more: torch.from_numpy(np.concatenate([tensor.numpy(), more]))  # noqa: E731
    return replace(
        batch,
        input_ids=join(batch.input_ids, np.full(extra, pad_id, dtype=np.int64)),
        position_ids=join(batch.position_ids, positions.astype(np.int64)),
        cu_seqlens=join(batch.cu_seqlens, added),
        longest=longest,
        labels=None if batch.labels is None else join(batch.labels, np.full(len(added), IGNORE)),
    )


def _gather(offsets: Array, items: Array) -> tuple[Array, Array]:
    """Flat places of the items' tokens, and the items' lengths."""
    starts = offsets[items]
    lengths = offsets[items + 1] - starts
    return ranges(starts, lengths), lengths


def pad_rows(flat: Array, lengths: Array, fill: int, widest: int | None = None) -> tuple[Array, Array]:
    """Values that lie end to end as rows (B, L), and where in them they are."""
    longest = int(lengths.max())
    width = longest if widest is None else max(longest, min(round_width(longest), widest))
    real = np.arange(width) < lengths[:, None]
    rows = np.full(real.shape, fill, dtype=np.int64)
    rows[real] = flat
    return rows, real


def round_width(n: int) -> int:
    """The next round width of a padded batch: eight in each doubling, but multiples of 8."""
    step = max(8, 1 << max(0, (n - 1).bit_length() - 4))
    return -(-n // step) * step


def packed_batch(split: Split, items: Array) -> Packed:
    """The items of a share, end to end."""
    places, lengths = _gather(split.offsets, items)
    ends = np.cumsum(lengths)
    positions = np.arange(len(places)) - np.repeat(ends - lengths, lengths)
    batch = Packed(
        ids=split.ids[items],
        input_ids=_long(split.tokens[places]),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        longest=int(lengths.max()),
    )
    if split.has("labels"):
        batch.labels = torch.from_numpy(split.labels[items])
    return batch


def padded_batch(split: Split, items: Array, pad_id: int, widest: int | None = None) -> Padded:
    """The items of a share, padded to their own longest; with `widest`, to round widths up to that, so that
    few shapes occur."""
    places, lengths = _gather(split.offsets, items)
    tokens, real = pad_rows(split.tokens[places], lengths, pad_id, widest)
    position = np.arange(real.shape[1])
    batch = Padded(ids=split.ids[items], input_ids=torch.from_numpy(tokens), attention_mask=_long(real))
    if split.has("labels"):
        batch.labels = torch.from_numpy(split.labels[items])
    if split.has("values"):
        batch.labels = torch.from_numpy(np.array(split.values[items]))
    if split.has("tags"):
        batch.labels = torch.from_numpy(pad_rows(split.tags[places], lengths, IGNORE, widest)[0])
    if split.has("target_tokens"):
        places, lengths = _gather(split.target_offsets, items)
        batch.labels = torch.from_numpy(pad_rows(split.target_tokens[places], lengths, IGNORE, widest)[0])
    if split.second is not None:
        batch.token_type_ids = _long((position >= split.second[items][:, None]) & real)
    if split.has("starts"):
        batch.start_positions = _long(split.column("starts")[items])
        batch.end_positions = _long(split.column("ends")[items])
    return batch


class WindowBatch(NamedTuple):
    """Windows of a stream. `targets` are the inputs moved by one: no model needs to shift them again."""

    input_ids: torch.Tensor  # (B, T)
    targets: torch.Tensor  # (B, T), IGNORE after the end of the stream


@dataclass(frozen=True)
class Windows:
    """A stream cut into windows of `size` tokens that do not overlap; each token is predicted once.

    Training leaves out a last window that is not whole; an evaluation (`whole=False`) takes it, so that
    all tokens but the boundary at the start of the stream are counted exactly once.
    """

    split: Split
    size: int
    whole: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"a window needs at least one token, not {self.size}")
        if not len(self):
            raise UserError(
                f"the {self.split.name} split has {len(self.split.tokens)} tokens, less than one window of "
                f"{self.size}; use shorter windows"
            )

    def __len__(self) -> int:
        targets = len(self.split.tokens) - 1
        return targets // self.size if self.whole else -(-targets // self.size)

    @property
    def lengths(self) -> Array:
        """What `Plan` wants to know: all windows count as equally long."""
        return np.broadcast_to(np.int64(self.size), len(self))

    def groups(self) -> Array:
        """Per window the number of the document in which its first target lies. Documents in which no window
        begins are not counted."""
        first = np.arange(len(self)) * self.size + 1
        documents = np.searchsorted(self.split.column("documents"), first, side="right")
        return np.unique(documents, return_inverse=True)[1]

    def batch(self, items: Array) -> WindowBatch:
        """The windows of a share."""
        places = np.asarray(items)[:, None] * self.size + np.arange(self.size + 1)
        last = len(self.split.tokens) - 1
        tokens = self.split.tokens[np.minimum(places, last)].astype(np.int64)
        targets = np.where(places[:, 1:] <= last, tokens[:, 1:], IGNORE)
        return WindowBatch(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets))


def _long(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))
