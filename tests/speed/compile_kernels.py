"""Compiles every kernel for a GPU of the named compute capability (90: Hopper), without one, and compares the
shared memory it needs with what `speed/capabilities.py` says. Run by test_interpreted.py."""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from oelm.speed.capabilities import KERNELS, LEAST_SHARED
from oelm.speed.kernels import (
    adamw_triton,
    attention_triton,
    cross_entropy_triton,
    joint_triton,
    norm_triton,
    rotary_triton,
    rows_triton,
    value_only_triton,
)

NAMES = {  # of the kernels in `KERNELS`, by their modules
    "adamw_triton": "adamw", "attention_triton": "attention", "cross_entropy_triton": "cross_entropy",
    "joint_triton": "attention", "norm_triton": "norm", "rotary_triton": "rotary",
    "rows_triton": "rows", "value_only_triton": "value_only",
}  # fmt: skip


class Gpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


driver.set_active(Gpu())


def check(kernel: triton.JITFunction, *args: object, **kwargs: object) -> Any:
    made = kernel.warmup(*args, grid=(1,), **kwargs)
    name = NAMES[kernel.__module__.rpartition(".")[2]]
    names = ("attention", "value_only") if kernel is attention_triton.forward_kernel else (name,)
    for name in names:
        assert made.metadata.shared <= KERNELS[name] <= LEAST_SHARED, (kernel, kwargs, made.metadata.shared)
    assert "cubin" in made.asm
    return made


numbers, bounds = MockTensor(torch.float32), MockTensor(torch.int32)
for head_dim in (64, 128):
    width = 8 * head_dim
    for dtype in (torch.bfloat16, torch.float32):
        x = MockTensor(dtype)
        for causal in (False, True):
            batch = 1 if not causal else 4
            like = torch.empty(batch, 8, 4096, head_dim, dtype=dtype, device="meta")
            cu_seqlens = None if causal else torch.empty(9, dtype=torch.int32, device="meta")
            strides = (4096 * 3 * width, head_dim, 3 * width, 1)
            common = attention_triton.arguments(like, cu_seqlens, causal, 0.1)
            common["cu_seqlens"] = None if causal else bounds
            for kernel, tensors, count, tiles in (
                (attention_triton.forward_kernel, [x, x, x, x, numbers], 4, attention_triton.FORWARD),
                (value_only_triton._value_kernel, [x, x, numbers, x, x], 4, value_only_triton.VALUE_ONLY),
                (joint_triton._query_kernel, [x] * 5 + [numbers] * 2 + [x], 4, joint_triton.QUERIES),
                (
                    joint_triton._key_kernel,
                    [x] * 4 + [numbers] * 2 + [x] * 2,
                    3,
                    joint_triton.KEYS if causal else joint_triton.KEYS_BOTH_WAYS,
                ),
            ):
                more = {"to_score": 0.1} if kernel.__module__ == joint_triton.__name__ else {}
                options = attention_triton.launch_options(tiles, like)
                plain = attention_triton.NOTHING_HIDDEN.arguments()
                dropped = {"DROPOUT": True, "seed": MockTensor(torch.int64), "chance": 0.1}
                hidden = [plain]
                if head_dim == 64 and dtype == torch.bfloat16 and not causal:  # each takes seconds to compile
                    hidden += [plain | dropped, plain | {"WINDOW": 64}]
                for values in [{}] if kernel is value_only_triton._value_kernel else hidden:
                    check(kernel, *tensors, *[strides] * count, **common, **more, **values, **options)
check(adamw_triton._coast_kernel, *[numbers] * 5, 16, 7, 1 << 20, 0.9, 0.999, 1e-8, BLOCK=adamw_triton.BLOCK)
tables = {"PIECE": adamw_triton.PIECE}
check(adamw_triton._squares_kernel, MockTensor(torch.int64), numbers, numbers, 100, **tables)
check(
    adamw_triton._factors_kernel, MockTensor(torch.int64), MockTensor(torch.float64), *[numbers] * 4, 1.0,
    WALKERS=adamw_triton.WALKERS,
)  # fmt: skip
check(
    adamw_triton._step_kernel, MockTensor(torch.int64), *[numbers] * 3, 0.9, 0.1, 0.999, 0.001, 1e-8,
    **tables, num_warps=8,
)  # fmt: skip
check(rows_triton._order_kernel, MockTensor(torch.int64), bounds, bounds, 4700, **rows_triton.ORDER)
check(rows_triton._row_sums_kernel, numbers, bounds, bounds, numbers, 4700, 512, **rows_triton.SUM)
check(norm_triton._places_kernel, MockTensor(torch.int64), *[numbers] * 2, bounds, 8, 512, WIDTH=512)
check(norm_triton._column_sums_kernel, numbers, numbers, 528, 1024, **norm_triton.SUMS)
for dtype in rotary_triton.DTYPES:
    x = MockTensor(dtype)
    sizes = 262_144, 512, 8, 32, 786_432, 1_536, 64
    for back in (False, True):
        made = check(
            rotary_triton._rotate_kernel, x, numbers, numbers, x, *sizes,
            BACK=back, ROWS=rotary_triton.TILE // 32, WIDTH=32, **rotary_triton.OPTIONS,
        )  # fmt: skip
        if dtype == torch.float16 or int(sys.argv[1]) >= 90:  # before, a product in bf16 is one of these
            assert "fma" not in made.asm["ptx"], "a product and a sum must be rounded one after the other"
for dtype in (torch.bfloat16, torch.float32):
    x = MockTensor(dtype)
    tile = norm_triton._tile(torch.empty(1, 512, device="meta"))
    check(norm_triton._norm_forward_kernel, *[numbers] * 5, x, numbers, numbers, 4096, 512, 1e-5, **tile)
    for picked in (False, True):
        check(
            norm_triton._norm_backward_kernel, *[numbers] * 5, bounds, x, numbers, x, numbers, 4096, 512, 8,
            STRAIGHT=True, PICKED=picked, NARROW=True, **tile,
        )  # fmt: skip
    for write in (False, True):
        check(
            cross_entropy_triton._cross_entropy_kernel, x, MockTensor(torch.int64), numbers,
            50304, 50257, 0.1, 1.0, -100, SMOOTHING=write, WRITE=write,
            BLOCK=cross_entropy_triton.BLOCK, num_warps=cross_entropy_triton.WARPS,
        )  # fmt: skip
