"""Triton's interpreter, made to show what a GPU would show. For the tests that TRITON_INTERPRET=1 runs."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor

from oelm.speed.kernels import attention_triton


@pytest.fixture(autouse=True)
def honest_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results start as NaN, so that what is not written is seen; bfloat16 is rounded, as a GPU does it."""
    torch.manual_seed(0)
    empty, convert = Tensor.new_empty, interpreter._convert_float

    def rounding(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:  # Triton's interpreter cuts off instead
            return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()
        return convert(data, source, target, mode)

    def unwritten(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = empty(self, *args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", unwritten)
    monkeypatch.setattr(interpreter, "_convert_float", rounding)


@pytest.fixture(params=[(32, 16), (16, 32)], ids=str)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "INTERPRETED_TILES", attention_triton.Tiles(*request.param, 4, 1))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())
