"""Rows of the embedding that no text uses are set aside: the others train as they always did."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification

from oelm.config import make_config
from oelm.data import open_store
from oelm.errors import UserError
from oelm.models.build import build_model
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.models.gpt_config import gpt_config
from oelm.speed.live_rows import LiveEmbedding, live_weights, put_back, set_aside
from oelm.training.loop import train
from tests.training.runs import make_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(make_store(tmp_path_factory.mktemp("live")))


def config(**values):
    training = {"steps": 12, "batch_size": 8, "eval_every": 6, "save_every": 6, "lr": 1e-3, "seed": 1}
    return make_config(
        {
            "task": {"data": "x", "max_length": 32},
            "model": {"name": "gpt-tiny"},
            "training": training | values,
        }
    )


def test_the_store_knows_which_tokens_it_uses(store):
    seen = set(store["train"].tokens) | set(store["validation"].tokens) | set(store["test"].tokens)
    assert set(np.flatnonzero(store.used_tokens())) == seen | {store.pad_id}


@pytest.mark.parametrize(
    "scales", [{}, {"lr_scale": {"embeddings": 2.0}, "weight_decay_scale": {"embeddings": 3.0}}]
)
def test_a_run_is_the_same_but_for_rows_nobody_uses(store, tmp_path, scales):
    found = {}
    for fast in (True, False):
        settings = config(fast=fast, weight_decay=1.0, **scales)
        results = train(settings, store, tmp_path / str(fast), show=False)
        weights = load_file(tmp_path / str(fast) / "model" / "model.safetensors")
        checkpoint = load_file(
            tmp_path / str(fast) / "checkpoints" / "step-00000012" / "optimizer.safetensors"
        )
        found[fast] = results, weights, checkpoint
    (mine, weights, moments), (plain, plain_weights, plain_moments) = found[True], found[False]
    assert mine["parameters"] == plain["parameters"]
    assert mine["test"]["metrics"]["loss"] == pytest.approx(plain["test"]["metrics"]["loss"], rel=1e-4)
    used = torch.from_numpy(store.used_tokens())
    assert 0 < used.sum() < 0.9 * len(used)
    for name, value in plain_weights.items():
        # The two paths add in different order, and Adam's first steps make whole steps of tiny gradients.
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-4, msg=name)
    fresh, _ = build_model(config(), store)
    start = fresh.transformer.wte.weight.detach()
    assert not torch.equal(weights["transformer.wte.weight"][used], start[used])
    # Weight decay has shrunk what no text uses, by as much as step by step.
    idle, plain_idle = (w["transformer.wte.weight"][~used] for w in (weights, plain_weights))
    torch.testing.assert_close(idle, plain_idle, rtol=2e-6, atol=0)
    assert (idle.norm() / start[~used].norm() - 1).abs() > 1e-3
    assert moments.keys() == plain_moments.keys()
    assert all(moments[name].shape == value.shape for name, value in plain_moments.items())
    audits = [json.loads((tmp_path / str(f) / "freeze_audit.json").read_text()) for f in (True, False)]
    assert audits[0] == audits[1]


def test_a_run_does_not_change_its_path_when_it_resumes(store, tmp_path):
    """Fast or plain is a part of what a run is: its record would not say which computed what."""
    train(config(fast=True, steps=12), store, tmp_path / "run", show=False)
    (tmp_path / "run" / "results.json").unlink()
    with pytest.raises(UserError, match=r"training\.fast is True there, False here"):
        train(config(fast=False, steps=12), store, tmp_path / "run", show=False)


def test_an_embedding_of_another_family_with_padding():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=40, **sizes)).eval()
    used = np.zeros(40, dtype=bool)
    used[[0, 3, 7, 11]] = True
    ids = torch.tensor([[3, 7, 11, 0, 0]])
    mask = (ids != 0).long()
    before, weights = model(ids, mask).logits, {k: v.clone() for k, v in model.state_dict().items()}
    model(ids, mask).logits.sum().backward()
    grad = model.bert.embeddings.word_embeddings.weight.grad.clone()
    model.zero_grad()
    set_aside(model, used)
    short = model.bert.embeddings.word_embeddings
    assert isinstance(short, LiveEmbedding) and short.weight.shape == (4, 16)
    assert list(live_weights(model)) == ["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(model(ids, mask).logits, before)
    model(ids, mask).logits.sum().backward()
    torch.testing.assert_close(short.all_rows(short.weight.grad), grad)
    assert not short.weight.grad[0].any()  # the padding's
    put_back(model)
    assert type(model.bert.embeddings.word_embeddings) is torch.nn.Embedding
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_what_must_stay_whole_stays_whole(store):
    few = np.zeros(store.vocab_size, dtype=bool)
    few[:5] = True
    tied = OelmGPTForCausalLM(gpt_config("gpt-tiny", vocab_size=store.vocab_size))
    frozen, _ = build_model(config(), store)
    frozen.transformer.wte.weight.requires_grad_(False)
    busy, _ = build_model(config(), store)
    for model, used in ((tied, few), (frozen, few), (busy, np.ones(store.vocab_size, dtype=bool))):
        set_aside(model, used)
        assert not live_weights(model)
