"""Learning rates and weight decay by role: training.lr_scale and training.weight_decay_scale."""

import copy
import re
import signal
from typing import get_args

import pytest
import torch

import oelm
from oelm.config import Role, make_config, resolve_config, to_toml
from oelm.errors import UserError
from oelm.method import ROLES
from oelm.models.families import layers_of
from oelm.models.roles import roles_of
from oelm.training.schedule import layer_scales, make_optimizer, parameter_scales, set_learning_rate
from tests.tiny import BUILDERS, build
from tests.training.runs import Strike, outcome

# What a parameter's name says, for the first pattern that fits.
NAMED = {
    "oelm-gpt": {
        "embeddings": r"wte|wpe", "norms": r"ln_", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj",
        "ffn_in": "fc_in", "ffn_out": "fc_out",
    },
    "bert": {
        "norms": "LayerNorm", "embeddings": "embeddings", "head": "pooler|classifier", "q": "query",
        "k": "key", "v": "value", "o": r"attention\.output", "ffn_in": "intermediate",
        "ffn_out": r"output\.dense",
    },
    "t5-gated": {
        "head": "lm_head", "embeddings": "shared|relative_attention_bias", "norms": "layer_norm",
        "q": r"\.q\.", "k": r"\.k\.", "v": r"\.v\.", "o": r"\.o\.", "ffn_in": r"\.wi_", "ffn_out": r"\.wo\.",
    },
    "llama": {
        "head": "lm_head", "embeddings": "embed_tokens", "norms": "norm", "q": "q_proj", "k": "k_proj",
        "v": "v_proj", "o": "o_proj", "ffn_in": "gate_proj|up_proj", "ffn_out": "down_proj",
    },
}  # fmt: skip


def training(**values):
    return make_config({"task": {"data": "x"}, "training": values}).training


def test_the_roles_are_those_of_a_method_and_the_head():
    assert {*get_args(Role)} == {*ROLES, "head"}


@pytest.mark.parametrize("name", NAMED)
def test_every_parameter_has_the_role_its_name_says(name):
    for path, roles in roles_of(build(name)).items():
        assert roles == {next(role for role, part in NAMED[name].items() if re.search(part, path))}, path


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("method", ["baseline", "oelm", "lora"])
def test_every_family(name, method):
    model = build(name)
    if method == "lora":
        pytest.importorskip("peft")
    if (name, method) != ("oelm-gpt", "lora"):
        oelm.convert(model, method)
    roles = roles_of(model)
    assert list(roles) == [path for path, _ in model.named_parameters()]
    assert not [path for path in layers_of(model, roles) if "head" in roles[path]]
    assert {role for found in roles.values() for role in found} >= {*ROLES}
    assert {len(found) for found in roles.values()} <= {1, 3}


def test_a_step_is_that_of_a_rate_and_decay_for_each_parameter():
    """The oracle: an AdamW for every parameter."""
    model = build("bert")
    oelm.convert(model, "oelm")
    oracle, rates, decays = (
        copy.deepcopy(model),
        {"ffn_in": 0.5, "embeddings": 0.1},
        {"v": 3.0, "ffn_in": 0.0},
    )
    values = training(lr_scale=rates, weight_decay_scale=decays, layer_decay=0.5, weight_decay=0.1)
    optimizer = make_optimizer(model, values)
    layers, roles = layer_scales(model, 0.5), roles_of(model)
    for step in range(3):
        set_learning_rate(optimizer, 0.1 / (step + 1))
        for seed, (own, other) in enumerate(zip(model.parameters(), oracle.parameters(), strict=True)):
            if own.requires_grad:
                own.grad = torch.randn(own.shape, generator=torch.Generator().manual_seed(100 * step + seed))
                other.grad = own.grad.clone()
        optimizer.step()
        if step == 0:
            apart = {}
            for name, parameter in oracle.named_parameters():
                (role,) = roles[name]
                decay = 0.1 * decays.get(role, 1.0) if parameter.dim() >= 2 else 0.0
                apart[name] = torch.optim.AdamW([parameter], weight_decay=decay, fused=True)
        for name, one in apart.items():
            (role,) = roles[name]
            one.param_groups[0]["lr"] = 0.1 / (step + 1) * layers[name] * rates.get(role, 1.0)
            one.step()
    for (name, own), other in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7, msg=name)
    assert len(optimizer.param_groups) < 20, "parameters that share rate and decay share a group"


