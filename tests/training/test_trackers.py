"""Trackers hear what metrics.jsonl gets. The one here is of Accelerate's kind and keeps everything."""

import json

import pytest
from accelerate import tracking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import oelm
from oelm.config import make_config
from oelm.data import Choice
from oelm.errors import UserError
from oelm.study.conduct import conduct, prepare_settings
from oelm.study.design import make_study
from oelm.training.loop import train
from tests.training.processes import config, rows


class Recorder(tracking.GeneralTracker):
    name, requires_logging_directory = "recorder", False
    heard: list = []

    def __init__(self, run_name):
        super().__init__()
        self.heard.append(("new", run_name))

    @property
    def tracker(self):
        return self

    def start(self):
        self.heard.append(("start", None))

    def store_init_configuration(self, values):
        self.heard.append(("config", values))

    def log(self, values, step):
        self.heard.append((step, values))

    def finish(self):
        self.heard.append(("finish", None))


class Broken(Recorder):
    name = "broken"

    def start(self):
        raise RuntimeError("no key is configured\nmore on that")


class Lost(Recorder):
    name = "lost"

    def finish(self):
        raise RuntimeError("the server is gone")


@pytest.fixture
def known(monkeypatch):
    for kind in (Recorder, Broken, Lost):
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, kind.name, kind)
    monkeypatch.setattr(Recorder, "heard", [])


def texts_store(folder):
    (folder / "texts.csv").write_text(rows(120))
    return Choice(str(folder / "texts.csv"), tokenizer="train:300", max_length=64).store(
        cache=folder / "cache"
    )


def test_one_that_cannot_start_is_told_in_one_line_and_leaves_no_other_open(tmp_path, known):
    store = texts_store(tmp_path)
    asked = make_config(config(steps=2, trackers=["recorder", "broken"]))
    with pytest.raises(UserError, match=r"^tracker 'broken' cannot be started: no key is configured$"):
        train(asked, store, tmp_path / "run", show=False)
    assert Recorder.heard[-1] == ("finish", None)


def test_one_that_cannot_be_closed_takes_nothing_from_a_run(tmp_path, known, monkeypatch, capsys):
    store = texts_store(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    asked = make_config(config(steps=2, trackers=["lost", "recorder"]))
    assert train(asked, store, ".")["status"] == "completed"
    assert "note: tracker 'lost' was not closed: the server is gone" in capsys.readouterr().err
    assert Recorder.heard[0] == ("new", "here") and Recorder.heard[-1] == ("finish", None)
    assert train(asked, store, ".", overwrite=True, show=False)["status"] == "completed"  # it is unlocked


def test_a_study_asks_for_a_missing_one_before_its_data_and_its_runs(tmp_path):
    values = {"study": {"methods": ["oelm", "baseline"]}, "task": {"data": str(tmp_path / "no-data")}}
    with pytest.raises(UserError, match="unknown tracker 'nope'"):
        conduct(make_study(values | {"training": {"trackers": ["nope"]}}), tmp_path / "s", None, print)
    assert not (tmp_path / "s").exists()


def test_a_study_whose_records_are_only_imported_needs_no_tracker(tmp_path):
    store = texts_store(tmp_path)
    values = {"study": {"methods": ["oelm", "baseline"]}, "task": {"data": str(store.folder)}}
    values |= {"model": {"name": "gpt-tiny"}, "training": {"trackers": ["nope"], "steps": 1}}
    assert prepare_settings(make_study(values))


def test_tensorboard_has_what_the_log_has(tmp_path):
    (tmp_path / "texts.csv").write_text(rows(120))
    small = {"model": "gpt-tiny", "tokenizer": "train:300", "max_length": 32, "steps": 4, "show": False}
    run = oelm.train(
        data=tmp_path / "texts.csv", **small, out=tmp_path / "run", tracker="tensorboard",
        set={"training.log_every": 1},
    )  # fmt: skip
    found = EventAccumulator(str(tmp_path / "run" / "run")).Reload().Scalars("loss")
    log = run.to_pandas().query("kind == 'train'")
    assert [entry.step for entry in found] == log["step"].tolist()
    assert [entry.value for entry in found] == pytest.approx(log["loss"].tolist())


def test_a_tracker_hears_everything(tmp_path, known):
    store = texts_store(tmp_path)
    train(
        make_config(config(steps=4, eval_every=2, trackers=["recorder"])), store, tmp_path / "run", show=False
    )
    kinds = [kind for kind, _ in Recorder.heard]
    assert kinds[:3] == ["new", "start", "config"]
    assert kinds[-1] == "finish"
    assert Recorder.heard[2][1]["training.lr"] == "0.001"
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    heard = [(step, values) for step, values in Recorder.heard if isinstance(step, int)]
    assert [step for step, _ in heard] == [line["step"] for line in written]
    for (_, values), line in zip(heard, written, strict=True):
        if line["kind"] == "train":
            assert values["loss"] == line["loss"]
        else:
            assert values["validation/accuracy"] == line["metrics"]["accuracy"]
