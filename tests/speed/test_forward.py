"""The fast forward pass against the model's own."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

import oelm
from oelm.speed.forward import FastForward
from oelm.speed.operations import pick_rows
from tests.speed.test_packed import SIZES, packed, padded, texts
from tests.tiny import disturb


def test_picked_rows_are_counted_through_all_texts():
    x = torch.arange(24.0).view(2, 4, 3)
    assert torch.equal(pick_rows(x, torch.tensor([3, 4])), torch.stack([x[0, 3:], x[1, :1]]))


@contextmanager
def installed(model):
    forward = FastForward(model, kernels=False)
    forward.install()
    yield
    forward.remove()


@pytest.mark.parametrize("method", ["baseline", "oelm", "oelm-value-only", "oelm-scale", "oelm-lora"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("form", ["padded", "left", "full", "packed"])
def test_it_gives_what_the_model_gives(method, positions, form):
    model = oelm.OelmGPTForSequenceClassification(oelm.OelmGPTConfig(**SIZES, positions=positions))
    oelm.convert(model, method, seed=0)
    disturb(model)
    items = texts([5, 5, 5]) if form == "full" else texts([5, 1, 17, 8])
    inputs = packed(items, tail=3, empty=2) if form == "packed" else padded(items)
    if form == "full":
        del inputs["attention_mask"]
    if form == "left":
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    results = []
    for fast in (False, True):
        with installed(model) if fast else nullcontext():
            logits = model(**(inputs if fast or form != "packed" else padded(items))).logits[: len(items)]
        logits.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        results.append((logits.detach(), grads))
    (all_logits, all_grads), (logits, grads) = results
    torch.testing.assert_close(logits, all_logits, rtol=1e-5, atol=1e-5)
    assert grads.keys() == all_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, all_grads[name], rtol=1e-4, atol=1e-5, msg=name)


def test_what_is_not_pooled_is_not_computed():
    model = oelm.OelmGPTForSequenceClassification(oelm.OelmGPTConfig(**SIZES))
    seen = []
    for block in model.transformer.h:
        block.mlp.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[:2].numel()))
    with installed(model):
        model(**padded(texts([5, 1, 17, 8])))
    assert seen == [4 * 17, 4]


def test_what_the_fast_pass_does_not_do_is_left_to_the_model():
    """Hidden states, embeddings as inputs, a cache; and a removed pass leaves nothing behind."""
    model = oelm.OelmGPTForSequenceClassification(oelm.OelmGPTConfig(**SIZES)).eval()
    inputs = padded(texts([5, 1, 17, 8]))
    ids = inputs.pop("input_ids")
    lm = oelm.OelmGPTForCausalLM(oelm.OelmGPTConfig(**SIZES)).eval()
    found = []
    for fast in (False, True):
        passes = [installed(m) if fast else nullcontext() for m in (model, lm)]
        with passes[0], passes[1], torch.no_grad():
            out = model(ids, **inputs, output_hidden_states=True)
            embedded = model(inputs_embeds=model.transformer.wte(ids), **inputs)
            written = lm.generate(ids[:, :1], max_new_tokens=5, do_sample=False, pad_token_id=0)
        found.append((out.logits, *out.hidden_states, embedded.logits, written))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not any("forward" in vars(module) for module in (*model.modules(), *lm.modules()))
