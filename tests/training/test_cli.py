"""The verbs of a run as a user types them, one after another, on a file of the user's own."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import oelm
from oelm.inference.trained import Trained
from tests.command_line import caller
from tests.training.processes import rows


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    (root / "mine.csv").write_text(rows(300))
    return root


@pytest.fixture
def oelm_cli(world, monkeypatch, capsys):
    """Call the command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(world)
    monkeypatch.setenv("OELM_CACHE_DIR", str(world / "cache"))
    return caller(monkeypatch, capsys)


TRAIN = (
    "train", "--data", "mine.csv", "--method", "oelm", "--lr", "3e-3", "--steps", "60", "--max-length", "48",
    "--tokenizer", "train:300", "--set", "training.eval_every=30",
)  # fmt: skip


@pytest.fixture
def run(oelm_cli, world):
    if not (world / "runs" / "a").exists():
        code, out, err = oelm_cli(*TRAIN, "--out", "runs/a")
        assert code == 0, err
        assert "oelm on mine: test accuracy" in out
        assert "most frequent class: 0.5" in out and out.splitlines()[-3] == "run      runs/a"
    return world / "runs" / "a"


def test_train_leaves_the_promised_folder(run):
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.toml", "metrics.jsonl", "results.json", "timing_stats.json", "freeze_audit.json",
        "environment.json", "predictions.npz", "checkpoints", "lock", "model",
    }  # fmt: skip
    results = json.loads((run / "results.json").read_text())
    promised = {
        "schema", "status", "experiment", "task", "method", "model", "seed", "lr", "parameters", "best",
        "final", "test", "total_time_s", "train_time_s", "steps", "samples", "tokens", "texts_per_s",
        "peak_memory_bytes", "references", "warnings",
    }  # fmt: skip
    assert promised <= set(results)
    assert set(results["parameters"]) == {"total", "trainable", "frozen"}
    assert results["test"]["metrics"]["accuracy"] > 0.9
    assert {"steps_measured", "mean_s", "median_s", "validation_time_s", "test_time_s"} <= set(
        json.loads((run / "timing_stats.json").read_text())
    )
    card = (run / "model" / "README.md").read_text()
    assert "method `oelm`" in card and "65,536 of" in card


def test_the_model_loads_with_plain_transformers(run):
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(run / "model"))
    assert classify("fine lovely great")[0]["label"] == "pos"


def test_predict(oelm_cli, run, world):
    (world / "lines.txt").write_text("fine great\ndull grey weak\n")
    code, out, _ = oelm_cli("predict", run, world / "lines.txt")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [a["label"] for a in answers] == ["pos", "neg"]
    assert all(
        abs(sum(a["scores"].values()) - 1) < 1e-5 and a["score"] == max(a["scores"].values()) for a in answers
    )
    (world / "lines.txt").write_text("fine\n\ndull\n   \n")
    code, out, err = oelm_cli("predict", run, world / "lines.txt")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "2 of 4 lines said nothing" in err and "cut" not in err
    assert [a["label"] for a in answers] == ["pos", None, "neg", None] and answers[1]["scores"] is None


@pytest.mark.parametrize(
    ("bytes_", "labels", "error"),
    [
        (b"\xef\xbb\xbffine great\r\ndull grey", ["pos", "neg"], ""),
        (b"fine great\ncaf\xe9\n", ["pos"], "line 2 is not text in UTF-8"),
        ("fine great".encode("utf-16"), [], "line 1 is not text in UTF-8"),
        (b"", [], ""),
    ],
)
def test_predict_reads_what_files_hold(oelm_cli, run, world, bytes_, labels, error):
    (world / "lines.txt").write_bytes(bytes_)
    code, out, err = oelm_cli("predict", run, world / "lines.txt")
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["label"] for answer in answers] == labels
    assert (code, error in err) == (2 if error else 0, True)
    assert all(answer["text"] in ("fine great", "dull grey") for answer in answers)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_full_disk_is_one_line(run):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "oelm", "predict", str(run)], input="fine\n", stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (
        done.returncode == 1
        and done.stderr == "oelm: no space left on the disk; free some and run the same command again\n"
    )


