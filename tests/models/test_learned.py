"""What is learned beside frozen q and k: `qk_scale` and `qk_lora`, alone and together."""

import re
import signal

import pytest
import torch
import transformers
from torch import nn

import oelm
from oelm.errors import AuditError, UserError
from oelm.method import Method
from oelm.models.families import find_sites
from oelm.models.learned import LearnedLinear, add_learned, learned_layers
from oelm.models.roles import roles_of
from oelm.training.schedule import make_optimizer
from oelm.training.step import PlainStep
from tests.models.test_pretrained import oelm_cli, save, world  # noqa: F401 - fixtures
from tests.tiny import build, disturb, inputs, logits
from tests.training.test_role_scales import training

LEARNING = ["oelm-temperature", "oelm-scale", "oelm-lora"]
BOTH = Method.from_dict({"name": "oelm-lora", "qk_lora": 2, "qk_scale": "dimension"})
FAMILIES = ["oelm-gpt", "bert", "modernbert", "gpt2", "gpt_neox", "t5", "bart", "qwen3"]


def converted(name, method, seed=3):
    model = build(name)
    return model, oelm.convert(model, method, seed=seed)


def train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        model.train()(**inputs(model)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def defined(sites):
    """The weights and biases that the definition gives: diag(s) W + B A and diag(s) b."""
    for site in sites:
        layer = site.module
        weight, bias = layer.weight.double(), layer.bias
        if layer.learned_scale is not None:
            factors = layer.learned_scale.double().repeat_interleave(len(weight) // len(layer.learned_scale))
            weight = torch.diag(factors) @ weight
            bias = None if bias is None else factors * bias
        if layer.learned_up is not None:
            weight = weight + layer.learned_up.double() @ layer.learned_down.double()
        yield site, weight, bias


@pytest.mark.parametrize("name", FAMILIES)
def test_the_start_is_that_of_oelm_and_the_end_an_ordinary_checkpoint(name, tmp_path):
    """Both at once where the family has both; logits are equal before training and after saving."""
    method = "oelm-lora" if name == "qwen3" else BOTH
    model, _ = converted(name, method)
    assert torch.equal(logits(model, inputs(model)), logits(converted(name, "oelm")[0], inputs(model)))
    plain, before = build(name), oelm.fingerprint(model)
    start = {path: p.detach().clone() for path, p in model.named_parameters() if ".learned_" in path}
    assert model.state_dict().keys() == plain.state_dict().keys()
    train(model)
    oelm.audit(model, before)
    assert not [path for path, value in start.items() if torch.equal(model.get_parameter(path), value)]
    expected = logits(model, inputs(model))
    model.save_pretrained(tmp_path)
    vanilla = type(plain).from_pretrained(tmp_path)
    assert {path for path, _ in vanilla.named_parameters()} == {path for path, _ in plain.named_parameters()}
    torch.testing.assert_close(logits(vanilla, inputs(vanilla)), expected, rtol=1e-5, atol=1e-6)
    again = oelm.load(tmp_path)
    assert not learned_layers(again)
    oelm.audit(again, before)
    released = oelm.release(model)
    assert {path for path, _ in released.named_parameters()} == {path for path, _ in plain.named_parameters()}
    assert all(parameter.requires_grad for parameter in released.parameters())
    assert not any(isinstance(module, LearnedLinear) for module in released.modules())
    torch.testing.assert_close(logits(released, inputs(released)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["oelm-gpt", "bert", "gpt2", "gpt_neox", "llama"])
def test_scores_are_those_of_the_definition(name):
    model, _ = converted(name, BOTH)
    disturb(model)
    sites = [site for site in find_sites(model) if isinstance(site.module, LearnedLinear)]
    assert {site.role for site in sites} == {"q", "k"}
    expected = {site.path: (weight, bias) for site, weight, bias in defined(sites)}
    other, _ = converted(name, "oelm")
    for site in find_sites(other):
        if site.path in expected:
            weight, bias = expected[site.path]
            site.module.weight.data.copy_(weight)
            if bias is not None:
                site.module.bias.data.copy_(bias)
    torch.testing.assert_close(logits(model, inputs(model)), logits(other, inputs(other)))
    assert not torch.allclose(logits(model, inputs(model)), logits(converted(name, "oelm")[0], inputs(model)))


@pytest.mark.parametrize("name", ["oelm-gpt", "bert", "gpt2"])
def test_gradients_are_those_of_the_definition(name):
    """Against differences, in float64; and no frozen weight has one."""
    model = converted(name, BOTH)[0].double()
    disturb(model)

    def value():
        return model(**inputs(model) | {"labels": None}).logits.square().sum()

    value().backward()
    for path, parameter in model.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad), path
        if ".learned_" not in path:
            continue
        first, found = parameter.data.view(-1)[:1], []
        with torch.no_grad():
            for step in (1e-5, -2e-5):
                first += step
                found.append(float(value()))
            first += 1e-5
        slope = (found[0] - found[1]) / 2e-5
        assert float(parameter.grad.view(-1)[0]) == pytest.approx(slope, rel=1e-5, abs=1e-7), path


def test_the_report_counts_what_is_learned():
    sizes = {"d_model": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 60}
    extra = {"oelm-temperature": 3 * 4, "oelm-scale": 3 * 64, "oelm-lora": 3 * 2 * 8 * (64 + 64)}
    rows = {"oelm-temperature": "1 for each head", "oelm-scale": "1 for each head dim", "oelm-lora": "rank 8"}
    oelm_report = oelm.convert(oelm.OelmGPTForCausalLM(oelm.OelmGPTConfig(**sizes)), "oelm")
    for method, count in extra.items():
        model = oelm.OelmGPTForCausalLM(oelm.OelmGPTConfig(**sizes))
        report = oelm.convert(model, method)
        assert report.trainable - oelm_report.trainable == report.total - oelm_report.total == count
        assert report.frozen == oelm_report.frozen == 3 * 2 * 64**2
        assert report.rows[-1].parameters == count and rows[method] in str(report)
        assert report.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_share_of_medium_512_is_small():
    """At most 5 % of the 3,145,728 parameters of Q and K."""
    extra = {}
    for name in ("oelm-temperature", "oelm-scale", "oelm-lora"):
        with torch.device("meta"):
            model = oelm.OelmGPTForCausalLM(oelm.gpt_config("gpt-medium-512"))
            plain = sum(p.numel() for p in model.parameters())
            add_learned(model, oelm.get_method(name), 0, find_sites(model))
        extra[name] = sum(p.numel() for p in model.parameters()) - plain
        assert extra[name] <= 0.05 * 3_145_728
    assert extra == {"oelm-temperature": 48, "oelm-scale": 3_072, "oelm-lora": 98_304}


def test_factors_are_not_decayed_and_everything_has_its_projections_role():
    model, _ = converted("bert", BOTH)
    groups = make_optimizer(model, training(weight_decay=0.1)).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    roles = roles_of(model)
    for path, parameter in model.named_parameters():
        if ".learned_" in path:
            assert roles[path] == {"q" if ".query." in path else "k"}
            assert (id(parameter) in decayed) != path.endswith("learned_scale")


def test_adapters_start_by_seed_and_name():
    downs = [
        [layer.learned_down for layer in learned_layers(converted("bert", "oelm-lora", seed)[0]).values()]
        for seed in (1, 1, 2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(downs[0], downs[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(downs[0], downs[2], strict=True))
    assert len({down[0, 0].item() for down in downs[0]}) == len(downs[0])
    assert max(down.abs().max().item() for down in downs[0]) <= 32**-0.5


@pytest.mark.parametrize("method", LEARNING)
def test_a_config_that_names_the_method_makes_the_same_model(method):
    first, _ = converted("oelm-gpt", method)
    second = type(first)(first.config)
    for (path, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two) and one.requires_grad == two.requires_grad, path


@pytest.mark.parametrize("name", ["oelm-gpt", "bert", "gpt2"])
def test_a_conversion_that_was_saved_untrained_still_learns(name, tmp_path):
    model, _ = converted(name, BOTH)
    model.save_pretrained(tmp_path)
    again = oelm.load(tmp_path)
    assert {path: p.requires_grad for path, p in again.named_parameters()} == {
        path: p.requires_grad for path, p in model.named_parameters()
    }
    assert all(torch.equal(p, again.get_parameter(path)) for path, p in model.named_parameters())
    before = oelm.fingerprint(model)
    oelm.audit(train(again), before)


def test_an_ordinary_state_dict_is_loaded_as_it_is():
    """As Hugging Face's Trainer does with its best model."""
    model, _ = converted("gpt2", BOTH)
    before = oelm.fingerprint(model)
    state = {key: value.clone() for key, value in train(model).state_dict().items()}
    expected = logits(model, inputs(model))
    train(model, 2)
    assert not torch.allclose(logits(model, inputs(model)), expected)
    oelm.audit(model, before)
    model.load_state_dict(state)
    torch.testing.assert_close(logits(model, inputs(model)), expected)
    oelm.audit(train(model), before)  # of q and k the values are new ones, their state is what it was
    next(iter(learned_layers(model).values())).weight.requires_grad_(True)
    with pytest.raises(AuditError, match="c_attn"):
        oelm.audit(model, before)


@pytest.mark.parametrize("which", ["weight", "learned_scale"])
def test_a_frozen_weight_that_moved_is_found(which):
    model, _ = converted("bert", "oelm-scale")
    before = oelm.fingerprint(model)
    layer = next(iter(learned_layers(model).values()))
    getattr(layer, which).data[0] += 1e-3
    if which == "learned_scale":
        oelm.audit(model, before)
        return
    for known in (before, None):
        with pytest.raises(AuditError, match="query"):
            oelm.audit(model, known)


def test_of_a_merged_checkpoint_what_was_not_learned_is_audited(tmp_path):
    model, _ = converted("bert", "oelm-scale")
    before = oelm.fingerprint(model)
    train(model).save_pretrained(tmp_path)
    again = oelm.load(tmp_path)
    assert oelm.audit(again, before).orthonormal_heads == 3 * 4, "the keys'"
    since = oelm.fingerprint(again)
    again.bert.encoder.layer[0].attention.self.key.weight.data[0] += 1e-3
    with pytest.raises(AuditError, match=r"key\.weight"):
        oelm.audit(again, before)
    again = oelm.load(tmp_path)  # since it was loaded, nothing of it may move
    oelm.audit(train(again), since)
    again.bert.encoder.layer[0].attention.self.query.weight.data[0] += 1e-3
    with pytest.raises(AuditError, match=r"query\.weight: a frozen weight changed"):
        oelm.audit(again, since)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_scale": "token"}, "unknown qk_scale 'token'; known: none, head, dimension"),
        ({"qk_lora": -1}, "qk_lora is the rank of the adapters"),
        ({"qk_lora": True}, "qk_lora is the rank of the adapters"),
        ({"freeze": {}, "qk_lora": 4}, "qk_lora is learned beside frozen projections: freeze q and k"),
        ({"freeze": {"k": "all"}, "qk_scale": "head"}, "qk_scale is learned beside frozen projections"),
        ({"scores": "constant", "qk_scale": "head"}, "qk_scale gets no gradient where scores = 'constant'"),
        ({"freeze": dict.fromkeys("qkv", "all"), "lora": 4, "qk_lora": 4}, "qk_lora and lora are both given"),
    ],
)
def test_nonsense_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Method.from_dict({"name": "oelm"} | fields)


def test_other_methods_do_not_mention_it():
    assert not [key for key in oelm.PRESETS["oelm"].to_dict() if key.startswith("qk_")]
    assert oelm.PRESETS["oelm-lora"].to_dict()["qk_lora"] == 8


@pytest.mark.parametrize("method", ["oelm-temperature", "oelm-scale"])
def test_a_family_that_norms_its_queries_is_refused(method):
    model = build("qwen3")
    with pytest.raises(UserError, match="is not for qwen3: it norms queries after their projection"):
        oelm.convert(model, method)
    assert all(p.requires_grad for p in model.parameters()) and not getattr(model.config, "oelm", None)


def test_other_layers_than_plain_ones_are_refused():
    class Own(nn.Linear):
        pass

    model = build("bert")
    model.bert.encoder.layer[1].attention.self.query.__class__ = Own
    with pytest.raises(UserError, match=r"layer.1.attention.self.query is a Own: qk_scale and qk_lora need"):
        oelm.convert(model, "oelm-lora")


def test_a_fused_matrix_that_is_all_frozen_is_split_to_learn():
    method = Method.from_dict({"name": "lora", "lora": 0, "qk_lora": 2, "qk_scale": "head"})
    model, report = converted("gpt2", method)
    assert report.trainable == 3 * (4 + 2 * 2 * (32 + 32)), "a tied language model has no other head"
    expected = logits(train(model), inputs(model))
    released = oelm.release(model)
    torch.testing.assert_close(logits(released, inputs(released)), expected, rtol=1e-5, atol=1e-6)


def test_only_frozen_layers_learn_beside_their_weights():
    method = Method.from_dict({"name": "oelm-lora", "freeze": {"q": "first:1", "k": "0,1"}})
    model, _ = converted("bert", method)
    assert [path.removeprefix("bert.encoder.layer.") for path in learned_layers(model)] == [
        "0.attention.self.query", "0.attention.self.key", "1.attention.self.key",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_with_the_weights_rounded_once(dtype):
    model, _ = converted("oelm-gpt", BOTH)
    disturb(model)
    layer = next(iter(learned_layers(model).values()))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    exact, _ = layer.effective()
    with torch.autocast("cpu", dtype):
        found = layer(x)
    assert torch.equal(found, nn.functional.linear(x.to(dtype), exact.detach().to(dtype)))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), [("bert", "oelm-scale"), ("gpt2", "oelm-lora")])
def test_a_run_resumes_exactly_and_ends_as_an_ordinary_model(family, method, oelm_cli, world, save):  # noqa: F811
    save(family, family)
    assert oelm_cli("convert", family, "--method", method, "--out", f"{family}-out")[0] == 0
    assert learned_layers(oelm.load(str(world / f"{family}-out"))), "it can still learn"
    words = ("--data", "three.csv", "--model", family, "--max-length", 24, "--steps", 50, "--lr", 1e-2)
    words = ("train", *words, "--method", method, "--set", "training.save_every=10", "--out")
    assert oelm_cli(*words, f"{family}-whole")[0] == 0
    take = PlainStep.take

    def stopped(self, step, *rest):
        if step == 25:
            signal.raise_signal(signal.SIGTERM)
        return take(self, step, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainStep, "take", stopped)
        assert oelm_cli(*words, f"{family}-broken")[0] == 75
    code, _, err = oelm_cli(*words, f"{family}-broken")
    assert code == 0 and "resuming after step 2" in err, err
    code, out, _ = oelm_cli("audit", f"{family}-broken")
    assert code == 0 and re.search(r"[\d,]+ frozen parameters cannot be compared: what was learned", out)
    whole, broken = (world / f"{family}-{name}" / "model" for name in ("whole", "broken"))
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(whole)
    assert not learned_layers(plain) and all(p.requires_grad for p in plain.parameters())
