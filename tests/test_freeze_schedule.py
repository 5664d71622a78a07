"""Schedules of freezing outside our loop: what is frozen when, and what goes wrong without a word."""

import copy
import json
import multiprocessing
import re
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import oelm
from oelm.errors import AuditError, UserError
from oelm.method import Method
from oelm.models.freeze_schedule import FreezeSchedule
from oelm.models.frozen_state import unfreezing_groups
from tests.tiny import build, inputs

TOP_DOWN = {"unfreeze_at": 0.4, "order": "top-down"}
BLOCKS = {"freeze": {"blocks": "all", "embeddings": "all"}}


def method(schedule, name="oelm", **fields):
    return Method.from_dict({"name": name, "freeze_schedule": schedule, **fields})


def converted(schedule, family="bert", **fields):
    model = build(family).train()
    oelm.convert(model, method(schedule, **fields), seed=0)
    return model


def trains(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def step(model, optimizer, batch):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, None),
        ({"freeze": 0.2}, "unknown key freeze_schedule.freeze; known: freeze_at"),
        ({"order": "top-down"}, "needs freeze_at or unfreeze_at"),
        ({"freeze_at": 0.2, "refreeze_at": 0.4}, "freeze_schedule.refreeze_at needs unfreeze_at"),
        ({"unfreeze_at": 1.5}, "must be a number of steps or a share"),
        (
            {"unfreeze_at": 0},
            "must be a number of steps or a share of them, above 0, or a list of such, not 0",
        ),
        ({"unfreeze_at": 5, "every": 0}, "every must be a number of steps or a share, above 0, not 0"),
        ({"unfreeze_at": []}, "is an empty list"),
        ({"unfreeze_at": [0.2, 0.4]}, "need order = 'top-down' or 'bottom-up'"),
        ({"unfreeze_at": [0.2, 0.4], "order": "top-down", "every": 5}, "every contradicts"),
        ({"unfreeze_at": 0.2, "order": "upwards"}, "known: together, top-down, bottom-up"),
        ({"unfreeze_at": 0.2, "polar": True}, "nothing is frozen later"),
        ({"unfreeze_at": 0.2, "warmup": "long"}, "warmup must be a number"),
    ],
)
def test_what_makes_no_schedule_is_refused(values, problem):
    if problem is None:
        assert Method("x", freeze_schedule=values).schedule is None
    else:
        with pytest.raises(UserError, match=problem):
            method(values)


@pytest.mark.parametrize(
    ("values", "total", "problem"),
    [
        ({"unfreeze_at": 100}, 100, "is step 100, but the run ends after 100"),
        ({"freeze_at": 0.5, "unfreeze_at": 20}, 100, "is step 20 of 100, which is not after"),
        ({"unfreeze_at": [0.6, 0.3], "order": "top-down"}, 100, "list of growing points"),
        ({"unfreeze_at": 0.5, "order": "top-down", "every": 30}, 100, "is due at step 110, but the run ends"),
        ({"unfreeze_at": [0.4, 500], "order": "top-down"}, 100, "due at step 500, but the run ends"),
        (
            {"unfreeze_at": 0.2, "order": "bottom-up", "every": 20, "refreeze_at": 0.6},
            100,
            "step 60, but freeze_schedule.refreeze_at freezes them all after 60; 1 would never train",
        ),
    ],
)
def test_a_run_that_never_gets_there_is_refused(values, total, problem):
    with pytest.raises(UserError, match=problem):
        oelm.Freezing(converted(values), total)
    with pytest.raises(UserError, match="has 4 points, but only 3 layers are frozen"):
        converted({"unfreeze_at": [1, 2, 3, 4], "order": "top-down"})
    nothing_left = converted({"freeze_at": 2}, "gpt2", freeze={"blocks": "all", "embeddings": "all"})
    with pytest.raises(UserError, match="freezes all of the model at step 2"):
        oelm.Freezing(nothing_left, 10)


POINTS = st.floats(0.01, 0.99) | st.integers(1, 30)


