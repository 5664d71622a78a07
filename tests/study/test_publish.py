"""Published records: a few KB a run, without anybody's paths, and the same report."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.config import read_toml, to_toml
from oelm.errors import UserError
from oelm.study.analysis import analyse
from oelm.study.publish import publish
from oelm.study.records import cut_path, find_records
from oelm.study.report import as_plain
from oelm.system.files import write_json, write_text
from oelm.training.predictions import write_predictions
from tests.command_line import caller
from tests.study.report_folders import copy_run, make_study, settle

RESULTS = Path(__file__).parents[2] / "results"


def _plain(folder: Path) -> dict[str, Any]:
    return as_plain(analyse(folder))


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every run below."""
    runs = [path.parent for path in folder.rglob("results.json")]
    return {str(run): sum(path.stat().st_size for path in run.iterdir()) for run in runs}


@pytest.mark.parametrize("name", ["demo", "minilm-sst2", "ptb-pos"])
def test_our_own_records_published_give_the_same_report(name: str, tmp_path: Path) -> None:
    done = publish(RESULTS / name, tmp_path / name)
    assert _plain(tmp_path / name) == _plain(RESULTS / name)
    assert done.bytes == sum(path.stat().st_size for path in (tmp_path / name).rglob("*.*") if path.is_file())
    assert max(_sizes(tmp_path / name).values()) < 16_000


def test_a_study_of_25000_items(tmp_path: Path) -> None:
    source = make_study(tmp_path / "s", items=25_000, title="t")
    publish(source, tmp_path / "p")
    found, expected = _plain(tmp_path / "p"), _plain(source)
    assert found == expected and found["comparisons"][0]["overall"]["items"] == 25_000
    runs = [*(tmp_path / "p").rglob("predictions.npz")]
    assert len(runs) == 10 and max(path.stat().st_size for path in runs) < 8_000
    assert max(_sizes(tmp_path / "p").values()) < 12_000
    (shared,) = (tmp_path / "p").glob("items-*.npz")
    assert shared.name.startswith("items-imdb-")
    publish(tmp_path / "p", tmp_path / "again")  # what is published can be published
    assert _plain(tmp_path / "again") == expected