def test_at_the_default_nothing_changes():
    model = build("oelm-gpt")
    groups = make_optimizer(model, training(weight_decay=0.0)).param_groups
    assert [group["params"][0].dim() >= 2 for group in groups] == [True, False]
    assert {*parameter_scales(model, training()).values()} == {(1.0, 1.0)}
    identity = make_config({"task": {"data": "x"}}).identity()["training"]
    assert not [key for key in identity if key.endswith("_scale")]
    used = make_config({"task": {"data": "x"}, "training": {"lr_scale": {"q": 0.5}}})
    assert used.identity()["training"]["lr_scale"] == {"q": 0.5}


def test_a_fused_matrix_has_one_rate():
    model = build("gpt2")
    message = r"lr_scale: k, q, v are one matrix in this model \(transformer.h.0.attn.c_attn.weight\)"
    with pytest.raises(UserError, match=message):
        parameter_scales(model, training(lr_scale={"q": 0.5}))
    together = dict.fromkeys("qkv", 0.5)
    scales = parameter_scales(model, training(lr_scale=together))
    assert {s for name, (s, _) in scales.items() if "c_attn" in name} == {0.5}
    oelm.convert(model, "oelm")  # splits it
    scales = parameter_scales(model, training(lr_scale={"v": 0.5}))
    assert {name for name, (s, _) in scales.items() if s == 0.5} == {n for n in scales if ".c_attn.v." in n}
    probed = build("gpt2")
    oelm.convert(probed, "linear-probe")  # what is frozen has no rate
    parameter_scales(probed, training(lr_scale={"q": 0.5}))
    late = build("gpt2")  # frozen whole at the start, and trained later
    fields = {"freeze": {"blocks": "all"}, "freeze_schedule": {"unfreeze_at": 0.5}}
    oelm.convert(late, oelm.Method.from_dict({"name": "baseline", **fields}))
    with pytest.raises(UserError, match=message):
        parameter_scales(late, training(lr_scale={"q": 0.5}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr_scale": {"ffn": 0.5}}, "training.lr_scale.ffn .*'q', 'k', 'v', 'o', .* 'embeddings' or 'head'"),
        ({"weight_decay_scale": {"bias": 1}}, "training.weight_decay_scale.bias"),
        ({"lr_scale": {"q": 0}}, r"training.lr_scale must be positive, got \{'q': 0"),
        ({"weight_decay_scale": {"q": -1}}, "training.weight_decay_scale must be 0 or more"),
        ({"lr_scale": {"q": "half"}}, "training.lr_scale.q = \"half\" does not fit"),
        ({"lr_scale": 0.5}, "training.lr_scale = 0.5 does not fit"),
    ],
)  # fmt: skip
def test_mistakes_are_told(values, message):
    with pytest.raises(UserError, match=message) as error:
        training(**values)
    assert "\n" not in str(error.value) and "[key]" not in str(error.value)


def test_flags_and_files_agree(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nlr_scale = {ffn_in = 0.5}\n")
    config = resolve_config({}, path, {}, ["training.lr_scale.embeddings=0.1"])
    assert config.training.lr_scale == {"ffn_in": 0.5, "embeddings": 0.1}
    path.write_text(to_toml(config.to_dict()))
    assert resolve_config({}, path, {}, []) == config


@pytest.mark.slow
def test_a_run_resumes_exactly_and_differs(machine, tmp_path):
    scales = {"lr_scale": {"ffn_in": 0.5, "embeddings": 0.1}, "weight_decay_scale": {"v": 3.0}}
    plain, config = machine.config(steps=12), machine.config(steps=12, **scales)
    for name, path in {"plain": plain, "whole": config}.items():
        ended = machine.run(path, tmp_path / name)
        assert ended.code == 0, ended.text
    strike = Strike(signal.SIGKILL, below="Checkpoints.save", n=40)
    assert machine.run(config, tmp_path / "killed", strike=strike).code == -signal.SIGKILL
    ended = machine.run(plain, tmp_path / "killed")
    assert ended.code == 2 and "training.lr_scale.ffn_in is 0.5 there" in ended.message
    ended = machine.run(config, tmp_path / "killed")
    assert ended.code == 0, ended.text
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    assert outcome(tmp_path / "whole")["model"] != outcome(tmp_path / "plain")["model"]
