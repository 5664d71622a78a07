"""LoRA through PEFT: only adapters and the head train, and what is saved is an ordinary checkpoint."""

import json
import sys

import pytest
import torch

import oelm
from oelm.errors import AuditError, UserError
from oelm.inference.trained import Trained
from oelm.method import Method
from tests.models.test_pretrained import oelm_cli, save, world  # noqa: F401 - fixtures
from tests.tiny import BUILDERS, build, inputs, logits

ADAPTABLE = [name for name in BUILDERS if name != "oelm-gpt"]


def test_without_peft_one_line_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = build("bert")
    with pytest.raises(UserError, match="pip install peft"):
        oelm.convert(model, "lora")
    assert not getattr(model.config, "oelm", None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": -1}, "rank"),
        ({"lora": 2.5}, "rank"),
        ({"lora": 4}, "freeze q, k and v"),
        ({"lora": 4, "freeze": {"q": "all", "k": "all", "v": ":-1"}}, "freeze q, k and v"),
    ],
)
def test_nonsense_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Method(**fields)


def test_other_methods_do_not_mention_it():
    assert "lora" not in oelm.PRESETS["oelm"].to_dict()


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def trained(name, steps=5):
    model = build(name)
    report = oelm.convert(model, "lora", seed=3)
    before = oelm.fingerprint(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        model.train()(**inputs(model)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), report, before


@pytest.mark.parametrize("name", ADAPTABLE)
def test_adapters_learn_and_are_saved_merged(peft, name, tmp_path):
    start = build(name)
    model, report, before = trained(name)
    oelm.audit(model, before)
    learned = {path for path, p in model.named_parameters() if p.requires_grad}
    adapters = {path for path in learned if ".lora_" in path}
    assert adapters and report.trainable == sum(model.get_parameter(path).numel() for path in learned)
    assert report.total == sum(p.numel() for p in start.parameters()) + sum(
        model.get_parameter(path).numel() for path in adapters
    )
    expected = logits(model, inputs(model))
    assert not torch.allclose(expected, logits(start, inputs(start)), atol=1e-4), "something was learned"

    assert set(model.state_dict()) == set(start.state_dict())
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(plain, inputs(plain)), expected, rtol=1e-4, atol=1e-5)
    again = oelm.load(tmp_path)
    oelm.audit(again, before)  # what no adapter touches is, bit for bit, what it was
    key = next(path for path, p in again.named_parameters() if path in before.frozen)
    again.get_parameter(key).data[0] += 1e-3
    with pytest.raises(AuditError, match="a frozen weight changed"):
        oelm.audit(again, before)

    released = oelm.release(model)
    torch.testing.assert_close(logits(released, inputs(released)), expected, rtol=1e-4, atol=1e-5)
    assert {path for path, _ in released.named_parameters()} == {path for path, _ in start.named_parameters()}
    assert all(p.requires_grad for p in released.parameters())


@pytest.mark.parametrize("name", ["bert", "gpt2", "modernbert"])
def test_its_own_state_dict_is_loaded_whole_and_goes_on_learning(peft, name):
    """As Hugging Face's Trainer does with its best checkpoint, and with the one it resumes from."""
    model, _, before = trained(name)
    expected, best = logits(model, inputs(model)), {k: v.clone() for k, v in model.state_dict().items()}
    for strict in (True, False):
        again, _, start = trained(name, steps=1)
        assert again.load_state_dict(best, strict=strict).unexpected_keys == []
        torch.testing.assert_close(logits(again, inputs(again)), expected, rtol=1e-4, atol=1e-5)
        oelm.audit(again, start)
        oelm.audit(again)
    again.train()(**inputs(again)).loss.backward()
    torch.optim.AdamW(again.parameters(), lr=1e-2).step()
    assert not torch.allclose(logits(again, inputs(again)), expected, atol=1e-4)
    oelm.audit(again, before)
    key = next(key for key, p in again.named_parameters() if not p.requires_grad and "base_layer" not in key)
    again.get_parameter(key).data[0] += 1e-3
    with pytest.raises(AuditError, match="a frozen weight changed"):
        oelm.audit(again, before)


def test_the_start_depends_on_the_seed_alone(peft):
    models = [build("bert") for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        torch.rand(seed)
        state = torch.get_rng_state()
        oelm.convert(model, "lora", seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
    one, two, other = ([p for n, p in m.named_parameters() if "lora_A" in n] for m in models)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_run_resumes_exactly_and_ends_as_an_ordinary_model(peft, oelm_cli, world, save):  # noqa: F811
    save("adapted")
    words = (
        "--data",
        "three.csv",
        "--model",
        "adapted",
        "--max-length",
        "24",
        "--steps",
        "6",
        "--lr",
        "1e-2",
    )
    words = ("train", *words, "--method", "lora", "--set", "method.lora=4", "--set", "training.save_every=2")
    assert oelm_cli(*words, "--out", "whole")[0] == 0
    import signal

    from oelm.training.step import PlainStep

    take = PlainStep.take

    def stop_at_three(self, step, *rest):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return take(self, step, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainStep, "take", stop_at_three)
        assert oelm_cli(*words, "--out", "broken")[0] == 75
    code, _, err = oelm_cli(*words, "--out", "broken")
    assert code == 0 and "resuming after step" in err
    one, other = (Trained(world / run).model.state_dict() for run in ("whole", "broken"))
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert oelm_cli("audit", "broken")[0] == 0
    results = json.loads((world / "whole" / "results.json").read_text())
    assert results["method"] == "lora (lora=4)"
    head = 3 * 32 + 3 + 32 * 32 + 32  # the classifier and the pooler
    assert results["parameters"]["trainable"] == 3 * 2 * 4 * (32 + 32) + head
    assert "rank 4" in (world / "whole" / "model" / "README.md").read_text()
    assert sys.modules.get("peft")
