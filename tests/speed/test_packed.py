"""Texts end to end give what padded texts give: logits, losses and gradients."""

import pytest
import torch

import oelm
from oelm.data.assemble import Packing
from oelm.errors import UserError
from oelm.speed.forward import FastForward

SIZES = {"num_layers": 2, "num_heads": 4, "d_model": 32, "d_ff": 64, "vocab_size": 50, "num_labels": 3}


def texts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (n,), generator=generator) for n in lengths]


def padded(items):
    ids = torch.nn.utils.rnn.pad_sequence(items, batch_first=True)
    lengths = torch.tensor([len(item) for item in items])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def packed(items, tail=0, empty=0, longest=None):
    """The texts, then a text of `tail` tokens that nobody asked for, then `empty` texts without tokens."""
    items = [*items, *([torch.zeros(tail, dtype=torch.long)] if tail else [])]
    ends = torch.tensor([0, *(len(item) for item in items), *([0] * empty)]).cumsum(0).int()
    return {
        "input_ids": torch.cat(items)[None],
        "position_ids": torch.cat([torch.arange(len(item)) for item in items])[None],
        "packing": Packing(ends, longest or max(map(len, items))),
    }


@pytest.mark.parametrize("method", ["baseline", "oelm"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_packed_texts_give_what_padded_texts_give(method, pooling, positions):
    config = oelm.OelmGPTConfig(**SIZES, pooling=pooling, positions=positions, max_position_embeddings=64)
    model = oelm.OelmGPTForSequenceClassification(config)
    oelm.convert(model, method, seed=0)
    FastForward(model, kernels=False).install()
    items, labels = texts([5, 1, 17, 8]), torch.tensor([0, 2, 1, 0])
    results = []
    for inputs in (padded(items), packed(items), packed(items, tail=7, empty=3, longest=20)):
        logits = model(**inputs).logits[: len(items)]
        torch.nn.functional.cross_entropy(logits, labels).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        results.append((logits.detach(), grads))
    for logits, grads in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=1e-5, atol=1e-5)
        assert grads.keys() == results[0][1].keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_tags_of_packed_texts():
    model = oelm.OelmGPTForTokenClassification(oelm.OelmGPTConfig(**SIZES)).eval()
    FastForward(model, kernels=False).install()
    items = texts([4, 9, 2])
    wide, narrow = model(**padded(items)).logits, model(**packed(items)).logits[0]
    rows = torch.cat([wide[i, : len(item)] for i, item in enumerate(items)])
    torch.testing.assert_close(narrow, rows, rtol=1e-5, atol=1e-5)


def fast(model):
    FastForward(model, kernels=False).install()
    return model


def test_a_packed_text_longer_than_the_positions_is_refused():
    inputs = packed(texts([3, 4]))
    model = fast(oelm.OelmGPTForSequenceClassification(oelm.OelmGPTConfig(**SIZES, attention_dropout=0.1)))
    assert model.eval()(**inputs).logits.shape == (2, 3)  # nothing is dropped while measuring
    with pytest.raises(UserError, match="positions"):
        model(**packed(texts([3, 4]), longest=10_000))
