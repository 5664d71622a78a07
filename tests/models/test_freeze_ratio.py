"""freeze_ratio: as much as fits is frozen, in the stated order, and not a matrix more."""

import json
import signal

import pytest
import torch
import transformers

import oelm
from oelm.config import make_config, resolve_config
from oelm.errors import UserError
from oelm.method import Method
from oelm.models.families import find_sites
from oelm.models.freeze_ratio import resolve_ratio
from oelm.orthogonal import deviation
from tests.tiny import BUILDERS, build
from tests.training.runs import Strike, outcome

# The matrices of layer * in the order in which they are frozen, three groups, and the biases of q and k.
NAMES = {
    "oelm-gpt": (
        ["transformer.h.*.attn.q_proj.weight", "transformer.h.*.attn.k_proj.weight"],
        ["transformer.h.*.mlp.fc_in.weight"],
        ["transformer.h.*.mlp.fc_out.weight"],
    ),
    "bert": (
        [
            "bert.encoder.layer.*.attention.self.query.weight",
            "bert.encoder.layer.*.attention.self.key.weight",
        ],
        ["bert.encoder.layer.*.intermediate.dense.weight"],
        ["bert.encoder.layer.*.output.dense.weight"],
    ),
    "gpt2": (
        ["transformer.h.*.attn.c_attn.q.weight", "transformer.h.*.attn.c_attn.k.weight"],
        ["transformer.h.*.mlp.c_fc.weight"],
        ["transformer.h.*.mlp.c_proj.weight"],
    ),
}
HAS_BIAS = {"oelm-gpt": False, "bert": True, "gpt2": True}
three_models = pytest.mark.parametrize("name", NAMES)


def ratio(value, of="all", name="oelm"):
    return Method.from_dict({"name": name, "freeze_ratio": value, "freeze_ratio_of": of})


def frozen(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def in_order(name):
    """The names in groups that are frozen together: a matrix, and its bias where it is q or k."""
    for number, group in enumerate(NAMES[name]):
        for layer in range(3):
            for weight in group:
                weight = weight.replace("*", str(layer))
                bias = [weight.replace("weight", "bias")] if HAS_BIAS[name] and number == 0 else []
                yield [weight, *bias]


def full_size(name):
    """A published size without its values."""
    with torch.device("meta"):
        if name == "medium":
            return oelm.OelmGPTForCausalLM(oelm.gpt_config("gpt-medium-512"))
        if name == "bert":
            return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3))
        return transformers.GPT2LMHeadModel(transformers.GPT2Config())


TOTALS = {"medium": 44_896_768, "bert": 109_484_547, "gpt2": 124_439_808}
QK, UP = {"q": "all", "k": "all"}, {"q": "all", "k": "all", "ffn_in": "all"}
ALL = UP | {"ffn_out": "all"}


@pytest.mark.parametrize(
    ("name", "value", "of", "parameters", "freeze"),
    [
        ("medium", 0.02, "all", 786_432, {"q": "0,1", "k": "0"}),
        ("medium", 0.075, "all", 3_145_728, QK),
        ("medium", 0.25, "all", 10_485_760, UP | {"ffn_out": "0"}),
        ("medium", 15_728_640 / 44_896_768, "all", 15_728_640, ALL),
        ("medium", 0.50, "blocks", 9_437_184, UP),
        ("bert", 0.075, "all", 7_677_696, {"q": "0,1,2,3,4,5,6", "k": "0,1,2,3,4,5"}),
        ("bert", 0.13, "all", 14_174_208, QK),
        ("bert", 0.25, "all", 25_970_688, QK | {"ffn_in": "0,1,2,3,4"}),
        ("bert", 0.50, "all", 54_282_240, UP | {"ffn_out": "0,1,2,3,4"}),
        ("bert", 0.50, "blocks", 42_485_760, UP),
        ("gpt2", 0.25, "all", 30_689_280, QK | {"ffn_in": "0,1,2,3,4,5,6"}),
        ("gpt2", 0.50, "all", 61_360_128, UP | {"ffn_out": "0,1,2,3,4,5,6,7"}),
        ("gpt2", 0.50, "blocks", 42_485_760, UP),
    ],
)
def test_published_sizes(name, value, of, parameters, freeze):
    model = full_size(name)
    assert sum(p.numel() for p in model.parameters()) == TOTALS[name]
    method = resolve_ratio(model, ratio(value, of))
    assert method.freeze == freeze and method.start == dict.fromkeys(freeze, "orthogonal")
    width, biased = (512, 0) if name == "medium" else (768, 1)
    sizes = {"q": width**2 + biased * width, "ffn_in": 4 * width**2} | {"ffn_out": 4 * width**2}
    depth = {"medium": 6}.get(name, 12)
    counts = {role: depth if layers == "all" else layers.count(",") + 1 for role, layers in freeze.items()}
    assert sum(sizes["q" if role == "k" else role] * count for role, count in counts.items()) == parameters


