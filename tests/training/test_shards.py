"""Checkpoints in shards (FSDP2): resumed with any number of processes, damaged, killed between two shards.

The oracle is the unbroken run: bit for bit with the same number of processes, else to 1e-5 of every loss,
because gradients are summed in another order.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import oelm
from oelm.config import make_config
from oelm.data import open_store
from oelm.errors import UserError
from oelm.training.checkpoint import Checkpoints, read_checkpoint
from oelm.training.loop import train
from tests.study.damage import FILES
from tests.training.processes import SCHEDULE, config, launch, losses, make_store

MIDDLE, END = "step-00000006", "step-00000012"
SHARDS = [f"{kind}-0000{n}-of-00002.safetensors" for kind in ("model", "optimizer") for n in (1, 2)]

FAULTS = {"killed": "kill", "full": "full"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def unfinished(root: Path, run: str, name: str, end: bool = False) -> Path:
    """A copy of a run as it was in the middle; `end`: as it was before its last evaluation was recorded."""
    out = root / name
    shutil.copytree(root / run, out)
    shutil.copy(root / f"{run}.json", root / f"{name}.json")
    (out / "results.json").unlink()
    if not end:
        shutil.rmtree(out / "checkpoints" / END)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two processes and of one, and what others made of them from the middle on."""
    root = tmp_path_factory.mktemp("shards")
    store = make_store(root)
    ways = {"two": config(fsdp=True), "stages": config(fsdp=True) | SCHEDULE, "one": config(fsdp=True)}
    for name, values in (ways | dict.fromkeys(FAULTS, ways["two"])).items():
        (root / f"{name}.json").write_text(json.dumps(make_config(values).to_dict()))
    train(make_config(ways["one"]), store, root / "one", show=False)
    launch(2, "shard_processes.py", root, "two", "stages")
    for name, fault in FAULTS.items():  # in the second checkpoint, after a model's shard
        launch(2, "shard_processes.py", root, name, fault=fault)
        shutil.copytree(root / name, root / f"{name}-then")
    unfinished(root, "two", "two-two")
    unfinished(root, "one", "one-two")
    damaged = unfinished(root, "two", "damaged", end=True)
    flip(damaged / "checkpoints" / END / SHARDS[1])
    missing = unfinished(root, "two", "missing", end=True)
    (missing / "checkpoints" / END / SHARDS[2]).unlink()
    launch(2, "shard_processes.py", root, "two-two", "one-two", "damaged", "missing", *FAULTS)
    unfinished(root, "two", "nodes")
    launch(1, "shard_processes.py", root, "nodes", nodes=2)
    unfinished(root, "two", "two-three")
    unfinished(root, "stages", "stages-three")
    launch(3, "shard_processes.py", root, "two-three", "stages-three")
    for run in ("two", "stages"):
        unfinished(root, run, f"{run}-one")
        values = make_config(ways[run])
        train(values, store, root / f"{run}-one", show=False)
    return root


def record(run: Path) -> dict:
    return json.loads((run / "results.json").read_text())


@pytest.mark.parametrize("run", ["two-one", "two-three", "one-two", "stages-one", "stages-three"])
def test_resumed_with_another_number_of_processes(runs, run):
    before, after = run.split("-")
    assert losses(runs / run) == pytest.approx(losses(runs / before), abs=1e-5)
    assert losses(runs / run)[:6] == losses(runs / before)[:6]
    ended, unbroken = record(runs / run), record(runs / before)
    assert ended["status"] == "completed"
    assert ended["test"]["metrics"]["loss"] == pytest.approx(unbroken["test"]["metrics"]["loss"], abs=1e-4)
    warning = next(w for w in ended["warnings"] if w["code"] == "training.resumed_elsewhere")
    numbers = {"one": "1", "two": "2", "three": "3", "stages": "2"}
    changed = {"name": "processes", "now": numbers[after], "before": numbers[before]}
    assert changed in [change["values"] for change in warning["values"]["changes"]]
    assert ended["tokens"] == pytest.approx(unbroken["tokens"], rel=0.25), (
        "of all processes, padding included"
    )
    oelm.audit(oelm.load(runs / run / "model"))


@pytest.mark.parametrize("run", ["two-two", "nodes", "damaged", "missing", *FAULTS])
def test_resumed_with_the_same_number_it_is_the_unbroken_run_bit_for_bit(runs, run):
    assert losses(runs / run) == losses(runs / "two")
    weights = [(runs / name / "model" / "model.safetensors").read_bytes() for name in ("two", run)]
    assert weights[0] == weights[1]
    for file in SHARDS:
        parts = [(runs / name / "checkpoints" / END / file).read_bytes() for name in ("two", run)]
        assert parts[0] == parts[1]
    codes = [w["code"] for w in record(runs / run)["warnings"]]
    assert ("checkpoint.use_previous" in codes) == (run in ("damaged", "missing"))


