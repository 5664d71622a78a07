"""The fast paths that a device has, and why not the others, as a function of a description of the machine.

Our kernels were measured on Hopper GPUs. Kernels that only save passes over memory run on every NVIDIA GPU
with bfloat16; attention and norms, for which PyTorch has good kernels, only where they were measured.
OELM_KERNELS=all turns on all kernels that can run.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from oelm.speed.kernels import load_kernels
from oelm.system.library_errors import first_line
from oelm.system.private_torch import varlen_attn
from oelm.training.resolve import resolve_precision

attention_triton = load_kernels("attention_triton")
MEASURED = 9  # Hopper: compute capability, the major number
LEAST_SHARED = 99 * 1024  # bytes of shared memory that a program has on every GPU with bfloat16
# The most shared memory (bytes) of a program of each, compiled for 8.0 to 12.0
# (tests/speed/compile_kernels.py).
KERNELS = {
    "attention": 82_944, "norm": 4_096, "value_only": 82_944, "cross_entropy": 128, "rows": 2_048,
    "adamw": 8_192, "rotary": 0,
}  # fmt: skip
WHERE_MEASURED = ("attention", "norm")


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that decide its fast paths."""

    device: str  # as PyTorch calls it: cuda (NVIDIA's and AMD's), mps, cpu
    capability: tuple[int, int] = (0, 0)  # of an NVIDIA GPU
    amd: bool = False
    bf16: bool = False  # in hardware
    shared_memory: int = LEAST_SHARED  # bytes, of a program on a GPU
    triton: bool = False
    varlen: bool = False  # PyTorch was built with flash attention for packed texts
    interpreted: bool = False  # Triton's interpreter computes the kernels on the CPU
    all_kernels: bool = False  # OELM_KERNELS=all: also kernels that were not measured on this GPU


Capabilities = dict[str, str | None]  # fast path -> None if the device has it, else the reason why not


def capabilities(machine: Machine) -> Capabilities:
    graphs = _why_no_graphs(machine)
    return {
        "packed": _why_padded(machine),
        "graphs": graphs,
        "bf16_copies": graphs or (None if machine.bf16 else "this device has no bfloat16"),
        **{name: _why_no_kernel(machine, name) for name in KERNELS},
    }


def _why_padded(machine: Machine) -> str | None:
    if machine.device != "cuda":
        return "without a GPU padding to similar lengths is as fast" if machine.device == "cpu" else (
            "flash attention for packed texts needs an NVIDIA GPU"
        )  # fmt: skip
    if machine.amd:
        return "flash attention for packed texts was not tried on an AMD GPU"
    if machine.capability < (8, 0):
        return f"flash attention for packed texts needs compute capability 8.0, not {_number(machine)}"
    return None if machine.varlen else "this PyTorch was built without flash attention for packed texts"


def _why_no_graphs(machine: Machine) -> str | None:
    if machine.device != "cuda":
        return "CUDA graphs need a GPU" if machine.device == "cpu" else "CUDA graphs need an NVIDIA GPU"
    return "CUDA graphs were not tried on an AMD GPU" if machine.amd else None


def _why_no_kernel(machine: Machine, name: str) -> str | None:
    if machine.interpreted:
        return None
    if machine.device != "cuda" or machine.amd:
        return "our kernels are for NVIDIA GPUs"
    if not machine.triton:
        return "Triton is not installed"
    if machine.capability < (8, 0):
        return f"our kernels need compute capability 8.0, not {_number(machine)}"
    if KERNELS[name] > machine.shared_memory:
        return f"it needs {KERNELS[name]:,} bytes of shared memory, and there are {machine.shared_memory:,}"
    if machine.capability[0] == MEASURED or machine.all_kernels:
        return None
    if machine.capability[0] > MEASURED or name in WHERE_MEASURED:
        return f"not measured on compute capability {_number(machine)}; OELM_KERNELS=all turns it on"
    return None


def _number(machine: Machine) -> str:
    return ".".join(map(str, machine.capability))


def machine_of(device: torch.device) -> Machine:
    known: dict[str, Any] = {"bf16": resolve_precision("auto", device)[0] == "bf16"}
    if device.type == "cuda":
        known["amd"] = torch.version.hip is not None
        known["capability"] = torch.cuda.get_device_capability(device)
        properties = torch.cuda.get_device_properties(device)
        known["shared_memory"] = getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED)
    all_kernels = os.environ.get("OELM_KERNELS") == "all"
    interpreted = attention_triton is not None and attention_triton.INTERPRETED
    return Machine(
        device.type, triton=attention_triton is not None, varlen=varlen_attn is not None,
        interpreted=interpreted, all_kernels=all_kernels, **known,
    )  # fmt: skip


@cache
def device_capabilities(device: torch.device) -> Capabilities:
    """The `capabilities` of this device, without kernels that fail a trial."""
    machine = machine_of(device)
    expected = capabilities(machine)
    if device.type != "cuda" or all(expected[name] for name in KERNELS):
        return expected
    from oelm.speed.trial import trials

    return without_failing(expected, trials(device), everything=machine.capability[0] != MEASURED)


def without_failing(
    expected: Capabilities, trials: dict[str, Callable[[], Any]], everything: bool
) -> Capabilities:
    """`expected` without the kernels whose trial fails. The first trial shows whether Triton works at all;
    the others are only made with `everything`, as each takes a second to compile."""
    first = next(iter(trials))
    for name, trial in trials.items():
        if expected[name] is None and (everything or name == first):
            try:
                trial()
            except Exception as error:  # compilers, drivers and launchers raise many kinds
                reason = f"it does not run here: {first_line(error)}"
                lost = KERNELS if name == first else (name,)
                expected = expected | {each: expected[each] or reason for each in lost}
    return expected


@torch.compiler.assume_constant_result
def runs(name: str, device: torch.device) -> bool:
    """Whether this fast path runs on this device; a constant for torch.compile."""
    return device_capabilities(device)[name] is None
