"""Freezing by schedule in the training loop: exact after a resume, audited, whatever computes the step."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import oelm
from oelm.config import make_config
from oelm.data import open_store
from oelm.data.tasks import make_objective
from oelm.data.writer import copy_store
from oelm.method import Method
from oelm.speed import FastStep
from oelm.speed import cuda_graphs as fast
from oelm.speed.adamw import RecordableAdamW
from oelm.training.checkpoint import Checkpoint
from oelm.training.parallel import process_state
from oelm.training.resolve import resolve_run
from oelm.training.schedule import make_optimizer
from oelm.training.shards import rows_of
from oelm.training.step import PlainStep
from tests.training.runs import make_store

TOTAL = 50
SCHEDULES = {
    "oelm-unfreeze": {"name": "oelm-unfreeze"},
    "train-then-freeze": {"name": "train-then-freeze"},
    "train-then-freeze-plain": {"name": "train-then-freeze-plain"},
    "bottom-up": {"name": "top-1", "freeze_schedule": {"unfreeze_at": 0.2, "order": "bottom-up", "every": 9}},
    "at once": {"name": "oelm", "freeze_schedule": {"unfreeze_at": 0.5, "warmup": 6}},
    "refreeze": {
        "name": "oelm",
        "freeze_schedule": {
            "unfreeze_at": [0.2, 0.4],
            "order": "top-down",
            "refreeze_at": 0.6,
            "polar": True,
            "warmup": 4,
        },
    },
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(make_store(tmp_path_factory.mktemp("schedules")))


def start(store, method, kind=FastStep, dropout=0.1, **training):
    """A step of this kind of a new run of a tiny model, and the fingerprint from before it."""
    settings = {"steps": TOTAL, "batch_size": 4, "lr": 2e-3, "warmup": 3, "seed": 1} | training
    config = make_config({"task": {"data": "x", "max_length": 32}, "training": settings})
    objective, state = make_objective(store, 32, 0.0, "none"), process_state()
    sizes = {"d_model": 16, "num_layers": 3, "num_heads": 2, "max_position_embeddings": 32}
    fields = {
        "vocab_size": store.vocab_size,
        "num_labels": 2,
        "pad_token_id": store.pad_id,
        "dropout": dropout,
    }
    raw = oelm.OelmGPTForSequenceClassification(oelm.OelmGPTConfig(**sizes, **fields))
    oelm.convert(raw, Method.from_dict(method), seed=1)
    before = oelm.fingerprint(raw)
    resolved = resolve_run(config, objective, state.device, state.num_processes)
    step = kind(resolved, objective, raw, state)
    raw.train()
    return step, before


def run(step, first=0, end=TOTAL, saves=()):
    """Take these steps; the checkpoints after so many."""
    kept = {}
    for _, k, batches in step.resolved.plan.schedule(first):
        number = first + len(kept.setdefault("losses", []))
        if number in saves:
            model, moments = step.capture()
            state = {"freezing": copy.deepcopy(step.freezing.record)}
            kept[number] = Checkpoint(model, moments, state, rows_of(step.raw))
        if number == end:
            return kept
        kept["losses"].append(step.take(number, batches, k)[0].item())
    raise AssertionError("the plan is too short")


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_is_the_unbroken_one(store, name):
    """From the middle, and from a step before a stage's border and from the border itself: the same bits."""
    whole, before = start(store, SCHEDULES[name])
    border = whole.freezing.timeline.borders[-1]
    saves = {TOTAL // 2, border - 1, border}
    kept = run(whole, saves=saves)
    oelm.audit(whole.raw, before)
    expected = whole.capture()
    for number in saves:
        step, before = start(store, SCHEDULES[name])
        step.restore(kept[number])
        oelm.audit(step.raw, before)
        assert run(step, number)["losses"] == kept["losses"][number:]
        assert all(map(equal, expected, step.capture()))
        oelm.audit(step.raw, before)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_graph_records_is_made_anew_in_every_stage(store, monkeypatch, accumulate):
    """The step as CUDA graphs record it, run as it stands: the weights of plain steps. Graphs, copies and
    gradients of a stage that is over would decay what is frozen, and not train what was unfrozen."""
    monkeypatch.setattr(fast, "MOST_GRAPHS", 0)
    ways, graphs = [], []
    for kind in (PlainStep, FastStep):
        values = {"precision": "bf16", "clip": 0.1, "eps": 1e-4, "accumulate": accumulate}
        step, before = start(store, SCHEDULES["refreeze"], kind, dropout=0.0, **values)
        first, _ = step.capture()
        if kind is FastStep:
            given = step.raw, step.config.training, RecordableAdamW, step.freezing
            step.optimizer = make_optimizer(*given)
            step.graphed = step._make_graphed()
        for number in (0, 10, 20, 30):  # of each stage
            run(step, number, number + 3)
            graphs.append(getattr(step, "graphed", None))
        oelm.audit(step.raw, before)
        model, moments = step.capture()
        ways.append({name: model[name] - value for name, value in first.items()})
        assert not [name for name in moments if "q_proj" in name], "what is frozen again has no moments"
    assert len({id(graph) for graph in graphs[4:]}) == 4
    for name, way in ways[0].items():
        assert way.norm() > 0 and (ways[1][name] - way).norm() <= 0.1 * way.norm(), name


@pytest.mark.slow
def test_two_processes(tmp_path):
    """By DDP and FSDP2, every schedule: audited and exact after a resume, with the losses of one process."""
    store = open_store(make_store(tmp_path))
    copy_store(store, tmp_path / "store")
    script = Path(__file__).with_name("two_process_schedules.py")
    root = script.parents[2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    paths = f"{root / 'src'}{os.pathsep}{root}"
    given = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)], env=given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-6000:]
    losses = json.loads((tmp_path / "losses.json").read_text())
    for name, method in SCHEDULES.items():
        alone, before = start(store, method, PlainStep, dropout=0.0)
        expected = run(alone)["losses"]
        oelm.audit(alone.raw, before)
        for way in ("ddp", "fsdp"):
            assert losses.pop(f"{way} {name}") == pytest.approx(expected, abs=1e-4), (way, name)
    assert not losses
