"""An embedding whose parameter holds the rows that a run's texts use, and no others.

The texts of one task use a part of the vocabulary. The other rows never get a gradient, yet the optimizer
reads and writes them and their moments at every step, and for a small model that is most of a step. Here they
are set aside until the model is saved. The rows in use (live) train as usual; the others (idle) keep their
values until the run ends, and are then shrunk at once by the weight decay of all steps.
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
    """Replaces an embedding: the same outputs, but `weight` holds only the live rows."""

    def __init__(self, whole: nn.Embedding, used: Tensor) -> None:
        nn.Module.__init__(self)  # nn.Embedding's would draw a whole matrix of random numbers
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = whole.padding_idx, None, whole.norm_type
        self.scale_grad_by_freq, self.sparse = False, False
        self.live, self.idle = used.nonzero()[:, 0], (~used).nonzero()[:, 0]
        weight = whole.weight.detach()
        self.weight = nn.Parameter(weight[self.live.to(weight.device)])
        self.idle_rows = weight[self.idle.to(weight.device)].cpu()
        place = torch.full((len(used),), -1)
        place[self.live] = torch.arange(len(self.live))
        self.place: Tensor
        self.register_buffer("place", place.to(weight.device), persistent=False)
        self.padding = None if self.padding_idx is None else int(place[self.padding_idx])
        self.windows: RowWindows | None = None  # through which it trains, if that is faster

    def forward(self, ids: Tensor) -> Tensor:
        active = self if self.windows is None or not self.training else self.windows
        rows = active.place[ids]
        if active.padding is None:
            return look_up(active.weight, rows)
        return F.embedding(rows, active.weight, padding_idx=active.padding)  # its row gets no gradient

    def train(self, mode: bool = True) -> "LiveEmbedding":
        if not mode:
            self.write_back()
        return super().train(mode)

    def write_back(self) -> None:
        """Bring `weight` up to date."""
        if self.windows is not None:
            self.windows.write_back()

    def close(self) -> None:
        """Bring `weight` up to date and detach the windows, so that it can be given other values."""
        self.write_back()
        if self.windows is not None:
            self.windows.close()

    def all_rows(self, rows: Tensor, idle_rows: Tensor | None = None) -> Tensor:
        """All rows, from the live `rows` and the idle ones; without `idle_rows` these are zeros."""
        whole = rows.new_zeros(self.num_embeddings, *rows.shape[1:])
        whole[self.live.to(rows.device)] = rows
        if idle_rows is not None:
            whole[self.idle.to(rows.device)] = idle_rows.to(rows.device)
        return whole

    def select_live(self, whole: Tensor) -> Tensor:
        return whole[self.live.to(whole.device)]


def set_aside(model: Any, used: np.ndarray) -> tuple[int, int] | None:
    """Replace the input embedding by its live rows, if it trains, is not tied and enough rows are idle.
    Returns the numbers of live rows and of all rows; None if nothing was replaced."""
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
    _replace_module(model, whole, LiveEmbedding(whole, wanted))
    return int(wanted.sum()), len(wanted)


def put_back(model: nn.Module, shrinkage: Callable[[str], float] = lambda name: 1.0) -> None:
    """Restore the embedding with all rows. `shrinkage`: name of the weight -> the factor that weight decay
    leaves of its idle rows."""
    for name, live in live_weights(model).items():
        live.close()
        live.windows = None  # it refers to the optimizer
        weight = live.all_rows(live.weight.detach(), live.idle_rows * shrinkage(name))
        _replace_module(
            model, live, nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=live.padding_idx)
        )


def live_weights(model: nn.Module) -> dict[str, LiveEmbedding]:
    """The live embeddings of a model, by the name of their weight."""
    modules = model.named_modules()
    return {f"{path}.weight": m for path, m in modules if isinstance(m, LiveEmbedding)}


def _replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    path = next(path for path, module in model.named_modules() if module is old)
    model.set_submodule(path, new.train(old.training))
