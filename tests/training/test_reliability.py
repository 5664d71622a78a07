"""A run that is killed, stopped, starved of disk or robbed of a checkpoint ends as if nothing had happened.

The oracle is the unbroken run: the same weights bit for bit, metrics, results and predictions.
"""

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oelm.system.messages import read_notice
from oelm.training.checkpoint import Checkpoint, Checkpoints, read_checkpoint
from tests.training.runs import Machine, Strike, is_finished, kept, outcome

Unbroken = Callable[..., tuple[Path, Path]]
SAVE = "Checkpoints.save"
# Stops early: the best lies before the end, and both states must survive.
EARLY = {"steps": 200, "eval_every": 4, "early_stopping": 2, "lr": 1e-3, "schedule": "constant"}


def _torn(machine: Machine, config: Path, out: Path, kills: int, rng: random.Random) -> tuple[int, int]:
    """Kill a run up to `kills` times, half of them inside a save, and let it finish: kills, and in a save."""
    delivered = inside = 0
    while True:
        if delivered < kills and rng.random() < 0.5:
            ended = machine.run(config, out, strike=Strike(signal.SIGKILL, below=SAVE, n=rng.randint(1, 80)))
            inside += ended.code == -signal.SIGKILL
        else:
            running = machine.start(config, out)
            if delivered < kills:
                time.sleep(rng.uniform(0, 1.2))
                running.send(signal.SIGKILL)
            ended = running.end()
        if ended.code == 0:
            return delivered, inside
        assert ended.code == -signal.SIGKILL, ended.text
        delivered += 1
        if is_finished(out):
            return delivered, inside


def _kill_at_random(
    machine: Machine, unbroken: tuple[Path, Path], tmp_path: Path, kills: int
) -> tuple[int, int]:
    """Kill runs so many times in all; each must end as the unbroken one."""
    config, reference = unbroken
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    delivered = inside = 0
    for number in itertools.count():
        if delivered == kills:
            break
        out = tmp_path / str(number)
        more = _torn(machine, config, out, kills - delivered, rng)
        delivered, inside = delivered + more[0], inside + more[1]
        assert outcome(out) == outcome(reference), f"seed {seed}, {more[0]} kills, {out}"
        assert kept(out) == kept(reference)
    return delivered, inside


@pytest.mark.parametrize(("training", "kills"), [({}, 5), (EARLY, 3)], ids=["plain", "early-stopping"])
def test_killed_at_random_moments(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, training: dict[str, Any], kills: int
) -> None:
    assert _kill_at_random(machine, unbroken(**training), tmp_path, kills)[0] == kills


def test_killed_between_the_best_checkpoint_and_the_index(
    machine: Machine, unbroken: Unbroken, tmp_path: Path
) -> None:
    """The weights of the best step are there, and nothing but their own state says that they are the best."""
    config, reference = unbroken(**EARLY)
    best, out = outcome(reference)["index"]["best"], tmp_path / "run"
    for saves in range(200):
        strike = Strike(signal.SIGKILL, "Checkpoints.save", path=".index.json", n=1 + 2 * saves)
        machine.run(config, out, strike=strike)
        if kept(out)[-1] == best:
            break
        shutil.rmtree(out)
    index = out / "checkpoints/index.json"
    assert not index.exists() or json.loads(index.read_text()).get("best") != best
    machine.finish(config, out)
    assert outcome(out) == outcome(reference)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_best_weights_wait_in_memory(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, number: signal.Signals
) -> None:
    """Without `save_every` a short run writes no checkpoint. Killed, it begins again; told to stop, it writes
    the best one and the last."""
    config, reference = unbroken(**EARLY | {"save_every": None})
    assert not (reference / "checkpoints/index.json").exists()
    out = tmp_path / "run"
    ended = machine.run(config, out, strike=Strike(number, call="_log_step", n=10))
    if number == signal.SIGKILL:
        assert ended.code == -number and not (out / "results.json").exists()
    else:
        best = json.loads((out / "results.json").read_text())["best"]["step"]
        assert ended.code == 75 and best < 10, ended.text
        assert kept(out) == [f"step-{step:08d}" for step in (best, 11)]
    machine.finish(config, out)
    assert outcome(out, checkpoints=False) == outcome(reference, checkpoints=False)


@pytest.mark.slow
def test_killed_fifty_times(machine: Machine, unbroken: Unbroken, tmp_path: Path) -> None:
    plain = _kill_at_random(machine, unbroken(), tmp_path / "plain", 35)
    early = _kill_at_random(machine, unbroken(**EARLY), tmp_path / "early", 15)
    assert plain[0] + early[0] == 50
    assert plain[1] + early[1] >= 10


