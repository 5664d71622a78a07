"""Which fast paths a device has: decided from what is known of it, so any kind of machine can be asked about.

    python -m tests.speed.test_capabilities

writes the table of docs/speed.md anew.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oelm.speed.capabilities import (
    KERNELS,
    Machine,
    capabilities,
    device_capabilities,
    machine_of,
    without_failing,
)
from tests.command_line import caller

NVIDIA = Machine("cuda", (9, 0), bf16=True, shared_memory=232_448, triton=True, varlen=True)
TURING = replace(NVIDIA, capability=(7, 5), bf16=False, shared_memory=65_536)
MACHINES = {
    "Hopper (9.0: H100, H200)": NVIDIA,
    "Ampere (8.0: A100)": replace(NVIDIA, capability=(8, 0), shared_memory=166_912),
    "Ampere (8.6: A5000, RTX 30)": replace(NVIDIA, capability=(8, 6), shared_memory=101_376),
    "Ada (8.9: L40, RTX 40)": replace(NVIDIA, capability=(8, 9), shared_memory=101_376),
    "Blackwell (10.0: B200)": replace(NVIDIA, capability=(10, 0)),
    "Blackwell (12.0: RTX 50)": replace(NVIDIA, capability=(12, 0), shared_memory=101_376),
    "Turing (7.5: T4, RTX 20)": TURING,
    "Volta (7.0: V100)": replace(TURING, capability=(7, 0), shared_memory=98_304),
    "NVIDIA without Triton": replace(NVIDIA, triton=False),
    "AMD": replace(NVIDIA, amd=True, capability=(9, 4)),
    "Apple (mps)": Machine("mps"),
    "CPU": Machine("cpu", triton=True, varlen=True),
}
COLUMNS = {
    "packed texts": ("packed",), "CUDA graphs": ("graphs",), "bf16 copies": ("bf16_copies",),
    "attention, norms": ("attention", "norm"), "value-only": ("value_only",), "rotary": ("rotary",),
    "loss": ("cross_entropy",), "embedding's gradient": ("rows",), "AdamW": ("adamw",),
}  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "speed.md"
BEGIN, END = "<!-- capabilities: begin -->\n", "<!-- capabilities: end -->\n"


def table() -> str:
    rows = [["", "auto", *COLUMNS], ["---"] * (len(COLUMNS) + 2)]
    for name, machine in MACHINES.items():
        found = capabilities(machine)
        cells = ["no" if any(found[path] for path in paths) else "yes" for paths in COLUMNS.values()]
        rows.append([name, "bf16" if machine.bf16 else "fp32", *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_hopper_has_everything_and_a_cpu_nothing() -> None:
    assert set(capabilities(NVIDIA).values()) == {None}
    assert (
        None not in capabilities(MACHINES["CPU"]).values()
        and None not in capabilities(MACHINES["Apple (mps)"]).values()
    )
    assert capabilities(MACHINES["CPU"])["packed"] == "without a GPU padding to similar lengths is as fast"
    assert capabilities(MACHINES["CPU"])["graphs"] == "CUDA graphs need a GPU"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_ampere_and_ada_have_all_but_what_was_measured_on_hopper(capability: tuple[int, int]) -> None:
    found = capabilities(replace(NVIDIA, capability=capability, shared_memory=101_376))
    missing = {name for name, why in found.items() if why}
    assert missing == {"attention", "norm"}
    machine = replace(NVIDIA, capability=capability, shared_memory=101_376, all_kernels=True)
    assert set(capabilities(machine).values()) == {None}


def test_blackwell_takes_pytorchs_kernels_unless_asked() -> None:
    for capability in ((10, 0), (12, 0)):
        machine = replace(NVIDIA, capability=capability)
        assert {name for name, why in capabilities(machine).items() if why} == set(KERNELS)
        assert set(capabilities(replace(machine, all_kernels=True)).values()) == {None}


def test_older_gpus_pad_and_have_no_bf16() -> None:
    for all_kernels in (False, True):  # what cannot run is not turned on
        found = capabilities(replace(TURING, all_kernels=all_kernels))
        assert found["graphs"] is None
        assert found["packed"] and "8.0, not 7.5" in found["packed"]
        assert found["bf16_copies"] and all(found[name] for name in KERNELS)


def test_every_machine_is_answered_with_a_reason_for_what_it_lacks() -> None:
    kinds = ("cuda", "cpu", "mps", "xpu"), ((0, 0), (7, 0), (8, 6), (9, 0), (12, 1)), (4096, 101_376)
    for device, capability, shared, amd, bf16, triton, varlen, all_kernels in itertools.product(
        *kinds, *[(False, True)] * 5
    ):
        machine = Machine(device, capability, amd, bf16, shared, triton, varlen, False, all_kernels)
        found = capabilities(machine)
        assert all(why is None or why.strip() for why in found.values())
        if device != "cuda" or amd:
            assert None not in found.values()
        if not triton or capability < (8, 0):
            assert all(found[name] for name in KERNELS)
        for name, bytes_ in KERNELS.items():
            assert found[name] or bytes_ <= shared, "no program is started that does not fit"


def test_a_kernel_that_fails_gives_way_and_the_first_takes_all_with_it() -> None:
    def broken() -> None:
        raise RuntimeError("out of resource: shared memory\nand more")

    found, runs = capabilities(NVIDIA), []
    good = {name: lambda name=name: runs.append(name) for name in ("rows", "adamw", "norm")}
    assert without_failing(found, good, everything=False) == found and runs == ["rows"]
    assert without_failing(found, good, everything=True) == found and runs == ["rows", *good]
    reason = "it does not run here: out of resource: shared memory"
    assert without_failing(found, good | {"norm": broken}, everything=True) == found | {"norm": reason}
    nothing = without_failing(found, good | {"rows": broken}, everything=False)
    assert nothing == found | dict.fromkeys(KERNELS, reason)
    off = found | {"norm": "not measured"}
    assert without_failing(off, good | {"norm": broken}, everything=True) == off, "what is off is not tried"


def test_the_device_at_hand_is_described_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert machine_of(cpu).device == "cpu" and not machine_of(cpu).bf16
    assert device_capabilities(cpu) == capabilities(machine_of(cpu)) and device_capabilities(
        cpu
    ) is device_capabilities(cpu)
    monkeypatch.setenv("OELM_KERNELS", "all")
    assert machine_of(cpu).all_kernels


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    oelm_cli = caller(monkeypatch, capsys)
    code, out, _ = oelm_cli("doctor", "--json")
    record = json.loads(out)
    assert code == 0 and record["packages"]["torch"] == torch.__version__
    cpu = record["devices"][-1]
    assert cpu["device"] == "cpu" and cpu["why_not"] == device_capabilities(torch.device("cpu"))
    code, out, _ = oelm_cli("doctor")
    assert code == 0 and "graphs         no: CUDA graphs need a GPU" in out


def test_the_table_in_the_documentation_is_current() -> None:
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table()


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN)] + BEGIN + table() + text[text.index(END) :])
