"""docs/methods.md: its table of the presets is current. `python -m tests.test_methods_page` writes it anew.

The reasons in the last column are the page's own; everything else comes from the presets.
"""

import re
from pathlib import Path

import pytest
import torch

import oelm
from oelm.method import _PRESETS, BLOCKS, Method
from oelm.models.families import frozen_names

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
HEADER = "| preset | start | frozen | trained, of Medium-512 | why it exists |\n|---|---|---|---|---|\n"
ROW = re.compile(r"^\| `([a-z0-9-]+)` \|.*\| ([^|]+) \|$", re.MULTILINE)
TITLES = {
    "q": "Q", "k": "K", "v": "V", "o": "O", "ffn_in": "FFN", "ffn_out": "FFN", "norms": "norms",
    "embeddings": "embeddings",
}  # fmt: skip
STARTS = {
    "orthogonal": "head-wise orthonormal",
    "polar": "the orthonormal block nearest to each head's own",
    "global": "one orthonormal matrix over all heads",
    "hadamard": "columns of a randomised Hadamard matrix",
    "gaussian": "N(0, 1/d_model)",
    "normal": "N(0, 0.02²)",
}


def starts(method: Method) -> str:
    words: dict[str, list[str]] = {}
    for role, kind in method.start.items():
        text = STARTS[kind] if role in ("q", "k") else "orthonormal"
        if method.init == "fresh":
            text += ", always drawn"
        if method.gain == "own":
            text += ", with its spectral norm"
        words.setdefault(text, []).append(TITLES[role])
    parts = [f"{', '.join(dict.fromkeys(titles))}: {text}" for text, titles in words.items()]
    if method.lora:
        parts.append(f"adapters of rank {method.lora} beside Q and V")
    return "; ".join(parts) or "as it was"


def freezes(method: Method) -> str:
    words: dict[str, list[str]] = {}
    for role, layers in method.freeze.items():
        words.setdefault(layers, []).append(role)
    parts = []
    for layers, roles in words.items():
        whole = layers != "all" and roles == [*BLOCKS]
        names = "layers" if whole else ", ".join(dict.fromkeys(TITLES[role] for role in roles))
        parts.append(names if layers == "all" else f"{names} `{layers}`")
    if method.scores == "constant":
        parts.append("no gradient through the scores")
    return "; ".join(parts) or "nothing"


def trained(method: Method) -> int:
    """The parameters that a method trains in Medium-512, a language model whose head is its embedding."""
    with torch.device("meta"):
        model = oelm.OelmGPTForCausalLM(oelm.gpt_config("gpt-medium-512"))
    frozen = frozen_names(model, method)
    return sum(p.numel() for name, p in model.named_parameters() if name not in frozen)


def table(reasons: dict[str, str]) -> str:
    rows = [
        f"| `{name}` | {starts(method)} | {freezes(method)} | "
        f"{'-' if method.lora else f'{trained(method):,}'} | {reasons.get(name, '')} |\n"
        for name, method in _PRESETS.items()
    ]
    return HEADER + "".join(rows)


def current(page: str) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(HEADER)
    assert rest, "the page has no table of presets"
    reasons = dict(ROW.findall(rest))
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    return before + table(reasons) + after


def test_the_table_of_presets_is_current():
    page = PAGE.read_text()
    assert current(page) == page, "python -m tests.test_methods_page writes it"


def test_every_preset_has_a_reason_of_its_own():
    reasons = dict(ROW.findall(PAGE.read_text()))
    assert [*reasons] == [*_PRESETS]
    assert len({*reasons.values()}) == len(reasons)


@pytest.mark.parametrize(
    "name", ["oelm", "oelm-q-only", "oelm-qk-ffn", "norms-only", "top-2", "oelm-value-only"]
)
def test_counts_are_those_of_a_conversion(name):
    model = oelm.OelmGPTForCausalLM(oelm.gpt_config("gpt-tiny", vocab_size=300))
    report = oelm.convert(model, name)
    assert report.total - report.trainable == sum(
        p.numel() for path, p in model.named_parameters() if path in frozen_names(model, _PRESETS[name])
    )


def test_counts_of_the_reports():
    layer = 4 * 512**2 + 8 * 512**2 + 5 * 512 + 4 * 512  # projections, feed-forward network, biases, norms
    expected = {
        "baseline": 44_896_768,
        "oelm": 41_751_040,
        "oelm-q-only": 44_896_768 - 6 * 512**2,
        "oelm-qk-ffn": 41_751_040 - 6 * (8 * 512**2 + 5 * 512),
        "linear-probe": 0,
        "norms-only": 6 * 4 * 512 + 2 * 512,
        "top-1": layer + 2 * 512,  # and the last norm
        "top-2": 2 * layer + 2 * 512,
    }
    assert {name: trained(_PRESETS[name]) for name in expected} == expected


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