SHORT = {"steps": 4, "eval_every": 2, "save_every": 1, "keep": 1}


@pytest.mark.slow
@pytest.mark.parametrize("below", [SAVE, "Checkpoints.clean_up", "RunFolder.open", "start_run", "_finish"])
def test_killed_at_every_file_operation(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, below: str
) -> None:
    """Every gap between two file operations of a start and of an end, every third of those of a save."""
    config, reference = unbroken(**SHORT)
    for n in range(1, 1000, 3 if below == SAVE else 1):
        out = tmp_path / str(n)
        if below == "Checkpoints.clean_up":  # what a resumed run does first: the kill before left it work
            machine.run(config, out, strike=Strike(signal.SIGKILL, "Checkpoints._prune", n=9))
        ended = machine.run(config, out, strike=Strike(signal.SIGKILL, below, path=str(out), n=n))
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL, ended.text
        machine.finish(config, out)
        assert outcome(out) == outcome(reference), f"killed at operation {n}"
        assert kept(out) == kept(reference)
        shutil.rmtree(out)
    assert n > 3


def _wait_for_lines(out: Path, lines: int) -> Callable[[], bool]:
    log = out / "metrics.jsonl"
    return lambda: log.exists() and log.read_bytes().count(b"\n") >= lines


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_it_saves_and_asks_to_be_requeued(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, number: signal.Signals
) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    running = machine.start(config, out)
    running.wait_for(_wait_for_lines(out, 4))
    running.send(number)
    ended = running.end()
    assert ended.code == 75, ended.text
    assert "run the same command again to resume" in ended.message
    results = json.loads((out / "results.json").read_text())
    assert results["status"] == "interrupted"
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert results["reason"] == {"code": "stop.signal", "values": {"signal": name}}
    assert 0 < results["steps"] < 30
    assert kept(out)[-1] == f"step-{results['steps']:08d}"  # nothing that was computed is lost
    assert machine.run(config, out).code == 0
    assert outcome(out) == outcome(reference)


def test_sigterm_through_python_m_oelm(machine: Machine, unbroken: Unbroken, tmp_path: Path) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    words = ["train", "--config", str(config), "--data", str(machine.store), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "oelm", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    ready = _wait_for_lines(out, 3)
    while not ready() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert json.loads((out / "results.json").read_text())["status"] == "interrupted"
    assert machine.run(config, out).code == 0
    assert outcome(out) == outcome(reference)


@pytest.mark.parametrize("below", ["Choice.store", "RunFolder.open", "start_run", "_finish"])
def test_told_to_stop_while_no_steps_are_made(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, below: str
) -> None:
    """Before the first step and after the last there is nothing to save, and the answer is the same."""
    config, reference = unbroken()
    out = tmp_path / "run"
    ended = machine.run(
        config, out, strike=Strike(signal.SIGTERM, below, n=3 if below != "Choice.store" else 1)
    )
    assert ended.code == 75, ended.text
    assert machine.run(config, out).code == 0
    assert outcome(out) == outcome(reference)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGKILL])
def test_told_to_stop_in_an_evaluation_it_does_not_wait_for_its_end(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, second: signal.Signals
) -> None:
    """It is made once more when the run goes on; that one is broken off too, or killed at its end."""
    config, reference = unbroken(**EARLY)
    out = tmp_path / "run"
    batch = "Display.show_evaluation"
    ended = machine.run(config, out, strike=Strike(signal.SIGTERM, call=batch))
    assert ended.code == 75, ended.text
    assert kept(out)[-1] == "step-00000004"
    assert '"eval"' not in (out / "metrics.jsonl").read_text()
    if second == signal.SIGTERM:
        ended = machine.run(config, out, strike=Strike(second, call=batch))
        assert ended.code == 75, ended.text
        assert kept(out)[-1] == "step-00000004"
    else:  # it was measured and written to the log, and nothing was saved
        ended = machine.run(config, out, strike=Strike(second, call="_check_chance_level"))
        assert ended.code == -second
        assert (out / "metrics.jsonl").read_text().count('"eval"') == 1
    machine.finish(config, out)
    assert outcome(out) == outcome(reference)


@pytest.mark.parametrize("moment", ["_check_chance_level", "Checkpoints._prune"])
def test_told_to_stop_when_the_last_step_is_done_it_does_not_test_first(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, moment: str
) -> None:
    """After the last evaluation, and while the last checkpoint is written."""
    config, reference = unbroken(steps=6, eval_every=6, save_every=0)
    out = tmp_path / "run"
    ended = machine.run(config, out, strike=Strike(signal.SIGTERM, call=moment))
    assert ended.code == 75, ended.text
    assert not (out / "predictions.npz").exists() and kept(out)[-1] == "step-00000006"
    machine.finish(config, out)
    assert outcome(out) == outcome(reference)


