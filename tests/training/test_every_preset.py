"""Every preset is a run like any other: it trains, is killed, resumes exactly, and passes its audit."""

import json
import shutil
import signal

import pytest
import torch
from transformers import BertForSequenceClassification

from oelm.data import open_store
from oelm.inference.trained import Trained
from oelm.method import _PRESETS
from oelm.training.checkpoint import read_checkpoint
from tests.tiny import build
from tests.training.runs import Strike, outcome

FIFTY = {"steps": 50, "save_every": 10, "eval_every": 25, "accumulate": 1}


def killed_and_resumed(machine, folder, method):
    """The folder of a run of 50 steps, killed at the 26th, that ends as the unbroken one does. `lora` is not
    for the reference GPT: it adapts a BERT."""
    config, more = machine.config(**FIFTY), ("--method", method)
    if method == "lora":
        pytest.importorskip("peft")
        sizes = build("bert").config
        sizes.vocab_size, sizes.num_labels = open_store(machine.store).vocab_size, 2
        BertForSequenceClassification(sizes).save_pretrained(folder / "bert")
        shutil.copytree(machine.store / "tokenizer", folder / "bert", dirs_exist_ok=True)
        more += ("--model", str(folder / "bert"))
    ended = machine.run(config, folder / "whole", *more)
    assert ended.code == 0, ended.text
    strike = Strike(signal.SIGKILL, call="PlainStep.take", n=26)
    assert machine.run(config, folder / "killed", *more, strike=strike).code == -signal.SIGKILL
    ended = machine.run(config, folder / "killed", *more)
    assert ended.code == 0 and "resuming after step 25" in ended.text, ended.text
    assert outcome(folder / "killed") == outcome(folder / "whole")
    return folder / "killed"


@pytest.mark.slow
@pytest.mark.parametrize("method", _PRESETS)
def test_fifty_steps(machine, tmp_path, method):
    run = killed_and_resumed(machine, tmp_path, method)
    trained = Trained(run)
    trained.audit()
    parameters = json.loads((run / "results.json").read_text())["parameters"]
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    last = read_checkpoint(run / "checkpoints" / index["last"])
    moments = {key.rpartition("/")[0] for key in last.optimizer}
    # A schedule ends with others than it began with, and what is frozen has no moments.
    trained = parameters.get("stages", [parameters])[-1]["trainable"]
    assert sum(last.model[name].numel() for name in moments) == trained
    for name, value in last.model.items():
        if name.endswith(("learned_scale", "learned_up")):
            assert not torch.equal(value, torch.full_like(value, float("scale" in name))), name
