"""`oelm experiments --check`: every published experiment runs as published; what differs is named."""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.data.tokenizer import load_tokenizer
from oelm.method import get_method
from oelm.study.catalogue import experiment_config, get_experiment, list_experiments
from oelm.study.check import check_experiments, published_steps, render_table
from oelm.study.stand_ins import VOCABULARY, StandIns

KINDS = ("GPT-02", "IMDB-oelm", "XNLI-02")  # a language model, a classifier, a pretrained model
FP16 = {"training.precision": {"published": "fp16", "here": "fp32"}}  # which a CPU cannot do
FROZEN = {"gpt-medium-512": 65_536, "bert-base-uncased": 16_640}  # Q and K of the small model in its place


@pytest.fixture(autouse=True)
def nothing_at_hand(monkeypatch, tmp_path):
    """Without real data and tokenizers, and with temporary files where a test can look for them."""
    for name in ("OELM_DATA_DIR", "OELM_TOKENIZER_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def assert_as_published(entry):
    """One shrunken experiment's entry of the record."""
    config = experiment_config(entry["id"])
    assert (entry["status"], entry["problem"]) == ("ok", None)
    assert entry["differences"] == (FP16 if config.training.precision == "fp16" else {})
    assert entry["same_learning_rates"]
    assert entry["best"]["split"] == config.training.choose_on
    frozen = FROZEN[config.model.name] if get_method(config.method.name).freeze else 0
    assert entry["parameters"]["frozen"] == entry["audit"]["frozen_parameters"] == frozen
    assert entry["stand_ins"]["task.data_dir"] == "made-up"
    assert entry["seconds_per_step"] > 0


def test_one_of_each_kind_shrunken_and_the_table_of_its_record(tmp_path):
    file = tmp_path / "check.json"
    done = CliRunner().invoke(
        app, ["experiments", "--check", *KINDS, "--shrink", "--steps", "2", "--record", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [[id, "ok:"] for id in KINDS]
    assert "training.precision is fp32, published fp16" in done.stdout
    record = json.loads(file.read_text())
    assert record["command"] == f"oelm experiments --check {' '.join(KINDS)} --steps 2 --shrink"
    assert record["environment"]["device"] == "cpu"
    assert [entry["id"] for entry in record["experiments"]] == list(KINDS)
    for entry in record["experiments"]:
        assert_as_published(entry)
    table = CliRunner().invoke(app, ["experiments", "--read", str(file)]).stdout.splitlines()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table if row.startswith("|")]
    assert [row[0] for row in rows] == ["ID", "---", *KINDS]
    assert {len(row) for row in rows} == {8}
    assert rows[2][1] == "4h32m" and rows[4][-1].endswith("shrunk")
    assert not list((tmp_path / "temporary").iterdir())
    assert os.environ["OELM_CACHE_DIR"] == str(tmp_path / "cache") and not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_all_experiments_shrunken():
    record = check_experiments(list_experiments(), steps=2, shrink=True)
    assert len(record["experiments"]) == 22
    assert record["command"] == "oelm experiments --check --steps 2 --shrink"
    for entry in record["experiments"]:
        assert_as_published(entry)


def test_a_recipe_that_the_run_does_not_follow_is_named():
    experiment = get_experiment("SST2-01")
    training = experiment.config["training"] | {"lr": 0.5, "betas": [0.5, 0.999]}
    changed = replace(experiment, config=experiment.config | {"training": training})
    said: list[str] = []
    (entry,) = check_experiments([changed], steps=1, shrink=True, say=said.append)["experiments"]
    assert entry["differences"] == {
        "training.lr": {"published": 0.5, "here": 2e-5},
        "training.betas": {"published": [0.5, 0.999], "here": [0.9, 0.999]},
    }
    assert "training.lr is 2e-05, published 0.5" in said[0]


def test_one_that_fails_does_not_stop_the_others(tmp_path):
    (tmp_path / "data" / "imdb").mkdir(parents=True)
    for split in ("train", "test"):
        (tmp_path / "data" / "imdb" / f"{split}.parquet").write_text("not Parquet")
    arguments = ["--shrink", "--steps", "1", "--data-dir", str(tmp_path / "data"), "--json"]
    done = CliRunner().invoke(app, ["experiments", "--check", "IMDB-oelm", "SST2-02", *arguments])
    assert done.exit_code == 1
    failed, other = json.loads(done.stdout)["experiments"]
    assert failed["status"] == "failed" and "imdb" in str(failed["problem"])
    assert other["status"] == "ok"
    assert done.stderr.splitlines()[0].startswith("IMDB-oelm         FAILED: ")


def test_real_data_is_used_where_it_is(data_dir, tmp_path):
    stand_ins = StandIns(tmp_path, data_dir, steps=1, shrink=True)
    config, replaced = stand_ins.fit(experiment_config("XNLI-GPT-oelm"))
    assert replaced["task.data_dir"] == "real"
    assert {path.name for path in (tmp_path / "data" / "xnli").iterdir()} >= {"mnli", "xnli"}
    assert config.task.train_on == "mnli"


@pytest.mark.parametrize("id", ["IMDB-oelm", "SST2-02"])
def test_a_tokenizer_in_place_of_another_has_its_vocabulary_size(id, tmp_path):
    config, _ = StandIns(tmp_path, None, steps=1, shrink=True).fit(experiment_config(id))
    tokenizer = load_tokenizer(str(config.task.tokenizer))
    assert len(tokenizer) == VOCABULARY[str(experiment_config(id).task.tokenizer)]


def test_the_steps_of_a_run_in_epochs_are_the_published_ones():
    counted = {e.id: published_steps(e) for e in list_experiments() if "steps" in e.published}
    assert counted == {"SST2-01": 6_315, "SST2-02": 6_315, "XNLI-01": 73_632, "XNLI-02": 73_632}


def test_options_of_the_check_need_it(tmp_path):
    done = CliRunner().invoke(app, ["experiments", "--shrink"])
    assert "belong to --check" in str(done.exception)
    (tmp_path / "other.json").write_text("{}")
    done = CliRunner().invoke(app, ["experiments", "--read", str(tmp_path / "other.json")])
    assert "other.json is not a record" in str(done.exception)


def test_the_table_in_the_docs_is_that_of_the_record() -> None:
    root = Path(__file__).parents[2]
    file = root / "benchmarks" / "h200-experiments.json"
    record = json.loads(file.read_text())
    assert [entry["status"] for entry in record["experiments"]] == ["ok"] * 22
    assert record["steps"] >= 200 and not record["shrunk"]
    page = (root / "docs" / "reports.md").read_text(encoding="utf-8")
    assert " ".join(render_table(record, file).split()) in " ".join(page.split())