@given(
    freeze=st.just(0) | POINTS,
    unfreeze=st.none() | POINTS,
    every=st.none() | POINTS,
    refreeze=st.none() | POINTS,
    groups=st.integers(1, 12),
    total=st.integers(1, 60),
)
def test_the_state_is_a_function_of_the_step(freeze, unfreeze, every, refreeze, groups, total):
    values = {"freeze_at": freeze, "unfreeze_at": unfreeze, "order": "top-down", "every": every}
    try:
        schedule = FreezeSchedule(**values, refreeze_at=refreeze)
        schedule.check(groups, total)
    except UserError:
        return
    line = schedule.resolve(groups, total)
    for group in range(groups):
        frozen = [line.frozen_since(group, n) is not None for n in range(total)]
        assert frozen[0] == (freeze == 0)
        # Trained, frozen, trained and frozen again, in this order and each at its point.
        spans = [line.freeze, *([line.unfreeze[group]] if line.unfreeze else []), line.refreeze]
        changes = [n for n in range(1, total) if frozen[n] != frozen[n - 1]]
        for n in range(total):  # it is frozen since it last changed, or since the start
            if frozen[n]:
                assert line.frozen_since(group, n) == max([0, *(c for c in changes if c <= n)])
        assert set(changes) <= set(spans) <= {*line.borders, None}
        if line.unfreeze and group:
            assert line.unfreeze[group] >= line.unfreeze[group - 1]
    if line.unfreeze:
        assert max(line.unfreeze) < (line.refreeze or total), "every layer has its turn"


@pytest.mark.parametrize("family", ["bert", "t5", "bart", "oelm-gpt"])
def test_layers_take_turns_from_the_top_and_embeddings_come_last(family):
    """Of two stacks each counts from its own top, with its last norm; BART's decoder has two layers, all
    others three."""
    model = build(family)
    down = unfreezing_groups(model, method(TOP_DOWN, **BLOCKS))
    up = unfreezing_groups(model, method(TOP_DOWN | {"order": "bottom-up"}, **BLOCKS))
    assert up == {name: 3 - group for name, group in down.items()}
    for name, group in down.items():
        layer = re.search(r"\.(?:h|layer|layers|block)\.(\d)\.", name)
        top = 1 if family == "bart" and "decoder" in name else 2
        if "relative_attention_bias" in name or not layer:
            assert group == (0 if re.search(r"\.ln_f\.|final_layer_norm", name) else 3), name
        else:
            assert group == top - int(layer[1]), name


def test_the_presets_keep_q_and_k_frozen_for_four_fifths_of_the_steps():
    for name, share in (("oelm-unfreeze", 0.8), ("train-then-freeze", 0.8), ("train-then-freeze-plain", 0.8)):
        for groups in (1, 6, 12):
            line = oelm.get_method(name).schedule.resolve(groups, 1500)
            for group in range(groups):
                frozen = sum(line.frozen_since(group, n) is not None for n in range(1500))
                assert frozen >= share * 1500
    assert "freeze_schedule" not in oelm.get_method("oelm").to_dict()
    assert Method.from_dict(oelm.get_method("oelm-unfreeze").to_dict()) == oelm.get_method("oelm-unfreeze")


def test_the_pages_example_gives_every_layer_its_turn():
    page = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
    example = re.search(r"```toml\n(\[method\]\n.*?)```", page, re.DOTALL)[1]
    schedule = Method.from_dict(tomllib.loads(example)["method"]).schedule
    for layers in (6, 12):
        schedule.check(layers, 1000)


def test_the_report_counts_what_trains_now_and_at_the_end():
    report = oelm.convert(build("bert"), "train-then-freeze")
    assert report.frozen == 0 and report.frozen_at_end == 3 * 2 * (32 * 32 + 32)
    assert f"ends with {report.total - report.frozen_at_end:,} trainable" in str(report)


