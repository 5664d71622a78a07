"""Trackers hear what metrics.jsonl gets. The one here is of Accelerate's kind and keeps everything."""

import json

import pytest
from accelerate import tracking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import oelm
from oelm.config import make_config
from oelm.data import Choice
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


def test_a_tracker_hears_everything(tmp_path, monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "recorder", Recorder)
    (tmp_path / "texts.csv").write_text(rows(120))
    store = Choice(str(tmp_path / "texts.csv"), tokenizer="train:300", max_length=64).store(
        cache=tmp_path / "cache"
    )
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
