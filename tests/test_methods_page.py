"""docs/methods.md: its table of the presets is current. `python -m tests.test_methods_page` writes it anew.

The reasons in the last column are the page's own; everything else comes from the presets.
"""

import re
from pathlib import Path

import pytest
import torch

import oelm
from oelm.method import _PRESETS, BLOCKS, QK_SCALES, Method
from oelm.models.families import find_sites, frozen_names
from oelm.models.freeze_ratio import reached_share, resolve_ratio
from oelm.models.frozen_state import At, frozen_at
from oelm.models.learned import add_learned

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
HEADER = "| preset | start | frozen | trained, of Medium-512 | why it exists |\n|---|---|---|---|---|\n"
ROW = re.compile(r"^\| `([a-z0-9-]+)` \|(?:[^|]*\|){3} ([^|]+) \|$", re.MULTILINE)
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
    if method.qk_lora:
        parts.append(f"adapters of rank {method.qk_lora} on Q and K: no change")
    if method.qk_scale != "none":
        parts.append(f"a factor for each {QK_SCALES[method.qk_scale]}: 1")
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
    return "; ".join(parts + when(method)) or "nothing"


def when(method: Method) -> list[str]:
    """When a method's schedule freezes and unfreezes; shares of the steps in per cent."""
    schedule = method.schedule
    if schedule is None:
        return []
    words = []
    if schedule.freeze_at:
        words.append(f"from {schedule.freeze_at:.0%} of the steps on")
    if schedule.polar:
        words.append("made orthonormal then")
    if schedule.unfreeze_at is not None:
        words.append(f"until {schedule.unfreeze_at:.0%} of the steps, then unfrozen {schedule.order}")
    return [", ".join(words).replace("%", " %").replace("top-down", "top down")]


def trained(method: Method, share: float = 0.0) -> int:
    """The parameters that a method trains in Medium-512, a language model whose head is its embedding, after
    this share of a run."""
    with torch.device("meta"):
        model = oelm.OelmGPTForCausalLM(oelm.gpt_config("gpt-medium-512"))
        add_learned(model, method, 0, find_sites(model))
    frozen = frozen_at(model, method, At(int(share * 1000), 1000))
    return sum(p.numel() for name, p in model.named_parameters() if name not in frozen)


def trained_words(method: Method) -> str:
    if method.lora:
        return "-"
    start = trained(method)
    end = trained(method, 1.0) if method.schedule else start
    return f"{start:,}" if start == end else f"{start:,}, at the end {end:,}"


def table(reasons: dict[str, str]) -> str:
    rows = [
        f"| `{name}` | {starts(method)} | {freezes(method)} | "
        f"{trained_words(method)} | {reasons.get(name, '')} |\n"
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
    "name", ["oelm", "oelm-q-only", "oelm-qk-ffn", "norms-only", "top-2", "oelm-value-only", "oelm-lora"]
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
        "oelm-temperature": 41_751_040 + 6 * 8,
        "oelm-scale": 41_751_040 + 6 * 512,
        "oelm-lora": 41_751_040 + 6 * 2 * 8 * (512 + 512),
        "oelm-q-only": 44_896_768 - 6 * 512**2,
        "oelm-qk-ffn": 41_751_040 - 6 * (8 * 512**2 + 5 * 512),
        "linear-probe": 0,
        "norms-only": 6 * 4 * 512 + 2 * 512,
        "top-1": layer + 2 * 512,  # and the last norm
        "top-2": 2 * layer + 2 * 512,
    }
    assert {name: trained(_PRESETS[name]) for name in expected} == expected


def test_the_shares_of_medium_512_are_those_of_the_page():
    """All that docs/methods.md says of freeze_ratio, and what a ratio of 0.25 reaches."""
    with torch.device("meta"):
        model = oelm.OelmGPTForCausalLM(oelm.gpt_config("gpt-medium-512"))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(sizes.values())
    weights = {s.role: 0 for s in find_sites(model)}
    for site in find_sites(model):
        weights[site.role] += sizes[f"{site.path}.weight"]
    page, layers, frozen = PAGE.read_text(), sum(weights.values()), 0
    rows = {"all of Q and K": "q k", "and all of ffn_in": "ffn_in", "and all of ffn_out": "ffn_out"}
    for title, roles in rows.items():
        frozen += sum(weights[role] for role in roles.split())
        row = re.search(rf"^\| {title}[^|]*\| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
        assert row.groups() == (f"{frozen:,}", f"{frozen / total:.2%}".replace("%", " %"),
                                f"{frozen / layers:.2%}".replace("%", " %"))  # fmt: skip
    embeddings = sum(size for name, size in sizes.items() if re.search(r"\.(wte|wpe|.*embed.*)\.", name))
    ratio = resolve_ratio(model, Method.from_dict({"name": "oelm", "freeze_ratio": 0.25}))
    for value, words in (
        ((frozen + weights["v"] + weights["o"]) / total, "({} with them)"),
        (embeddings / total, "the embeddings ({})"),
        (reached_share(model, ratio), "prints the share reached: {}"),
    ):
        assert words.format(f"{value:.2%}".replace("%", " %")) in page.replace("\n", " "), value


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