@pytest.mark.parametrize(
    ("name", "value", "of", "message"),
    [
        ("medium", 0.50, "all", r"0.5 is out of reach: .* are 35.03 % of all parameters \(0.350329"),
        ("medium", 0.90, "blocks", "are 83.33 % of the layers' weight matrices"),
        ("medium", 0.005, "all", "0.005 freezes nothing: q of layer 0 alone is 0.58 % of all parameters"),
        ("bert", 0.65, "all", "are 64.66 % of all parameters"),
        ("gpt2", 0.60, "all", "are 56.89 % of all parameters"),
    ],
)
def test_beyond_reach(name, value, of, message):
    model = full_size(name)
    with pytest.raises(UserError, match=message):
        oelm.convert(model, ratio(value, of))
    assert all(p.requires_grad for p in model.parameters()) and not getattr(model.config, "oelm", None)


@three_models
@pytest.mark.parametrize(("value", "of"), [
    (0.075, "all"), (0.12, "all"), (0.25, "all"), (0.31, "all"), (0.075, "blocks"), (0.5, "blocks"),
])  # fmt: skip
def test_as_much_as_fits_in_the_stated_order(name, value, of):
    model = build(name)
    report = oelm.convert(model, ratio(value, of))
    split = build(name)
    oelm.convert(split, "oelm")  # of GPT-2's fused matrices only those that are partly frozen are split
    sizes = {path: p.numel() for path, p in split.named_parameters()}
    counted = sizes if of == "all" else {path: n for path, n in sizes.items() if path.endswith("weight")}
    total = sum(sizes.values())
    if of == "blocks":
        total = sum(site.weight.numel() for site in find_sites(model))
    order = [*in_order(name)]
    groups = [group for group in order if group[0] in frozen(model)]
    assert groups == order[: len(groups)] and 0 < len(groups) < len(order)
    assert frozen(model) == {path for group in groups for path in group}
    share = sum(counted.get(path, 0) for path in frozen(model)) / total
    more = share + sum(counted.get(path, 0) for path in order[len(groups)]) / total
    assert report.reached == pytest.approx(share) and share <= value < more
    assert f"freeze_ratio {value}: {100 * share:.2f} % of " in str(report)
    assert report.frozen == sum(sizes[path] for path in frozen(model))
    oelm.audit(model)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("value", [0.1, 0.2, 0.4])
def test_every_family(name, value):
    model, untouched = build(name), build(name)
    report = oelm.convert(model, ratio(value, "blocks"), seed=3)
    oelm.audit(model, oelm.fingerprint(model))
    assert 0 < report.reached <= value
    json.dumps(report.to_dict())
    for site, before in zip(find_sites(model), find_sites(untouched), strict=True):
        weight = site.weight
        if site.part is None and not site.module.weight.requires_grad:
            gain = 8**-0.5 if name.startswith("t5") and site.role == "q" else 1.0
            if not site.role.startswith("ffn"):
                assert deviation(weight, site.heads, gain).max() < 1e-6
            else:
                assert deviation(weight if weight.shape[0] <= weight.shape[1] else weight.t(), 1).max() < 1e-6
        else:
            assert torch.equal(weight, before.weight), f"{site.path} trains and starts as it was"


