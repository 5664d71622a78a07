"""Parts of the fast path against what defines them."""

import pytest
import torch
import torch.nn.functional as F

import oelm
from oelm.speed.gelu import FastGelu
from oelm.speed.rows import pick_rows
from tests.speed.test_packed import SIZES, packed, padded, texts


def test_the_fast_gelu_is_gelu_to_float32():
    x = torch.linspace(-12, 12, 20001, dtype=torch.float64, requires_grad=True)
    expected = F.gelu(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    narrow = x.detach().float().requires_grad_()
    found = FastGelu.apply(narrow)
    (found_slope,) = torch.autograd.grad(found.sum(), narrow)
    assert (found.double() - expected).abs().max() < 2e-6
    assert (found_slope.double() - slope).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_to_sixteen_bits_it_is_as_near_as_gelu(dtype):
    x = torch.linspace(-8, 8, 40001).to(dtype)
    expected = F.gelu(x.double())
    slack = 1.001 * (F.gelu(x).double() - expected).abs().max() + 1e-9
    assert (FastGelu.apply(x).double() - expected).abs().max() <= slack


def test_compiled_blocks_use_it_and_agree():
    linear = torch.nn.Linear(8, 8).to(torch.bfloat16)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    from oelm.speed.gelu import gelu

    compiled = torch.compile(lambda x: gelu(linear(x)), fullgraph=True, backend="aot_eager")
    found, expected = [], []
    for function, out in ((compiled, found), (lambda x: F.gelu(linear(x)), expected)):
        y = function(x)
        y.square().sum().backward()
        out += [y.detach(), linear.weight.grad.clone()]
        linear.zero_grad()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_picked_rows_are_counted_through_all_texts():
    x = torch.arange(24.0).view(2, 4, 3)
    assert torch.equal(pick_rows(x, torch.tensor([3, 4])), torch.stack([x[0, 3:], x[1, :1]]))


@pytest.mark.parametrize("method", ["baseline", "oelm", "oelm-value-only"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("form", ["padded", "left", "full", "packed"])
def test_the_last_block_computes_what_is_pooled_and_nothing_changes(method, positions, form):
    """`output_hidden_states` wants all positions, so all are computed: the oracle."""
    model = oelm.OelmGPTForSequenceClassification(oelm.OelmGPTConfig(**SIZES, positions=positions))
    oelm.convert(model, method, seed=0)
    items = texts([5, 5, 5]) if form == "full" else texts([5, 1, 17, 8])
    inputs = packed(items, tail=3, empty=2) if form == "packed" else padded(items)
    if form == "full":
        del inputs["attention_mask"]
    if form == "left":
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    results = []
    for more in ({"output_hidden_states": True}, {}):
        out = model(**inputs, **more)
        logits = out.logits[: len(items)]
        logits.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        results.append((logits.detach(), grads, out.hidden_states))
    (all_logits, all_grads, hidden), (logits, grads, none) = results
    assert hidden[-1].shape[:2] == inputs["input_ids"].shape and none is None
    torch.testing.assert_close(logits, all_logits, rtol=1e-5, atol=1e-5)
    assert grads.keys() == all_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, all_grads[name], rtol=1e-4, atol=1e-5, msg=name)


def test_what_is_not_pooled_is_not_computed():
    model = oelm.OelmGPTForSequenceClassification(oelm.OelmGPTConfig(**SIZES))
    seen = []
    for block in model.transformer.h:
        block.mlp.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[:2].numel()))
    model(**padded(texts([5, 1, 17, 8])))
    assert seen == [4 * 17, 4]
