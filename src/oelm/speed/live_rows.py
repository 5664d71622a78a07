"""An embedding whose parameter holds the rows that a run's texts use, and no others.

A vocabulary is made for all texts of a language; those of one task use a part of it. The other rows never get
a gradient, yet the optimizer reads and writes them and their moments at every step, and for a small model
that is most of a step. Here they are set aside until the model is saved. The rows in use train as ever; those
set aside keep the values they had until the run ends, and are then shrunk at once by what AdamW's weight
decay would have taken step by step.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.speed.operations import look_up
from oelm.speed.row_windows import RowWindows

WORTH_IT = 0.9  # the largest share of rows in use at which others are set aside


class LiveEmbedding(nn.Embedding):
    """Stands where an embedding stood: the same outputs, but `weight` is short."""

    def __init__(self, whole: nn.Embedding, used: Tensor) -> None:
        nn.Module.__init__(self)  # an embedding's own would fill a whole matrix with random numbers
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = whole.padding_idx, None, whole.norm_type
        self.scale_grad_by_freq, self.sparse = False, False
        self.live, self.idle = used.nonzero()[:, 0], (~used).nonzero()[:, 0]
        weight = whole.weight.detach()
        self.weight = nn.Parameter(weight[self.live.to(weight.device)])
        self.aside = weight[self.idle.to(weight.device)].cpu()
        place = torch.full((len(used),), -1)
        place[self.live] = torch.arange(len(self.live))
        self.place: Tensor
        self.register_buffer("place", place.to(weight.device), persistent=False)
        self.padding = None if self.padding_idx is None else int(place[self.padding_idx])
        self.windows: RowWindows | None = None  # that it trains through, where that is faster

    def forward(self, ids: Tensor) -> Tensor:
        found = self if self.windows is None or not self.training else self.windows
        rows = found.place[ids]
        if found.padding is None:
            return look_up(found.weight, rows)
        return F.embedding(rows, found.weight, padding_idx=found.padding)  # its row gets no gradient

    def train(self, mode: bool = True) -> "LiveEmbedding":
        if not mode:
            self.fold()
        return super().train(mode)

    def fold(self) -> None:
        """Let `weight` be up to date."""
        if self.windows is not None:
            self.windows.fold()

    def close(self) -> None:
        """Let `weight` be up to date and free to be given other values."""
        self.fold()
        if self.windows is not None:
            self.windows.close()

    def widened(self, rows: Tensor, aside: Tensor | None = None) -> Tensor:
        """All rows, where `rows` are those in use; without `aside` the others are zeros."""
        whole = rows.new_zeros(self.num_embeddings, *rows.shape[1:])
        whole[self.live.to(rows.device)] = rows
        if aside is not None:
            whole[self.idle.to(rows.device)] = aside.to(rows.device)
        return whole

    def narrowed(self, whole: Tensor) -> Tensor:
        return whole[self.live.to(whole.device)]


def set_aside(model: Any, used: np.ndarray) -> tuple[int, int] | None:
    """Replace the input embedding by its rows in use, where it trains, is tied to nothing and that pays.
    Returns how many rows are in use, of how many; None where all stayed."""
    whole = model.get_input_embeddings()
    if type(whole) is not nn.Embedding:  # others may do more than look up
        return None
    plain = whole.max_norm is None and not whole.scale_grad_by_freq and not whole.sparse
    every = [module for _, module in model.named_modules(remove_duplicate=False)]
    owners = [m for m in every for p in m.parameters(recurse=False) if p is whole.weight]
    if not plain or len(owners) > 1 or not whole.weight.requires_grad:
        return None
    wanted = torch.zeros(whole.num_embeddings, dtype=torch.bool)
    wanted[: len(used)] = torch.from_numpy(used)
    if whole.padding_idx is not None:
        wanted[whole.padding_idx] = True
    if wanted.float().mean() > WORTH_IT:
        return None
    _put(model, whole, LiveEmbedding(whole, wanted))
    return int(wanted.sum()), len(wanted)


def put_back(model: nn.Module, shrinkage: Callable[[str], float] = lambda name: 1.0) -> None:
    """The embedding as it was, with all rows. Weight decay leaves so much of those that were set aside, by
    the name of the weight."""
    for name, live in live_weights(model).items():
        live.close()
        live.windows = None  # which holds on to the optimizer
        weight = live.widened(live.weight.detach(), live.aside * shrinkage(name))
        _put(model, live, nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=live.padding_idx))


def live_weights(model: nn.Module) -> dict[str, LiveEmbedding]:
    """The short embeddings of a model, by the name of their weight."""
    found = model.named_modules()
    return {f"{path}.weight": m for path, m in found if isinstance(m, LiveEmbedding)}


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    path = next(path for path, module in model.named_modules() if module is old)
    model.set_submodule(path, new.train(old.training))
