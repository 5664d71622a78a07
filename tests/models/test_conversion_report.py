"""How far a conversion moves the heads, by hand and on random inputs."""

import json

import numpy as np
import pytest
import torch

import oelm
from oelm.method import Method
from oelm.models.conversion_report import head_moves, score_scales
from oelm.models.families import find_sites
from tests.tiny import BUILDERS, build

every_model = pytest.mark.parametrize("name", BUILDERS)


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
    found = {(scale.attention, scale.head): scale.after for scale in score_scales(model)}
    with torch.no_grad():
        for head in range(q.heads):
            scores = queries[:, head] @ keys[:, head * k.heads // q.heads].T * q.score_scale
            expected = scores.var(1).mean().sqrt().item()
            assert found[q.attention, head] == pytest.approx(expected, rel=0.05)


def test_where_queries_and_keys_are_normed_the_weights_say_nothing_of_the_scale():
    assert {scale.after for scale in score_scales(build("qwen3"))} == {None}


@pytest.mark.parametrize("method", ["baseline", "frozen", "linear-probe"])
def test_where_nothing_moves_nothing_is_said(method):
    report = oelm.convert(build("bert"), method)
    assert not report.heads and not report.scores
    assert "degrees" not in str(report)


def test_fresh_blocks_over_broken_weights_have_no_angle():
    model = build("bert")
    q_and_k(model)[0].module.weight.data[0] = float("nan")
    report = oelm.convert(model, "oelm-fresh")
    assert report.heads[0].largest_angle is None and report.heads[1].largest_angle > 0
    assert report.scores[0].before is None
    json.dumps(report.to_dict(), allow_nan=False)
