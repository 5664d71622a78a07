"""How far a conversion moves the heads, against transformers' own attention, and by hand."""

import json

import numpy as np
import pytest
import torch

import oelm
from oelm.errors import UserError
from oelm.method import Method
from oelm.models.conversion_report import head_moves, score_scales
from oelm.models.families import find_sites
from tests.tiny import BUILDERS, build, inputs

every_model = pytest.mark.parametrize("name", BUILDERS)


def batch_of(model, rows=4, length=12):
    return {key: value for key, value in inputs(model, rows, length).items() if key != "labels"}


def q_and_k(model):
    return [site for site in find_sites(model) if site.role in ("q", "k")]


@every_model
@pytest.mark.parametrize("method", ["oelm", "oelm-polar", "oelm-polar-scaled"])
def test_a_factor_keeps_every_heads_row_space(name, method):
    report = oelm.convert(build(name), Method.from_dict({"name": method, "init": "own"}))
    if name == "oelm-gpt":  # from scratch: there was nothing to move
        assert not report.heads and not report.scores
        return
    assert len(report.heads) == sum(site.heads for site in q_and_k(build(name)))
    assert max(move.largest_angle for move in report.heads) < 0.01


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bart", "llama"])
def test_fresh_blocks_turn_every_head(name):
    report = oelm.convert(build(name), "oelm-fresh")
    assert min(move.largest_angle for move in report.heads) > 45
    assert all(0 < move.mean_angle <= move.largest_angle <= 90 for move in report.heads)


def test_one_direction_of_one_head_turned_by_hand():
    model = build("bert")
    site = q_and_k(model)[0]
    weight = torch.zeros_like(site.weight)
    weight[: site.head_dim, : site.head_dim] = torch.eye(site.head_dim)
    site.write(weight)
    turned = weight.clone()
    turned[0] = 0.0
    turned[0, [0, 31]] = torch.tensor([np.cos(np.radians(30)), np.sin(np.radians(30))]).float()
    moves = head_moves(site, turned * 7)  # scale is no angle
    assert moves[0].largest_angle == pytest.approx(30, abs=1e-3)
    assert moves[0].mean_angle == pytest.approx(30 / site.head_dim, abs=1e-2)
    assert moves[1].largest_angle is None, "a head without a row space has no angle"