def test_told_to_stop_when_its_results_are_written_it_is_complete(
    machine: Machine, unbroken: Unbroken, tmp_path: Path
) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    ended = machine.run(config, out, strike=Strike(signal.SIGTERM, "_finish", path="results.json"))
    assert ended.code == 0, ended.text
    assert outcome(out) == outcome(reference)


def test_a_time_limit(machine: Machine, unbroken: Unbroken, tmp_path: Path) -> None:
    ended = machine.run(machine.config(steps=5000), tmp_path / "long", "--stop-after", "2s")
    assert ended.code == 75, ended.text
    results = json.loads((tmp_path / "long/results.json").read_text())
    assert results["status"] == "interrupted"
    assert results["reason"]["code"] == "stop.time_limit"
    config, reference = unbroken()
    codes = [machine.run(config, tmp_path / "run", "--stop-after", f"{t}s").code for t in (0.5, 0.8)]
    assert set(codes) <= {0, 75}
    if codes[-1] == 75:
        assert machine.run(config, tmp_path / "run").code == 0
    assert outcome(tmp_path / "run") == outcome(reference)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _unwarned(found: dict[str, Any]) -> dict[str, Any]:
    """An outcome without its warnings, which the model card repeats."""
    for part in (found["results"], found["last"]["state"], found["best"]["state"]):
        part.pop("warnings")
    found["model"].pop("README.md")
    return found


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda folder: _flip(folder / "model.safetensors"),
    "a cut file": lambda folder: os.truncate(folder / "optimizer.safetensors", 1000),
    "a missing file": lambda folder: (folder / "state.json").unlink(),
    "no checksums": lambda folder: (folder / "checksums.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_newest_checkpoint_is_reported_and_the_one_before_used(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, damage: str
) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    # Where step 20 is the best so far, the best before it was deleted when it was saved.
    machine.run(config, out, strike=Strike(signal.SIGKILL, path="step-00000021"))
    before, newest = kept(out)[-2:]
    DAMAGES[damage](out / "checkpoints" / newest)
    ended = machine.run(config, out)
    assert ended.code == 0, ended.text
    assert f"resuming after step {int(before.removeprefix('step-'))}\n" in ended.text
    warnings = json.loads((out / "results.json").read_text())["warnings"]
    assert any(f"{newest} is broken" in str(read_notice(warning)) for warning in warnings)
    assert _unwarned(outcome(out)) == _unwarned(outcome(reference))
    assert kept(out) == kept(reference)


def test_no_whole_checkpoint_means_a_new_start(machine: Machine, unbroken: Unbroken, tmp_path: Path) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    machine.run(config, out, strike=Strike(signal.SIGKILL, path="step-00000012"))
    for name in kept(out):
        _flip(out / "checkpoints" / name / "model.safetensors")
    assert machine.run(config, out).code == 0
    warnings = json.loads((out / "results.json").read_text())["warnings"]
    assert "checkpoint.none_whole" in [warning["code"] for warning in warnings]
    assert _unwarned(outcome(out)) == _unwarned(outcome(reference))


def test_a_best_whose_weights_are_gone_is_looked_for_anew(tmp_path: Path) -> None:
    def save(step: int, best: int) -> None:
        state = {"step": step, "best": {"step": best}, "final": {"step": step}}
        checkpoints.save(Checkpoint({"w": torch.ones(2)}, {}, state))

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    save(1, 1)
    save(2, 1)
    assert kept(tmp_path) == ["step-00000001", "step-00000002"]
    index = json.loads((tmp_path / "checkpoints/index.json").read_text())
    assert index == {"last": "step-00000002", "best": "step-00000001"}
    _flip(tmp_path / "checkpoints/step-00000001/model.safetensors")
    found = checkpoints.load_last()
    assert found is not None
    assert found.state["best"] == {"step": 2}
    assert "step-00000001 is broken" in str(checkpoints.problems[0])


@pytest.mark.parametrize(
    ("training", "limit", "lines"),
    [({}, 1 << 20, 10), ({"eval_every": 25, "save_every": 0}, 4000, 1)],
    ids=["in a save", "in a record"],
)
def test_a_full_disk_loses_nothing(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, training: dict[str, Any], limit: int, lines: int
) -> None:
    """The limit on the size of files stands for a full disk: writes fail halfway, at a moment not ours."""
    config, reference = unbroken(**training)
    out = tmp_path / "run"
    running = machine.start(config, out)
    running.wait_for(_wait_for_lines(out, lines))
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (limit, limit))
    ended = running.end()
    assert ended.code == 1, ended.text
    assert "Traceback" not in ended.text
    assert "could not be written" in ended.message
    assert "the last good" in ended.message
    assert json.loads((out / "results.json").read_text())["failure"] == {"kind": "disk"}
    assert not list(out.rglob(".*"))
    for name in kept(out) if training == {} else []:
        read_checkpoint(out / "checkpoints" / name)
    assert machine.run(config, out).code == 0
    assert outcome(out) == outcome(reference)