def test_a_saved_model_reads_as_far_as_its_run_did(run, world):
    by_run, by_model = Trained(run), Trained(run / "model")
    assert by_run.max_length == by_model.max_length == by_run.config.task.max_length < 512
    long = " ".join(["fine", "dull", "grey"] * 300)
    said: list[str] = []
    answers = list(by_run.predict([long, "fine"], said.append))
    assert said == [f"1 of 2 lines were cut: this model reads {by_run.max_length} tokens"]
    assert answers == list(by_model.predict([long, "fine"]))
    assert f"cut at {by_run.max_length} tokens" in (run / "model" / "README.md").read_text()


def test_evaluate_and_audit(oelm_cli, run, tmp_path, monkeypatch):
    monkeypatch.setattr("oelm.system.progress.QUIET_SECONDS", 0.0)
    code, out, err = oelm_cli("evaluate", run, "--split", "validation", "--json")
    assert "validation: batch 0/" in err
    best = json.loads((run / "results.json").read_text())["best"]["metrics"]
    assert code == 0
    assert json.loads(out)["metrics"]["accuracy"] == best["accuracy"]
    table = oelm_cli("evaluate", run, "--split", "validation")[1]
    assert "class  items  precision  recall      F1\nneg " in table and "confusion" not in table
    code, out, _ = oelm_cli("audit", run)
    assert code == 0
    assert "clean. 65,536 parameters in 4 tensors are, bit for bit" in out
    other = Trained(run)
    oelm.release(other.model)
    oelm.convert(other.model, oelm.Method.from_dict({"name": "oelm", "freeze": {"q": "0"}}))
    for part in (other.model, other.tokenizer):
        part.save_pretrained(tmp_path / "one")
    assert "clean. 16,384 parameters in 1 tensor are, bit for bit" in oelm_cli("audit", tmp_path / "one")[1]
    oelm.release(other.model)
    oelm.convert(other.model, "baseline")
    other.model.save_pretrained(tmp_path / "one")
    assert oelm_cli("audit", tmp_path / "one")[1] == (
        f"{tmp_path / 'one'}: clean. Nothing is frozen in the model that was saved\n"
    )


def test_a_narrow_terminal_cuts_nothing(oelm_cli, run, world, monkeypatch):
    long = world / "narrow" / "a-run-with-a-name-that-is-as-long-as-a-whole-line-of-a-terminal"
    shutil.copytree(run, long, ignore=shutil.ignore_patterns("checkpoints", "model"))
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = oelm_cli("status", "narrow")
    assert "completed" in out and "60/60" in out and "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "".join(line.split()[0] for line in out.splitlines()[1:]) == long.name


def test_status_names_a_folder_without_runs_and_the_use_of_the_gpus(oelm_cli, world, monkeypatch):
    (world / "none").mkdir()
    program = world / "programs" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho '0, NVIDIA RTX A5000, 97, 2048, 24564'\necho '1, X, [N/A], 1, 2'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    code, out, _ = oelm_cli("status", "none")
    assert code == 0
    assert out.splitlines() == [
        "no runs in none yet",
        "GPU 0 (NVIDIA RTX A5000): 97 % busy, 2.0 of 24.0 GiB",
    ]


def test_nobody_reading_the_display_ends_no_run(world):
    """`oelm train ... 2>&1 | head -1`: the run goes on to its end."""
    arguments = [*TRAIN, "--set", "training.log_every=1", "--out", "runs/piped"]
    environment = os.environ | {"OELM_CACHE_DIR": str(world / "cache")}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "oelm", *arguments]
    done = subprocess.run(command, cwd=world, env=environment, stdout=write, stderr=write)
    os.close(write)
    assert done.returncode == 0
    assert json.loads((world / "runs" / "piped" / "results.json").read_text())["status"] == "completed"