def test_a_preset_keeps_its_own_start_of_q_and_k():
    model = build("bert")
    report = oelm.convert(model, ratio(0.4, "blocks", "oelm-gaussian"))
    rows = {row.role: row.start for row in report.rows}
    assert rows["q"] == rows["k"] == "gaussian, fresh"
    assert rows["ffn_in"] == "orthogonal, from its own weight, where frozen" and rows["v"] == "as it was"


def test_a_checkpoint_keeps_what_was_frozen_whatever_its_head(tmp_path):
    """A share of another total would be other matrices."""
    for name, plain in (("oelm-gpt", oelm.OelmGPTModel), ("bert", transformers.BertModel)):
        model = build(name)
        oelm.convert(model, ratio(0.3))
        model.save_pretrained(tmp_path / name)
        prefix = f"{model.base_model_prefix}."
        expected = {path.removeprefix(prefix) for path in frozen(model)}
        again = oelm.load(str(tmp_path / name))
        assert frozen(again) == frozen(model) and oelm.audit(again).frozen_parameters > 0
        headless = plain.from_pretrained(tmp_path / name)
        oelm.refreeze(headless)
        assert frozen(headless) == expected
        oelm.release(again)
        assert not frozen(again)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"freeze_ratio": 0.0}, "above 0 and at most 1, not 0.0"),
        ({"freeze_ratio": 1.2}, "above 0 and at most 1"),
        ({"freeze_ratio": True}, "above 0 and at most 1"),
        ({"freeze_ratio": 0.2, "freeze_ratio_of": "layers"}, "freeze_ratio_of 'layers'; known: all, blocks"),
        ({"freeze_ratio_of": "blocks"}, "needs a freeze_ratio"),
        ({"name": "top-2", "freeze_ratio": 0.2}, "method top-2 .*also freezes v, o, norms, embeddings"),
    ],
)
def test_nonsense_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Method.from_dict({"name": "oelm"} | fields)


def test_constant_scores_need_all_of_q_and_k():
    assert oelm.convert(build("oelm-gpt"), ratio(0.3, name="oelm-value-only")).reached <= 0.3
    with pytest.raises(UserError, match="freeze both in all layers"):
        oelm.convert(build("oelm-gpt"), ratio(0.04, name="oelm-value-only"))


def test_a_config_has_a_ratio_or_layers():
    config = resolve_config({}, None, {"method.name": "oelm"}, ["method.freeze_ratio=0.25"])
    assert Method.from_dict(config.method.overrides()).name == "oelm (freeze_ratio=0.25)"
    with pytest.raises(UserError, match=r"method.freeze and method.freeze_ratio are both given"):
        make_config({"method": {"name": "oelm", "freeze": {"q": "0"}, "freeze_ratio": 0.25}})


def test_older_methods_keep_their_identity():
    assert not [key for key in Method.from_dict({"name": "oelm"}).to_dict() if "ratio" in key]


def test_a_run_resumes_exactly(machine, tmp_path):
    config, words = machine.config(steps=12), ("--set", "method.freeze_ratio=0.3")
    ended = machine.run(config, tmp_path / "whole", *words)
    assert ended.code == 0, ended.text
    assert "freeze_ratio 0.3: " in ended.text
    strike = Strike(signal.SIGKILL, below="Checkpoints.save", n=40)
    assert machine.run(config, tmp_path / "killed", *words, strike=strike).code == -signal.SIGKILL
    ended = machine.run(config, tmp_path / "killed", *words)
    assert ended.code == 0, ended.text
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert results["method"] == "oelm (freeze_ratio=0.3)"
    assert 0 < results["parameters"]["frozen"] <= 0.3 * results["parameters"]["total"]


def test_a_run_beyond_reach_is_refused_before_it_begins(machine, tmp_path):
    ended = machine.run(machine.config(), tmp_path / "run", "--set", "method.freeze_ratio=0.99")
    assert ended.code == 2 and "freeze_ratio 0.99 is out of reach" in ended.message, ended.text
    assert "Traceback" not in ended.text and not (tmp_path / "run").exists()