def eager(model):
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    for path, parameter in model.named_parameters():
        if "relative_attention_bias" in path:
            parameter.data.zero_()  # T5 adds its position bias to the scores
    return model


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bert", "attentions"),
        ("roberta", "attentions"),
        ("distilbert", "attentions"),
        ("bart", "encoder_attentions"),
        ("bart", "cross_attentions"),
        ("t5", "encoder_attentions"),
        ("t5", "cross_attentions"),
    ],
)
def test_measured_scales_are_those_of_the_models_own_attention(name, key):
    """A softmax's logarithm is its scores but for a constant per query: what their spread ignores too."""
    model = eager(build(name))
    for site in q_and_k(model):  # a random model's scores hardly differ; these do
        site.write(torch.randn_like(site.weight) * 0.3)
    batch = batch_of(model)
    batch["attention_mask"][1, 8:] = 0
    batch["attention_mask"][2, 5:] = 0
    if model.config.is_encoder_decoder:
        batch |= {"decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        layers = model(**batch, output_attentions=True)[key]
    expected = []
    for layer in layers:
        spread = [
            layer[text][:, :n, :n].log().var(-1, correction=0)
            for text, n in enumerate(batch["attention_mask"].sum(1))
        ]
        expected.append(torch.cat(spread, 1).mean(1).sqrt())
    part = {"encoder_attentions": "encoder.", "cross_attentions": ("EncDec", "encoder_attn")}.get(key, "")
    part = (part,) if isinstance(part, str) else part
    found = [
        value
        for (attention, _), value in score_scales(model, batch).items()
        if any(word in attention for word in part) and ("decoder" in attention) == (key == "cross_attentions")
    ]
    np.testing.assert_allclose(found, torch.cat(expected).tolist(), rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neox", "t5", "bart", "llama"])
def test_predicted_scales_are_those_of_random_inputs(name):
    model = build(name)
    for site in q_and_k(model):
        site.write(torch.randn_like(site.weight) * 0.3)
        if site.bias is not None and site.part is None:
            site.module.bias.data.normal_()
    sites = q_and_k(model)
    q = next(site for site in sites if site.role == "q")
    k = next(site for site in sites if site.role == "k" and site.attention == q.attention)
    x, y = torch.randn(2, 4000, q.weight.shape[1]).double()
    queries, keys = (
        torch.nn.functional.linear(
            inputs, site.weight.double(), None if site.bias is None else site.bias.double()
        ).unflatten(1, (site.heads, -1))
        for inputs, site in ((x, q), (y, k))
    )
    found = score_scales(model, None)
    with torch.no_grad():
        for head in range(q.heads):
            scores = queries[:, head] @ keys[:, head * k.heads // q.heads].T * q.score_scale
            expected = scores.var(1).mean().sqrt().item()
            assert found[q.attention, head] == pytest.approx(expected, rel=0.05)


def test_where_queries_and_keys_are_normed_the_weights_say_nothing_of_the_scale():
    model = build("qwen3")
    assert set(score_scales(model, None).values()) == {None}
    before = score_scales(model, batch_of(model))
    q_and_k(model)[0].module.weight.data *= 50
    after = score_scales(model, batch_of(model))
    first = next(iter(before))
    assert after[first] == pytest.approx(before[first], rel=1e-3)


@every_model
def test_a_sample_is_measured_and_changes_nothing_else(name):
    one, other = build(name).train(), build(name).train()
    plain = oelm.convert(one, "oelm", seed=1)
    measured = oelm.convert(other, "oelm", seed=1, sample=batch_of(other))
    assert (plain.scores_from, measured.scores_from) == ("weights", "sample")
    assert measured.scores and all(scale.after > 0 for scale in measured.scores)
    for (path, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), path
    assert all(module.training for module in other.modules())
    assert not any(module._forward_pre_hooks for module in other.modules())
    assert json.loads(json.dumps(measured.to_dict()))["scores"][0]["head"] == 0
    assert "scores' standard deviation, measured" in str(measured)


def test_a_tensor_of_tokens_is_a_sample():
    model = build("bart")
    assert oelm.convert(model, "frozen", sample=batch_of(model)["input_ids"]).scores


def test_a_sample_that_does_not_fit_leaves_the_model_as_it_was():
    model = build("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for sample in (
        {"input_ids": torch.full((1, 4), 10**6)},
        {"texts": 1},
        {"input_ids": torch.ones(1, 2, 3)},
    ):
        with pytest.raises(UserError, match="sample"):
            oelm.convert(model, "oelm", sample=sample)
    assert not getattr(model.config, "oelm", None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("method", ["baseline", "frozen", "linear-probe"])
def test_where_nothing_moves_nothing_is_said(method):
    report = oelm.convert(build("bert"), method)
    assert not report.heads and not report.scores
    assert report.head_table() == "no head moved"
    assert "degrees" not in str(report)


def test_fresh_blocks_over_broken_weights_have_no_angle():
    model = build("bert")
    q_and_k(model)[0].module.weight.data[0] = float("nan")
    report = oelm.convert(model, "oelm-fresh")
    assert report.heads[0].largest_angle is None and report.heads[1].largest_angle > 0
    assert report.scores[0].before is None
    json.dumps(report.to_dict(), allow_nan=False)


def test_the_table_of_heads_has_every_head():
    report = oelm.convert(build("llama"), "oelm-fresh")
    lines = report.head_table().splitlines()
    assert len(lines) == 2 + len(report.heads) + 1 + 1 + 2 + len(report.scores)