def test_watching_and_following_without_a_terminal(world, run):
    """--watch prints a line per change, and `logs -f` waits for a run's first line."""
    environment = os.environ | {"OELM_CACHE_DIR": str(world / "cache")}
    python = [sys.executable, "-m", "oelm"]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": world,
        "env": environment,
    }
    with subprocess.Popen([*python, "status", "runs/a", "--watch"], **pipes) as watching:
        assert watching.stdout.readline().split()[:4] == ["a", "completed", "mine", "oelm"]
        watching.terminate()
    with subprocess.Popen([*python, "logs", "runs/soon", "-f"], **pipes) as following:
        assert "waiting for the first step" in following.stderr.readline()
        shutil.copytree(run, world / "runs" / "soon", ignore=shutil.ignore_patterns("checkpoints", "model"))
        out, _ = following.communicate(timeout=60)
    assert out.startswith("step 10/60: loss") and following.returncode == 0


def test_a_gpu_that_is_not_there_is_refused(oelm_cli, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for numbers, problem in (("7", "no such GPU"), ("first", "by number")):
        code, _, err = oelm_cli(*TRAIN, "--gpu", numbers)
        assert code == 2 and problem in err


def test_status_and_logs(oelm_cli, run):
    code, out, _ = oelm_cli("status", "--json")
    (status,) = (s for s in json.loads(out) if s["folder"].endswith("a"))
    assert (code, status["status"], status["step"], status["of"]) == (0, "completed", 60, 60)
    code, out, _ = oelm_cli("status")
    assert "completed" in out and "60/60" in out
    code, out, _ = oelm_cli("logs", run)
    assert out.count("validation loss") == 2
    assert "step 60/60: loss" in out


def test_a_running_run_is_seen_and_stops_when_asked(oelm_cli, run, world):
    """From another process: status says running, a second writer is refused, logs -f follows to the end."""
    words = [w if w != "60" else "100000" for w in TRAIN]
    long, log = [sys.executable, "-m", "oelm"], world / "runs" / "long" / "metrics.jsonl"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*long, *words, "--out", "runs/long"], cwd=world, stderr=pipe, text=True
    ) as process:
        try:
            while not log.exists() or len(log.read_text().splitlines()) < 4:
                assert process.poll() is None, process.communicate()
                time.sleep(0.1)
            (status,) = json.loads(oelm_cli("status", "runs/long", "--json")[1])
            assert status["status"] == "running"
            assert status["of"] == 100000 and status["left_s"] > 0
            code, _, err = oelm_cli(*words, "--out", "runs/long")
            assert code == 2 and "in use by another process" in err
            follow = [*long, "logs", "runs/long", "-f"]
            with subprocess.Popen(follow, cwd=world, stdout=pipe, text=True) as follower:
                assert follower.stdout.readline().startswith("step 10/100000: loss")
                process.terminate()
                follower.communicate(timeout=60)  # ends by itself when the run does
            assert "progress is saved" in process.communicate(timeout=60)[1]
            assert process.returncode == 75
        finally:
            process.kill()
    (status,) = json.loads(oelm_cli("status", "runs/long", "--json")[1])
    assert status["status"] == "interrupted"
    assert "SIGTERM" in status["reason"]
    # It may go on from the same file, whatever that is called from here, and from nothing else.
    elsewhere = [str(world / w) if w == "mine.csv" else w for w in words]
    code, _, err = oelm_cli(*elsewhere, "--out", "runs/long", "--lr", "0.5")
    assert code == 2 and "(training.lr is" in err and "0.5 here" in err  # nothing else was in the way
    (world / "other.csv").write_text(rows(200))
    code, _, err = oelm_cli(*[w.replace("mine", "other") for w in words], "--out", "runs/long")
    assert code == 2 and "(task.data is" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "nowhere"), "nowhere is neither a run nor a saved model"),
        (("audit", "runs"), "runs is neither a run nor a saved model"),
        (("audit", "studied"), f"studied is a study: name one of its runs, below {Path('studied', 'runs')}"),
        (("logs", "runs"), "it is not a run"),
        (("status", "nowhere"), "nowhere: no such folder"),
        (("train",), "name one of task.name"),
        (("train", "--task", "imdb", "--data", "x.csv"), "name one of task.name"),
        (("train", "GPT-99"), "GPT-99"),
        (("train", "--data", "mine.csv", "--method", "olem"), "unknown method 'olem'"),
        (("train", "--data", "mine.csv", "--model", "gpt-huge"), "unknown model 'gpt-huge'"),
        (("train", "--data", "mine.csv", "--stop-after", "soon"), "write 90s, 9m or 2h"),
        (("train", "--data", "mine.csv", "--set", "training.trackers=['nope']"), "unknown tracker 'nope'"),
    ],
)
def test_mistakes(oelm_cli, run, world, words, message):
    (world / "studied").mkdir(exist_ok=True)
    (world / "studied" / "study.toml").touch()
    before = set(world.glob("runs/*"))
    code, _, err = oelm_cli(*words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1 or "note:" in err
    assert set(world.glob("runs/*")) == before, "nothing half-written"


def test_what_cannot_start_does_not_cost_the_run_it_was_to_replace(oelm_cli, run):
    before = (run / "results.json").read_text()
    for setting in ("training.accumulate=999", "training.trackers=['wandb']"):
        code, _, err = oelm_cli(*TRAIN, "--out", run, "--overwrite", "--set", setting)
        assert code == 2, err
        assert (run / "results.json").read_text() == before


def test_a_prepared_store_refuses_what_it_cannot_do(oelm_cli, run, world):
    common = ("--tokenizer", "train:300", "--max-length", "48")
    if not (world / "prepared").exists():
        assert oelm_cli("data", "prepare", "mine.csv", *common, "--out", "prepared")[0] == 0
    start = ("train", "--data", "prepared", "--steps", "2", "--out", "runs/prepared")
    for words, message in (
        (("--train-size", "30"), "prepared is prepared already: train_size comes too late"),
        (("--text", "body", "--label", "topic"), "text and label come too late; leave out here what"),
        (("--text-pair", "b", "--set", "task.split_seed=1"), "text_pair and split_seed come too late"),
        (("--max-length", "8"), "was prepared with max_length 48, not 8"),
        (("--tokenizer", "gpt2"), "was prepared with the tokenizer train:300, not gpt2"),
    ):
        code, _, err = oelm_cli(*start, *words)
        assert code == 2 and message in err
    assert not (world / "runs" / "prepared").exists()
    assert oelm_cli(*start)[0] == 0
    config = world / "runs" / "prepared" / "config.toml"
    assert 'text = "text"\n' in config.read_text()  # every run's config has the defaults
    assert oelm_cli("train", "--config", config, "--out", "runs/again")[0] == 0
    assert "max_length = 48" in config.read_text()


def test_other_data_is_measured_as_other_data(oelm_cli, run, world):
    (world / "other.csv").write_text(rows(100))
    code, out, err = oelm_cli("evaluate", run, "--data", "other.csv", "--json")
    assert code == 0, err
    assert json.loads(out)["items"] == 10
    (world / "unlabelled.csv").write_text("text,other\n" + "a,b\n" * 40)  # no option would help
    code, _, err = oelm_cli("evaluate", run, "--data", "unlabelled.csv")
    assert code == 2 and "has no column 'label'; it has: text, other\n" in err


def test_pairs_stay_pairs_through_a_prepared_store(oelm_cli, world):
    lines = [
        "a,b,label",
        *(f"one {i},{'fine' if i % 2 else 'dull'} {i},{'pos' if i % 2 else 'neg'}" for i in range(80)),
    ]
    (world / "pairs.csv").write_text("\n".join(lines))
    columns = ("--text", "a", "--text-pair", "b", "--tokenizer", "train:300", "--max-length", "32")
    assert oelm_cli("data", "prepare", "pairs.csv", *columns, "--out", "pairs")[0] == 0
    assert oelm_cli("train", "--data", "pairs", "--steps", "2", "--out", "runs/pairs")[0] == 0
    (world / "lines.txt").write_text("one\tfine\n")
    assert oelm_cli("predict", "runs/pairs", "lines.txt")[0] == 0
    for line, fault in (
        ("one fine", "is no tab"),
        ("one\tfine\tday", "are 2 tabs"),
        ("\tfine", "nothing stands before"),
        ("one\t ", "nothing stands after"),
    ):
        (world / "lines.txt").write_text(f"one\tfine\n\n{line}\none\tfine\n")
        code, out, err = oelm_cli("predict", "runs/pairs/model", "lines.txt")
        assert code == 2 and "line 3 is not a pair" in err and fault in err
        assert len(out.splitlines()) == 2  # what comes before is answered


def test_status_shows_runs_that_were_imported(oelm_cli, run, world):
    imported = world / "imported" / "runs" / "b"
    shutil.copytree(run, imported, ignore=shutil.ignore_patterns("model", "lock", "checkpoints"))
    shutil.copytree(imported, imported.with_name(".b.part"))  # one that is still being copied
    (status,) = json.loads(oelm_cli("status", "imported", "--json")[1])
    assert (status["folder"], status["status"], status["step"]) == ("imported/runs/b", "completed", 60)
    assert not (imported / "lock").exists()


def test_an_audit_that_fails_names_what_was_changed(oelm_cli, run, world):
    tampered = world / "tampered"
    shutil.copytree(run, tampered)
    weights = load_file(tampered / "model" / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[name][0] *= 1.5
    save_file(weights, tampered / "model" / "model.safetensors", metadata={"format": "pt"})
    code, out, err = oelm_cli("audit", tampered)
    path = name.removeprefix("transformer.").removesuffix(".weight")
    assert (code, out) == (1, "")
    assert "tampered: the audit failed, it found 2 problem(s):\n" in err
    assert f"{path}.weight: not the weight that was frozen" in err and "deviates from orthonormal" in err
    code, out, _ = oelm_cli("audit", tampered, "--json")
    assert code == 1
    assert len(json.loads(out)["problems"]) == 2
    code, _, err = oelm_cli("predict", tampered, world / "mine.csv")
    assert code == 1 and "not the weight that was frozen" in err


def test_a_completed_run_whose_model_was_not_kept(oelm_cli, run, world):
    shutil.copytree(run, world / "bare", ignore=shutil.ignore_patterns("model"))
    for verb in ("audit", "evaluate", "predict"):
        code, _, err = oelm_cli(verb, "bare")
        assert code == 2
        assert "bare is completed, but its model was not kept: study.models" in err
    config = world / "bare" / "config.toml"
    config.write_text(config.read_text().replace("\ntest = true", "\ntest = false"))
    assert "with training.test = false" in oelm_cli("audit", "bare")[2]
    (world / "bare" / "results.json").write_text('{"status": "failed"}')
    assert "bare is a run that failed" in oelm_cli("audit", "bare")[2]
    (world / "bare" / "results.json").unlink()
    assert "bare has not finished: it holds no model yet" in oelm_cli("audit", "bare")[2]


def test_damage_is_told_in_one_line(oelm_cli, run, world):
    shutil.copytree(run, world / "runs" / "damaged", dirs_exist_ok=True)
    damaged = world / "runs" / "damaged"
    (damaged / "results.json").write_text("{")
    (damaged / "model" / "model.safetensors").write_bytes(b"no tensors")
    states = {s["folder"]: s["status"] for s in json.loads(oelm_cli("status", "runs", "--json")[1])}
    assert states["runs/damaged"] == "unreadable"
    assert states["runs/a"] == "completed"
    code, _, err = oelm_cli("audit", "runs/damaged")
    assert code == 2 and "cannot be loaded" in err
    code, _, err = oelm_cli("generate", run, "x", "--tokens", "-5")
    assert code == 2 and "must be at least 1" in err
    assert oelm_cli("generate", run, "x", "--temperature", "nan")[0] == 2
    code, _, err = oelm_cli("generate", run, "x", "--seed", 10**22)
    assert code == 2 and "--seed 10000000000000000000000 has 23 digits, which is too large" in err
    code, _, err = oelm_cli("generate", run, os.fsdecode(b"\xff\xfe"))
    assert code == 2 and "UTF-8" in err
    shutil.rmtree(damaged)