@pytest.mark.parametrize("family", ["gpt2", "bert", "oelm-gpt"])
def test_a_saved_model_is_frozen_as_it_was(family, tmp_path):
    """Frozen by its polar factor at step 3, and from then on audited bit for bit."""
    model = converted({"freeze_at": 3, "polar": True}, family)
    before, batch = oelm.fingerprint(model), inputs(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    freezing = oelm.Freezing(model, 8, optimizer)
    for number in range(5):
        assert freezing.before_step(number) == (number == 3)
        step(model, optimizer, batch)
        assert not (number >= 3 and oelm.audit(model, before).orthonormal_heads == 0)
    model.save_pretrained(tmp_path)
    loaded = oelm.load(tmp_path)
    assert trains(loaded) == trains(model) != {name for name, _ in model.named_parameters()}
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad).view(-1)[0] *= 1 + 2e-7
    with pytest.raises(AuditError, match="not the weight that was frozen"):
        oelm.audit(model, before)


def test_an_optimizer_of_what_trains_at_the_start_is_refused():
    """It would never train what is unfrozen later, without a word."""
    model = converted(TOP_DOWN)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with pytest.raises(UserError, match=r"does not hold .* build it over model.parameters\(\)"):
        oelm.Freezing(model, 30, optimizer)
    before, batch = oelm.fingerprint(model), inputs(model)
    freezing = oelm.Freezing(model, 30)  # unseen, and found in the end
    for number in range(30):
        freezing.before_step(number)
        step(model, optimizer, batch)
        if number < 12:
            oelm.audit(model, before)
    with pytest.raises(AuditError, match="have trained in 18 steps and has not changed"):
        oelm.audit(model, before)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [({"freeze_at": 14}, 14), ({"unfreeze_at": 4, "refreeze_at": 16}, 12), ({"unfreeze_at": 8}, 12)],
)
def test_what_should_have_trained_and_did_not_is_found(schedule, steps):
    """Be it frozen by now: what trained first, and what was frozen again. Fingerprints keep both in JSON."""
    for lr in (1e-2, 0.0):
        model = converted(schedule, "oelm-gpt")
        before, batch = oelm.fingerprint(model), inputs(model)
        before = type(before).from_dict(json.loads(json.dumps(before.to_dict())))
        scheduled = [p for name, p in model.named_parameters() if re.search("[qk]_proj", name)]
        others = [p for name, p in model.named_parameters() if not re.search("[qk]_proj", name)]
        groups = [{"params": others}, {"params": scheduled, "lr": lr}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        freezing = oelm.Freezing(model, 20, optimizer)
        for number in range(20):
            freezing.before_step(number)
            step(model, optimizer, batch)
        if lr:
            oelm.audit(model, before)
    with pytest.raises(AuditError, match=f"q_proj.weight: it should have trained in {steps} steps"):
        oelm.audit(model, before)


def test_a_step_that_raises_leaves_the_optimizers_groups_as_they_were():
    model = converted({"unfreeze_at": 2, "warmup": 4}, "oelm-gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    freezing, batch = oelm.Freezing(model, 8, optimizer), inputs(model)
    whole = optimizer.param_groups
    for number in range(4):
        freezing.before_step(number)
        assert optimizer.param_groups is whole
        model(**batch).loss.backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad if parameter.grad is None else parameter.grad.to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        assert len(optimizer.state_dict()["param_groups"]) == 1
        optimizer.zero_grad()


def test_the_state_does_not_depend_on_the_way_to_it():
    """Events would be missed by a run that resumes; the step is not."""
    schedule = {"unfreeze_at": [2, 4], "order": "bottom-up", "refreeze_at": 6}
    walked = oelm.Freezing(converted(schedule), 9)
    for number in range(9):
        walked.before_step(number)
        jumped = oelm.Freezing(converted(schedule), 9)
        jumped.before_step(number)
        assert trains(jumped.model) == trains(walked.model)


def test_warming_up_is_a_smaller_learning_rate():
    """As the same steps with a group and a learning rate for every layer."""
    model = converted({"unfreeze_at": 2, "warmup": 4}, "oelm-gpt")
    twin, batch = copy.deepcopy(model), inputs(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)  # which computes from the last rate
    freezing = oelm.Freezing(model, 8, optimizer)
    late = [p for name, p in twin.named_parameters() if name in freezing.groups]
    rest = [p for name, p in twin.named_parameters() if name not in freezing.groups]
    groups = torch.optim.AdamW([{"params": rest}, {"params": late}], lr=1e-2)
    for number in range(8):
        freezing.before_step(number)
        for parameter in late:
            parameter.requires_grad_(number >= 2)
        rate = optimizer.param_groups[0]["lr"]
        groups.param_groups[0]["lr"] = rate
        groups.param_groups[1]["lr"] = rate * min(1.0, (number - 1) / 4)
        step(model, optimizer, batch)
        step(twin, groups, batch)
        scheduler.step()
        assert len(optimizer.param_groups) == 1
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_block_by_block_there_are_two_graphs():
    """One with frozen q and k and one without."""
    assert compiled_graphs("blocks") == 2


@pytest.mark.slow
def test_compiled_as_a_whole_there_is_a_graph_for_every_stage():
    """And PyTorch gives up at the eighth. In a process of its own: it failed once after other tests, inside
    torch.compile, whose caches a process has for good."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert process.submit(compiled_graphs, "model").result(timeout=200) == 4


def compiled_graphs(compiled: str) -> int:
    """How many graphs there are after all stages; the gradients must be those without torch.compile."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    expected, model = (converted(TOP_DOWN | {"every": 1}, "oelm-gpt") for _ in range(2))
    whole = torch.compile(model, backend=backend) if compiled == "model" else model
    for block in model.transformer.h if compiled == "blocks" else ():
        block.compile(backend=backend)
    eager, freezing = oelm.Freezing(expected, 8), oelm.Freezing(model, 8)
    ids, name = inputs(model)["input_ids"], "transformer.h.2.attn.q_proj.weight"
    for number in range(8):
        assert eager.before_step(number) == freezing.before_step(number)
        grads = []
        for outer, inner in ((expected, expected), (whole, model)):
            outer(input_ids=ids).logits.square().mean().backward()
            grads.append(dict(inner.named_parameters())[name].grad)
            inner.zero_grad()
        assert (grads[0] is None) == (grads[1] is None) == (number < 3)
        if number >= 3:
            torch.testing.assert_close(*grads)
    return len(graphs)


def test_checkpointing_above_frozen_layers():
    """The input of a checkpointed block needs no gradient there; PyTorch's older kind then gives its weights
    none. (transformers makes the input need one.)"""
    block, x = converted(TOP_DOWN, "oelm-gpt").transformer.h[2], torch.randn(2, 5, 32)
    given, grads = (x, None, True, None, None), []
    for output in (block(*given), checkpoint(block, *given, use_reentrant=False)):
        grads.append(torch.autograd.grad(output.square().sum(), block.mlp.fc_in.weight)[0])
    assert torch.equal(*grads)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert not checkpoint(block, *given, use_reentrant=True).requires_grad


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["again", "once", "wrong"])
def test_ddp(alone, way):
    """Wrapped again at every stage, or once for all of them; or as one would, which PyTorch
    refuses at the second stage."""
    schedule = {"freeze_at": 2, "polar": True, "unfreeze_at": 4}
    expected, model = converted(schedule, "oelm-gpt"), converted(schedule, "oelm-gpt")
    batch, weights = inputs(model), []
    for number_of, inner in enumerate((expected, model)):
        freezing = oelm.Freezing(inner, 6, optimizer := torch.optim.AdamW(inner.parameters(), lr=1e-2))
        freezing.prepare()
        outer = (
            inner if number_of == 0 else DistributedDataParallel(inner, find_unused_parameters=way == "once")
        )
        try:
            for number in range(6):
                if freezing.before_step(number) and number_of and way == "again":
                    outer = DistributedDataParallel(inner)
                step(outer, optimizer, batch)
        except RuntimeError as error:
            assert way == "wrong" and number_of and "finished reduction" in str(error)
            return
        weights.append([p.detach() for p in inner.parameters()])
    assert way != "wrong"
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other)