def test_a_full_disk_while_it_resumes_names_the_last_checkpoint(
    machine: Machine, unbroken: Unbroken, tmp_path: Path
) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    machine.run(config, out, strike=Strike(signal.SIGKILL, path="step-00000027"))
    last = kept(out)[-1]
    assert (out / "metrics.jsonl").stat().st_size > 4000  # which it writes anew when it resumes
    running = machine.start(config, out, strike=Strike(signal.SIGSTOP, below="Checkpoints.clean_up"))
    stat = Path(f"/proc/{running.pid}/stat")
    running.wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (4000, 4000))
    running.send(signal.SIGCONT)
    ended = running.end()
    assert ended.code == 1 and "Traceback" not in ended.text, ended.text
    assert f"the last good checkpoint is {last}; repair it and start again" in ended.message
    assert machine.run(config, out).code == 0
    assert outcome(out) == outcome(reference)


@pytest.mark.parametrize("damage", ["cut", "a line in the middle", "gone"])
def test_lines_lost_from_the_log_are_named_and_the_run_resumes(
    machine: Machine, unbroken: Unbroken, tmp_path: Path, damage: str
) -> None:
    config, reference = unbroken()
    out = tmp_path / "run"
    machine.run(config, out, strike=Strike(signal.SIGKILL, path="step-00000021"))
    log = out / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    resumed = int(kept(out)[-1].removeprefix("step-"))
    before = [json.loads(line)["step"] for line in lines].index(7)
    if damage == "cut":
        log.write_bytes(b"".join(lines[:before]))
    elif damage == "gone":
        log.unlink()
    else:
        lines[before] = b"\xff\x00" + lines[before]
        log.write_bytes(b"".join(lines))
    assert machine.run(config, out).code == 0
    warnings = json.loads((out / "results.json").read_text())["warnings"]
    (said,) = [w["values"] for w in warnings if w["code"] == "training.metrics_lost"]
    assert said["step"] == resumed and said["last"] == (0 if damage == "gone" else 6)
    if damage == "a line in the middle":
        assert said["lost"] == 1
        steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
        assert steps.count(8) == 1 and 7 not in steps  # what comes after the damage is kept
    for name in ("last", "best"):
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert outcome(out)[name][file] == outcome(reference)[name][file]


def test_a_run_that_resumes_with_other_threads_says_so(
    machine: Machine, unbroken: Unbroken, tmp_path: Path
) -> None:
    """Also where it was killed again before it had saved: its steps before were made with the others."""
    config, reference = unbroken()
    out = tmp_path / "run"
    machine.run(config, out, strike=Strike(signal.SIGKILL, path="step-00000012"))
    resumed = int(kept(out)[-1].removeprefix("step-"))
    machine.run(config, out, strike=Strike(signal.SIGKILL, below=SAVE), threads=2)
    assert machine.run(config, out, threads=2).code == 0
    warnings = json.loads((out / "results.json").read_text())["warnings"]
    (said,) = [read_notice(w) for w in warnings if w["code"] == "training.resumed_elsewhere"]
    assert str(said).startswith(f"resumed after step {resumed} with threads 2 (before: 1): the numbers may")
    assert "resumed" not in str(json.loads((reference / "results.json").read_text())["warnings"])


@pytest.mark.parametrize("training", [{}, {"keep": 1}, EARLY], ids=["two", "one", "best-before"])
def test_the_last_k_and_the_best_are_kept(unbroken: Unbroken, training: dict[str, Any]) -> None:
    _, out = unbroken(**training)
    found = outcome(out)
    scores = {
        line["step"]: line["metrics"]["accuracy"] for line in found["metrics"] if line["kind"] == "eval"
    }
    best = max(scores, key=lambda step: (scores[step], -step))
    improved = {s for s, score in scores.items() if all(score > scores[t] for t in scores if t < s)}
    end = found["results"]["steps"]
    saved = sorted({*range(3, end + 1, 3), *improved, end})
    assert kept(out) == sorted({f"step-{s:08d}" for s in (*saved[-training.get("keep", 2) :], best)})
    assert found["index"] == {"last": f"step-{end:08d}", "best": f"step-{best:08d}"}
    assert found["results"]["stopped_early"] == (training == EARLY)
    assert best < end or training != EARLY