def test_a_language_model_keeps_its_nats(tmp_path: Path) -> None:
    for method in ("baseline", "oelm"):
        run = tmp_path / "ours" / "s" / method  # runs without a study are called after their folder
        copy_run(run, method, "wikitext-2", 1e-3, 1, 30.0, metric="perplexity", results={"schema": 3})
        nats = np.random.default_rng(len(method)).normal(1700, 90, size=480)
        items = {"ids": np.arange(480), "groups": np.arange(480) // 8, "tokens": np.full(480, 512)}
        write_predictions(run, {**items, "scores": nats})
    source, to = tmp_path / "ours" / "s", tmp_path / "theirs" / "s"
    publish(source, to)
    for ours, theirs in zip(find_records(source), find_records(to), strict=True):
        before, after = ours.predictions(), theirs.predictions()
        assert before is not None and after is not None and before.keys() == after.keys()
        assert all(before[name].tobytes() == after[name].tobytes() for name in before)
        assert (theirs.folder / "predictions.npz").stat().st_size < 3_000
    found = _plain(to)
    assert found == _plain(source)
    assert not any(warning["kind"] == "version" for warning in found["warnings"])


def _with_paths(source: Path, home: Path) -> None:
    """The study as one of a user's own file and model."""
    for path in [source / "study.toml", *(source / "runs").rglob("config.toml")]:
        values = read_toml(path)
        values["task"] = {"data": str(home / "my.csv"), "tokenizer": str(home / "words"), "max_length": 512}
        values["task"] |= {"test_file": "elsewhere/test.csv", "data_dir": str(home)}
        values["model"] = {"name": str(home / "bert")}
        if path.name == "study.toml":
            values["study"]["tasks"] = []
        write_text(path, to_toml(values))
    for path in (source / "runs").rglob("results.json"):
        results = json.loads(path.read_text()) | {"task": "my", "model": str(home / "bert")}
        write_json(path, results | {"warnings": [f"the model in {home / 'bert'} is small"]})
    settle(source)


def test_paths_are_cut_to_names(tmp_path: Path) -> None:
    source = make_study(tmp_path / "home" / "s", items=50, title="t")
    _with_paths(source, tmp_path / "home")
    failed = next((source / "runs").rglob("choice-*"))
    reason = f"no room in {source.resolve() / 'runs'}"
    results = json.loads((failed / "results.json").read_text()) | {"status": "failed", "reason": reason}
    write_json(failed / "results.json", results)
    publish(source, tmp_path / "p")
    for path in (tmp_path / "p").rglob("*.*"):
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes(), path
    found, expected = _plain(tmp_path / "p"), _plain(source)
    assert found["settings"][0]["model"] == "bert"
    texts = json.dumps(expected).replace(f"{tmp_path / 'home'}/", "")
    assert found == json.loads(texts)
    task = {"data": "my.csv", "tokenizer": "words", "max_length": 512, "test_file": "test.csv"}
    assert read_toml(tmp_path / "p" / "study.toml")["task"] == task


def test_runs_that_only_a_path_tells_apart_are_not_mixed(tmp_path: Path) -> None:
    for place in ("a", "b"):
        run = tmp_path / "s" / place
        copy_run(run, "oelm", "imdb", 1e-3, 1, 0.8)
        values = read_toml(run / "config.toml") | {"model": {"name": f"/models/{place}/bert"}}
        write_text(run / "config.toml", to_toml(values))
    with pytest.raises(UserError, match="differ only in the folder of their model"):
        publish(tmp_path / "s", tmp_path / "p")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]  # nothing is left behind


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("bert-base", "bert-base"), ("google/bert", "google/bert"), ("train:8192", "train:8192"),
        ("/a/b/bert", "bert"), ("../b/bert/", "bert"), ("~/bert", "bert"), ("models/mine", "mine"),
    ],
)  # fmt: skip
def test_what_is_a_path(name: str, cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert cut_path(name) == cut


def test_evaluations_stay_and_training_lines_are_thinned(tmp_path: Path) -> None:
    copy_run(tmp_path / "s", "oelm", "imdb", 1e-3, 1, 0.8)
    lines = [{"kind": "eval", "step": 1000, "epoch": 1.0, "metrics": {"accuracy": 0.1 + 0.2}}]
    lines += [{"kind": "train", "step": i, "loss": 1 / 3, "samples": i} for i in range(1, 1001)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "s" / "metrics.jsonl").write_text(text + '{"kind": "tra')
    publish(tmp_path / "s", tmp_path / "p")
    kept = [json.loads(line) for line in (tmp_path / "p" / "metrics.jsonl").read_text().splitlines()]
    assert kept[0] == lines[0]
    assert len(kept) == 60 and kept[1] == {"kind": "train", "step": 20, "loss": 0.333333}
    assert kept[-10:] == [{"kind": "train", "step": i, "loss": 1 / 3} for i in range(991, 1001)]  # exact
    publish(tmp_path / "p", tmp_path / "again")  # records that go on from a repository lose nothing
    once, again = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("p", "again"))
    assert again == once
    audit = json.loads((tmp_path / "p" / "freeze_audit.json").read_text())
    assert audit["passed"] and audit["frozen_tensors"] == 12 and "fingerprint" not in audit


def test_refusals_and_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    oelm = caller(monkeypatch, capsys)
    source = make_study(tmp_path / "s", lrs=(3e-4,), seeds=2)
    code, out, _ = oelm("report", source, "--publish", tmp_path / "p")
    assert code == 0 and "6 runs" in out and "gives the same numbers" in out
    code, out, err = oelm("report", source, "--publish", tmp_path / "p")
    assert code == 2 and "exists already; name a new folder" in out + err
    torn = next((source / "runs").rglob("results.json"))
    torn.write_text("{")
    code, out, _ = oelm("report", source, "--publish", tmp_path / "q", "--json")
    told = json.loads(out)
    assert code == 0 and told["runs"] == 5 and told["left_out"][0]["values"]["path"] == str(torn)
    shutil.rmtree(source / "runs")
    code, out, err = oelm("report", source, "--publish", source / "p")
    assert code == 2 and "would count its runs twice" in out + err
    for folder, said in ((source, "holds no run that has ended"), (tmp_path / "no", "no such folder")):
        code, out, err = oelm("report", folder, "--publish", tmp_path / "r")
        assert code == 2 and said in out + err
    assert not (tmp_path / "r").exists() and not list(tmp_path.glob(".*"))
