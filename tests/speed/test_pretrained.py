"""Classifiers of other families read packed texts as they read padded ones: transformers is the oracle."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import oelm
from oelm.data.assemble import Batch, fill_to_round_sizes, pad_rows
from oelm.speed.operations import without_kernels
from oelm.speed.pretrained import READS, PackedForward, why_not
from oelm.system.private_transformers import attention_name
from tests.tiny import SIZES, TOKENS, VOCAB

LENGTHS = np.array([5, 17, 1, 30, 9])
CPU = torch.device("cpu")


def classifier(kind: str, **fields):
    torch.manual_seed(0)
    wide = dict(SIZES, **TOKENS, num_labels=3)
    if kind == "distilbert":
        names = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": VOCAB}
        config = transformers.DistilBertConfig(**names, num_labels=3, pad_token_id=0, **fields)
    elif kind == "gpt2":
        names = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
        config = transformers.GPT2Config(**names, **TOKENS, num_labels=3, **fields)
    else:
        special = {"cls_token_id": 3, "sep_token_id": 4} if kind == "modernbert" else {}
        config = transformers.AutoConfig.for_model(kind, **wide, **special, **fields)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    for module in model.modules():  # heads start near 0, and biases at it
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)
    return model.eval()


def texts(segments: bool) -> tuple[dict[str, torch.Tensor], Batch]:
    """The same texts, padded and packed."""
    drawn = np.random.default_rng(0)
    tokens, second = drawn.integers(5, VOCAB, LENGTHS.sum()), LENGTHS // 2
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    marks = (positions >= np.repeat(second, LENGTHS)).astype(np.int64)
    rows, real = pad_rows(tokens, LENGTHS, 0)
    padded = {"input_ids": torch.from_numpy(rows), "attention_mask": torch.from_numpy(real.astype(np.int64))}
    bounds = np.concatenate([[0], LENGTHS.cumsum()]).astype(np.int32)
    arrays = {"input_ids": tokens[None], "position_ids": positions[None], "bounds": bounds}
    if segments:
        padded["token_type_ids"] = torch.from_numpy(pad_rows(marks, LENGTHS, 0)[0])
        arrays["token_type_ids"] = marks[None]
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    labels = {"labels": torch.zeros(len(LENGTHS), dtype=torch.long)}
    return padded, Batch(np.arange(len(LENGTHS)), inputs, labels, len(tokens), int(LENGTHS.max()))


CASES = {kind: {} for kind in READS} | {
    "modernbert, mean": {"classifier_pooling": "mean"},
    "modernbert, windows": {"local_attention": 8},
}


def learned(model, inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of the five texts, and the gradients of their squares."""
    model.zero_grad()
    logits = model(**inputs).logits[: len(LENGTHS)]
    logits.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["baseline", "oelm"])
@pytest.mark.parametrize("whole", [False, True])
def test_packed_texts_have_the_logits_and_gradients_of_padded_ones(case, method, whole):
    model = classifier(case.split(",")[0], **CASES[case])
    oelm.convert(model, method, seed=0)
    segments = getattr(model.config, "type_vocab_size", 0) > 1
    padded, batch = texts(segments)
    right, grads = learned(model, padded)
    packed = PackedForward(model)
    packed.install()
    found, ours = learned(model, (fill_to_round_sizes(batch, 32, 0) if whole else batch).arguments())
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert ours.keys() == grads.keys()
    for name, grad in grads.items():
        assert (ours[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-6, name
    torch.testing.assert_close(learned(model, padded)[0], right, rtol=1e-5, atol=1e-5)  # as ever
    packed.remove()
    assert learned(model, padded)[0].equal(right) and attention_name(model) == "sdpa"
    assert "forward" not in vars(model) and "forward" not in vars(model.base_model)


def test_texts_do_not_see_each_other():
    model = classifier("bert")
    PackedForward(model).install()
    _, batch = texts(False)
    before = model(**batch.arguments()).logits
    batch.inputs["input_ids"][0, : LENGTHS[0]] = 7  # another first text
    after = model(**batch.arguments()).logits
    assert after[1:].equal(before[1:]) and not after[0].equal(before[0])


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_dropout_drops_at_every_step_anew_and_only_in_training(kind):
    name = "attention_dropout" if kind == "distilbert" else "attention_probs_dropout_prob"
    rest = "dropout" if kind == "distilbert" else "hidden_dropout_prob"
    model = classifier(kind, **{name: 0.5, rest: 0.0})
    for module in (model, *model.modules()):
        if isinstance(module, nn.Dropout) and module.p != 0.5:
            module.p = 0.0
    PackedForward(model).install()
    _, batch = texts(False)
    inputs = batch.arguments()
    assert model(**inputs).logits.equal(model(**inputs).logits)
    model.train()
    torch.manual_seed(1)
    first, second = model(**inputs).logits, model(**inputs).logits
    torch.manual_seed(1)
    again = model(**inputs).logits
    assert again.equal(first) and not second.equal(first)


def test_what_cannot_be_packed_is_named():
    bert = classifier("bert")
    assert "kernel" in why_not(bert, CPU, torch.float32, 128)
    bert.set_attn_implementation("eager")
    assert "eager" in why_not(bert, CPU, torch.float32, 128)
    t5 = transformers.T5ForSequenceClassification(
        transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=VOCAB)
    )
    assert "t5" in why_not(t5, CPU, torch.float32, 128)
    with without_kernels():
        assert "kernel" in why_not(classifier("gpt2"), CPU, torch.bfloat16, 128)
