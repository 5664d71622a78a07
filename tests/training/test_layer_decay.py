"""Layer-wise learning rates: what is nearer to the task learns faster."""

import pytest

from oelm.config import make_config
from oelm.errors import UserError
from oelm.training.schedule import layer_scales, make_optimizer, set_learning_rate
from tests.tiny import build


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "bert",
            {
                "classifier.weight": 0,
                "pooler": 0,
                "layer.2.": 1,
                "layer.1.": 2,
                "layer.0.": 3,
                "bert.embeddings": 4,
            },
        ),
        ("oelm-gpt", {"ln_f": 1, "h.2.": 1, "h.1.": 2, "h.0.": 3, "wte": 4, "wpe": 4}),
        ("t5", {"final_layer_norm": 1, "encoder.block.2.": 1, "decoder.block.0.": 3, "shared": 4}),
    ],
)
def test_rates_fall_layer_by_layer(name, expected):
    model = build(name)
    scales = layer_scales(model, 0.5)
    for part, power in expected.items():
        # T5 keeps its table of relative positions, an embedding, in its first block.
        found = {scales[n] for n in scales if part in n and "relative_attention_bias" not in n}
        assert found == {0.5**power}, part
    assert set(layer_scales(model, 1.0).values()) == {1.0}


def test_the_optimizer_follows_them():
    model = build("oelm-gpt")
    training = make_config({"task": {"data": "x"}, "training": {"layer_decay": 0.5, "lr": 1.0}}).training
    optimizer = make_optimizer(model, training)
    set_learning_rate(optimizer, 0.1)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    scales = layer_scales(model, 0.5)
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == pytest.approx(0.1 * scales[name])
    decays = {group["weight_decay"] for group in optimizer.param_groups if group["params"][0].dim() < 2}
    assert decays == {0.0}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_without_decay_there_are_two_groups_as_ever():
    model = build("oelm-gpt")
    plain = make_optimizer(model, make_config({"task": {"data": "x"}}).training)
    assert [group["weight_decay"] for group in plain.param_groups] == [0.01, 0.0]
    assert all(p.dim() >= 2 for p in plain.param_groups[0]["params"])


@pytest.mark.parametrize("value", [0.0, 1.1, -1.0])
def test_nonsense_is_refused(value):
    with pytest.raises(UserError, match="layer_decay"):
        make_config({"training": {"layer_decay": value}})


def test_it_is_part_of_a_runs_identity_only_where_it_is_used():
    """Records that are older than the key keep theirs."""
    plain = make_config({"task": {"data": "x"}})
    used = make_config({"task": {"data": "x"}, "training": {"layer_decay": 0.9}})
    assert "layer_decay" not in plain.identity()["training"]
    assert used.identity()["training"]["layer_decay"] == 0.9