def test_each_process_writes_its_own_rows(runs):
    index = json.loads((runs / "two" / "checkpoints" / "index.json").read_text())
    folder = runs / "two" / "checkpoints" / index["best"]
    assert {p.name for p in folder.iterdir()} == {*SHARDS, "state.json", "checksums.json"}
    weights = load_file(runs / "two" / "model" / "model.safetensors")
    parts = [load_file(folder / name) for name in SHARDS[:2]]
    for name, value in weights.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)
        assert len(parts[0][name]) == -(-len(value) // 2)
    moments = [load_file(folder / name) for name in SHARDS[2:]]
    assert not [key for key in moments[0] if "q_proj" in key or "k_proj" in key], "frozen: no state"
    assert {key.rpartition("/")[2] for key in moments[0]} == {"exp_avg", "exp_avg_sq", "step"}
    assert {key.rpartition("/")[2] for key in moments[1]} == {"exp_avg", "exp_avg_sq"}


def test_no_process_reads_more_than_its_rows(runs):
    for processes in (2, 3):
        for number in range(processes):
            whole = json.loads((runs / f"whole-{processes}-{number}.json").read_text())
            assert whole == ["step"], "AdamW's counts have no rows"


def test_killed_between_two_shards_the_checkpoint_before_stays_valid(runs):
    folder = runs / "killed-then" / "checkpoints"
    assert Checkpoints(folder, keep=2).names() == [MIDDLE]
    assert (folder / f".{END}.part" / SHARDS[1]).exists(), "the model's shard was written"
    assert not (folder / f".{END}.part" / SHARDS[3]).exists()
    assert read_checkpoint(folder / MIDDLE).state["step"] == 6
    assert not list((runs / "killed").rglob("*.part"))


def test_a_full_disk_in_one_process_ends_all_and_loses_nothing(runs):
    then = runs / "full-then"
    assert record(then)["status"] == "failed" and record(then)["failure"] == {"kind": "disk"}
    reason = record(then)["reason"]
    assert reason["code"] == "run.unsaved" and reason["values"]["checkpoint"] == MIDDLE
    assert "No space left on device" in reason["values"]["error"]
    assert Checkpoints(then / "checkpoints", keep=2).names() == [MIDDLE]
    assert not list(then.rglob("*.part"))


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_shard_is_passed_over(runs, tmp_path, kind):
    """However it is damaged, the checkpoint before is used."""
    for file in SHARDS:
        folder = shutil.copytree(runs / "two" / "checkpoints", tmp_path / file)
        FILES[kind](folder / END / file)
        checkpoints = Checkpoints(folder, keep=2)
        found = checkpoints.load_last()
        assert found is not None and found.state["step"] == 6
        assert END in (said := str(checkpoints.problems[0])) and len(said.splitlines()) == 1


def test_a_damaged_shard_is_refused_in_one_line(runs, tmp_path):
    for file, says in (
        (SHARDS[1], f"{SHARDS[1]} does not match its checksum"),
        (SHARDS[2], f"{SHARDS[2]}: No such file or directory"),
        ("checksums.json", "checksums.json does not name its files"),
    ):
        folder = shutil.copytree(runs / "two" / "checkpoints" / END, tmp_path / file / END)
        if file == SHARDS[1]:
            flip(folder / file)
        elif file == SHARDS[2]:
            (folder / file).unlink()
        else:
            sums = json.loads((folder / file).read_text())
            del sums[SHARDS[3]]
            (folder / file).write_text(json.dumps(sums))
        with pytest.raises(UserError) as caught:
            read_checkpoint(folder)
        assert str(caught.value) == f"checkpoint {END} is broken: {says}"


def test_one_process_has_nothing_to_shard_and_says_so(runs):
    assert "training.one_process" in [w["code"] for w in record(runs / "one")["warnings"]]
    names = {path.name for path in (runs / "one" / "checkpoints" / END).iterdir()}
    assert names == {"model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"}
    assert losses(runs / "one") == pytest.approx(losses(runs / "two"), abs=1e-5)


def test_a_run_without_fsdp_is_another(runs, tmp_path):
    run = shutil.copytree(runs / "two-two", tmp_path / "run")
    (run / "results.json").unlink()
    with pytest.raises(UserError, match=r"training\.fsdp is True there, False here"):
        train(make_config(config()), open_store(runs / "store"), run, show=False)
