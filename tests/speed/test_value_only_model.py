"""The method `oelm-value-only` in the reference GPT, against its definition."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import oelm
from oelm.errors import UserError
from tests.speed.test_forward import installed


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("head", ["causal", "classifier"])
def test_value_only_attention_passes_gradients_through_values_alone(head, padded, fast):
    """Against the definition: explicit attention whose q and k are detached."""
    config = oelm.OelmGPTConfig(num_layers=2, num_heads=4, d_model=32, d_ff=64, vocab_size=50, num_labels=3)
    kind = oelm.OelmGPTForCausalLM if head == "causal" else oelm.OelmGPTForSequenceClassification
    model = kind(config)
    oelm.convert(model, "oelm-value-only", seed=0)
    ids = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 6:] = 0
    attention = {"attention_mask": mask} if padded else {}
    more = {"skip_logits": False, "use_cache": False} if head == "causal" else {}
    with installed(model) if fast else nullcontext():
        model(ids, **attention, **more).logits.square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert not any("q_proj" in name or "k_proj" in name for name in found)
    model.zero_grad()
    causal = model.transformer.causal

    def explicit(attn, x, mask, *rest):
        heads = lambda y: y.unflatten(-1, (4, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = heads(attn.q_proj(x)).detach(), heads(attn.k_proj(x)).detach(), heads(attn.v_proj(x))
        scores = q @ k.transpose(-2, -1) / 8**0.5
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal and mask is None else None
        if mask is not None:
            hidden = ~mask
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return attn.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    for block in model.transformer.h:
        block.attn.forward = lambda *args, attn=block.attn: explicit(attn, *args)
    model(ids, **attention, **more).logits.square().sum().backward()
    for name, grad in found.items():
        torch.testing.assert_close(
            grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_value_only_comes_back_and_is_for_the_reference_gpt_only(tmp_path):
    config = oelm.OelmGPTConfig(num_layers=1, num_heads=2, d_model=16, d_ff=32, vocab_size=50, num_labels=2)
    model = oelm.OelmGPTForSequenceClassification(config)
    oelm.convert(model, "oelm-value-only", seed=0)
    model.save_pretrained(tmp_path / "m")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
    assert (
        again.transformer.h[0].attn.value_only and not again.transformer.h[0].attn.q_proj.weight.requires_grad
    )
    assert not oelm.release(again).transformer.h[0].attn.value_only
    from transformers import BertConfig, BertForSequenceClassification

    bert = BertForSequenceClassification(
        BertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50
        )
    )
    with pytest.raises(UserError, match="reference GPT"):
        oelm.convert(bert, "oelm-value-only")
    with pytest.raises(UserError, match="freeze both"):
        oelm.Method(scores="constant", freeze={"q": "all"})
