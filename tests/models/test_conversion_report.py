"""How a conversion changes the heads: their row spaces, and the scale of their scores."""

import json

import pytest
import torch
from scipy.linalg import subspace_angles

import oelm
from oelm.method import Method
from oelm.models.conversion_report import score_scales
from oelm.models.families import find_sites
from oelm.orthogonal import to_blocks
from tests.tiny import BUILDERS, build

every_model = pytest.mark.parametrize("name", BUILDERS)


def q_and_k(model):
    return [site for site in find_sites(model) if site.role in ("q", "k")]


def blocks_of(model):
    return [block for site in q_and_k(model) for block in to_blocks(site.weight, site.heads)]


@every_model
@pytest.mark.parametrize("method", ["oelm", "oelm-polar", "oelm-polar-scaled"])
def test_a_factor_keeps_every_heads_row_space(name, method):
    model = build(name)
    before = blocks_of(model)
    report = oelm.convert(model, Method.from_dict({"name": method, "init": "own"}))
    assert bool(report.scores) == (name != "oelm-gpt")  # from scratch: there was nothing to compare with
    for old, new in zip(before, blocks_of(model), strict=True):
        assert subspace_angles(old, new).max() < 1e-4


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
    assert not report.scores and "deviation" not in str(report)


def test_broken_weights_have_no_scale():
    model = build("bert")
    q_and_k(model)[0].module.weight.data[0] = float("nan")
    report = oelm.convert(model, "oelm-fresh")
    assert report.scores[0].before is None and report.scores[0].after > 0
    json.dumps(report.to_dict(), allow_nan=False)
