"""One process, two processes, two micro-batches, sharded: the same losses, step by step."""

import json

import pytest
import torch
from safetensors.torch import load_file

import oelm
from oelm.config import make_config
from oelm.training.checkpoint import read_checkpoint
from oelm.training.loop import train
from tests.training.processes import SCHEDULE, config, launch, losses, make_store

BY_ROLE = {"lr_scale": {"ffn_in": 0.5, "embeddings": 0.1}, "weight_decay_scale": {"v": 9.0}}
LEARNED = {"name": "oelm-lora", "qk_scale": "head", "freeze_ratio": 0.3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All ways of running it: alone here, and the others together in one pair of processes."""
    root = tmp_path_factory.mktemp("parallel")
    store = make_store(root)
    xl = {"num_layers": 48, "num_heads": 25, "d_model": 50, "d_ff": 64, "num_labels": 2}
    deep = oelm.OelmGPTConfig(vocab_size=store.vocab_size, max_position_embeddings=64, **xl)
    oelm.OelmGPTForSequenceClassification(deep).save_pretrained(root / "deep")
    ways = {
        "ddp": config(),
        "ddp-accumulate": config(accumulate=2),
        "fsdp": config(fsdp=True),
        "fsdp-accumulate": config(fsdp=True, accumulate=2),
        "fsdp-deep": config(fsdp=True, gradient_checkpointing=True, steps=3, eval_every=3, save_every=3),
    }
    ways["fsdp-deep"]["model"] = {"name": str(root / "deep")}
    for way, values in {"ddp-roles": BY_ROLE, "fsdp-roles": BY_ROLE | {"fsdp": True}}.items():
        ways[way] = config(**values) | {"method": LEARNED}
    for way in ("ddp", "fsdp"):
        for name in (f"{way}-stages", f"{way}-stages-again"):
            ways[name] = config(fsdp=way == "fsdp") | SCHEDULE
    for name, values in ways.items():
        (root / f"{name}.json").write_text(json.dumps(make_config(values).to_dict()))
    launch(2, "two_processes.py", root)
    by_role = config(**BY_ROLE) | {"method": LEARNED}
    alone = {"alone": config(), "alone-accumulate": config(accumulate=2), "alone-roles": by_role}
    alone["alone-stages"] = config() | SCHEDULE
    for name, values in alone.items():
        train(make_config(values), store, root / name, show=False)
    return root


@pytest.mark.parametrize("way", ["alone-accumulate", "ddp", "ddp-accumulate", "fsdp", "fsdp-accumulate"])
def test_losses_agree(runs, way):
    alone, other = losses(runs / "alone"), losses(runs / way)
    assert len(other) == 12
    assert other == pytest.approx(alone, abs=1e-5)
    assert alone[-1] < 0.9 * alone[0], "and something is learned"


@pytest.mark.parametrize("way", ["alone-accumulate", "ddp", "ddp-accumulate", "fsdp", "fsdp-accumulate"])
def test_results_agree(runs, way):
    """Evaluation counts every item once, whatever the number of processes, and the trained weights agree."""
    alone, other = (json.loads((runs / name / "results.json").read_text()) for name in ("alone", way))
    assert other["status"] == "completed"
    for split in ("best", "test"):
        for metric, value in alone[split]["metrics"].items():
            if metric == "confusion":
                assert other[split]["metrics"][metric] == value
            else:
                assert other[split]["metrics"][metric] == pytest.approx(value, abs=1e-4)
    assert (other["samples"], other["steps"]) == (alone["samples"], alone["steps"])
    weights, others = (load_file(runs / name / "model" / "model.safetensors") for name in ("alone", way))
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=0, atol=2e-3)
    frozen = [key for key in weights if "q_proj" in key or "k_proj" in key]
    assert all(torch.equal(weights[key], others[key]) for key in frozen)


@pytest.mark.parametrize("way", ["ddp-roles", "fsdp-roles"])
def test_rates_by_role_a_share_that_is_frozen_and_what_is_learned_beside_it(runs, way):
    assert losses(runs / way) == pytest.approx(losses(runs / "alone-roles"), abs=1e-5)
    assert losses(runs / way) != pytest.approx(losses(runs / "alone"), abs=1e-3)
    audits = [json.loads((runs / name / "freeze_audit.json").read_text()) for name in ("alone-roles", way)]
    assert audits[0] == audits[1] and audits[0]["frozen_parameters"] > 0
    steps = [runs / name / "checkpoints" / "step-00000012" for name in ("alone-roles", way)]
    alone, other = (read_checkpoint(step).model for step in steps)
    assert sum("learned_scale" in name for name in alone) == 2
    assert sum("learned_up" in name for name in alone) == 4
    for name, value in alone.items():
        if ".learned_" in name:
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-3)
            assert value.std() > 1e-4, "it was learned"
    merged = load_file(runs / way / "model" / "model.safetensors")
    assert not [name for name in merged if ".learned_" in name]
    oelm.audit(oelm.load(runs / way / "model"))


@pytest.mark.parametrize("way", ["ddp-stages", "fsdp-stages"])
def test_a_schedule_of_freezing(runs, way):
    """Gradients of what is unfrozen are exchanged, nobody waits for those of what is frozen, and a run that
    resumes in the middle, at a stage's border, is the unbroken one bit for bit."""
    assert losses(runs / way) == pytest.approx(losses(runs / "alone-stages"), abs=1e-5)
    assert losses(runs / way)[6:] != pytest.approx(losses(runs / "alone")[6:], abs=1e-3)
    for name in (way, f"{way}-again"):
        assert json.loads((runs / name / "results.json").read_text())["status"] == "completed"
    assert losses(runs / f"{way}-again") == losses(runs / way)
    paths = [runs / name / "model" / "model.safetensors" for name in (way, f"{way}-again")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    oelm.audit(oelm.load(runs / way / "model"))


def test_what_is_sharded_really_is(runs):
    for rank in ("0", "1"):
        kinds = json.loads((runs / "kinds" / rank).read_text())
        assert kinds["ddp"] == ["DistributedDataParallel", "Parameter"]
        for way in ("fsdp", "fsdp-accumulate", "fsdp-deep", "fsdp-stages"):
            assert "DTensor" in kinds[way]
            assert "Parameter" not in kinds[way]


def test_gloos_threads_end_before_python_does(runs):
    """One that frees a tensor while Python ends would abort the process, some times in a hundred."""
    for rank in (0, 1):
        threads = json.loads((runs / "kinds" / f"threads-{rank}").read_text())
        assert any("gloo" in name for name in threads["before"])
        assert not any("gloo" in name for name in threads["at the end"])


def test_gpt2_xls_depth_trains_sharded_with_checkpointing(runs):
    results = json.loads((runs / "fsdp-deep" / "results.json").read_text())
    assert results["status"] == "completed"
    assert results["parameters"]["frozen"] == 48 * 2 * 50 * 50
    oelm.audit(oelm.load(runs / "fsdp-deep" / "model"))


def test_a_batch_too_small_for_all_is_refused(runs, tmp_path):
    from oelm.data import open_store

    with pytest.raises(oelm.UserError, match="too few for 16"):
        train(make_config(config(accumulate=16)), open_store(runs / "store"), tmp_path / "x", show=False)
