import json

import pytest
import torch

import oelm
from oelm.audit import Fingerprint
from oelm.errors import AuditError, UserError
from tests.tiny import build, inputs


@pytest.fixture
def model():
    model = build("gpt2")
    oelm.convert(model, "oelm")
    return model


def q_of(model, layer=1):
    return model.transformer.h[layer].attn.c_attn.q.weight


def test_one_flipped_bit_is_found(model):
    before = oelm.fingerprint(model)
    q_of(model).data.view(torch.int32)[3, 5] ^= 1
    with pytest.raises(
        AuditError, match=r"1 problem\(s\):\n  transformer.h.1.attn.c_attn.q.weight: a frozen weight changed"
    ):
        oelm.audit(model, before)
    with pytest.raises(AuditError, match=r"h.1.attn.c_attn.q.weight: not the weight that was frozen"):
        oelm.audit(model)


def test_lost_orthonormality_is_found_without_a_fingerprint():
    model = build("bert")
    oelm.convert(model, "oelm")
    weight = model.bert.encoder.layer[2].attention.self.key.weight
    weight.data[8:16] *= 1.001  # the second of four heads
    with pytest.raises(
        AuditError, match=r"layer.2.attention.self.key: head 1 deviates from orthonormal by 0.002"
    ):
        oelm.audit(model)
    weight.data[0, 0] = float("nan")
    with pytest.raises(AuditError, match="head 0 deviates from orthonormal by nan"):
        oelm.audit(model)


def test_a_parameter_in_the_wrong_state_is_found(model):
    before = oelm.fingerprint(model)
    q_of(model).requires_grad_(True)
    model.transformer.wpe.weight.requires_grad_(False)
    for reference in (before, None):
        with pytest.raises(AuditError) as error:
            oelm.audit(model, reference)
        assert "c_attn.q.weight: the method freezes it, but it is trainable" in str(error.value)
        assert "wpe.weight: it should train, but it is frozen" in str(error.value)


def test_a_weight_thawed_and_changed_is_both(model):
    before = oelm.fingerprint(model)
    q_of(model).requires_grad_(True).data.mul_(1.5)
    with pytest.raises(AuditError) as error:
        oelm.audit(model, before)
    assert "the method freezes it, but it is trainable" in str(error.value)
    assert "a frozen weight changed" in str(error.value)


def test_frozen_feed_forward_blocks_are_checked_too():
    model = build("bert")
    oelm.convert(model, "oelm-ffn-only")
    assert oelm.audit(model).orthonormal_heads == 6
    weight = model.bert.encoder.layer[1].output.dense.weight
    weight.data[:, 0] *= 1.01
    with pytest.raises(AuditError, match=r"layer.1.output.dense: head 0 deviates from orthonormal"):
        oelm.audit(model)


def test_a_plainly_loaded_model_is_told_the_way(model, tmp_path):
    model.save_pretrained(tmp_path)
    with pytest.raises(AuditError, match=r"oelm.refreeze freezes it again"):
        oelm.audit(type(model).from_pretrained(tmp_path))


def test_a_model_that_changed_its_parameters_is_found(model):
    before = oelm.fingerprint(model)
    model.score = torch.nn.Linear(2, 2, bias=False)
    del model.transformer.wpe
    with pytest.raises(AuditError) as error:
        oelm.audit(model, before)
    assert "score.weight: it was not there" in str(error.value)
    assert "transformer.wpe.weight: it is gone" in str(error.value)


def test_weight_decay_does_not_reach_frozen_weights(model):
    """FACTS, trap 2: AdamW shrinks a weight whose gradient is merely masked."""
    before = oelm.fingerprint(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(5):
        model(**inputs(model)).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    result = oelm.audit(model, before)
    assert result.orthonormal_heads == 24
    assert result.largest_deviation < result.tolerance
    assert result.frozen_tensors == 12, "weights and biases of q and k"


def test_a_fingerprint_survives_json(model):
    before = oelm.fingerprint(model)
    again = Fingerprint.from_dict(json.loads(json.dumps(before.to_dict())))
    assert again == before
    assert json.dumps(oelm.audit(model, again).to_dict())


def test_wrapped_models_are_audited_as_what_they_wrap(model):
    before = oelm.fingerprint(model)
    compiled = torch.compile(model, backend="eager")
    assert oelm.fingerprint(compiled) == before
    oelm.audit(compiled, before)
    assert oelm.fingerprint(torch.nn.DataParallel(model)) == before


def test_an_ordinary_model_cannot_be_audited():
    with pytest.raises(UserError, match="was not converted"):
        oelm.audit(build("bert"))


def test_a_changed_dtype_is_a_change(model):
    before = oelm.fingerprint(model)
    with pytest.raises(AuditError, match="a frozen weight changed"):
        oelm.audit(model.bfloat16(), before)
    oelm.audit(model)  # but the digest in the config knows the weights rounded to bf16
