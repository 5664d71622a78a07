"""The resolved recipes of the published experiments, as they were before the package was restructured.

recipes.json was written by commit 7730626: per experiment every value that decides its result; configs,
methods and tasks are those of 3e4480c, where the restructuring was decided. `schedule` and `first_batch` are
those of a made dataset, as the real ones are too large for a test. A deliberate change of a recipe changes
the file by hand, with the reason in the commit. Since then only this was changed: the eight rows that chose
on test hold nothing out (`hold_out`, which stands where it is false, as in an identity).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oelm.bench.load import made_texts
from oelm.config import resolve_config
from oelm.data.catalogue import TASKS
from oelm.data.tasks import make_objective
from oelm.method import Method
from oelm.models.gpt_config import gpt_config
from oelm.models.gpt_sizes import PRESETS
from oelm.study.catalogue import experiment_config, list_experiments
from oelm.study.records import identify
from oelm.training.resolve import choice_of, resolve_run
from oelm.training.schedule import learning_rate

KNOWN = Path(__file__).with_name("recipes.json")
SHAPE = ("num_layers", "d_model", "num_heads", "d_ff", "max_position_embeddings", "positions", "pooling",
         "layer_norm_eps", "tie_word_embeddings", "vocab_size")  # fmt: skip
TASK = ("kind", "hub", "columns", "metric", "labels", "train", "validation", "test", "held_out",
        "drop_unlabelled", "group", "separate", "train_on")  # fmt: skip
LENGTHS = np.arange(10_001) % 128 + 1  # tokens of the texts of the made dataset


def recipe(id: str) -> dict[str, Any]:
    config = resolve_config(experiment_config(id).to_dict(), None, {}, [])
    name, length = str(config.model.name), config.task.max_length
    texts = made_texts("made", LENGTHS, 100, length)
    runs = {
        kind: resolve_run(config, make_objective(texts, 0), torch.device(kind)) for kind in ("cpu", "cuda")
    }
    run = runs["cpu"]
    warmup, total = run.warmup_steps, run.total_steps
    shape = gpt_config(name).to_dict() if name in PRESETS else {}
    return {
        "config": run.config.identity(),
        "method": Method.from_dict(config.method.overrides()).to_dict(),
        "shape": {key: shape[key] for key in SHAPE if shape},
        "data": {
            key: value
            for key, value in asdict(choice_of(config.task, name)).items()
            if value is not None and (key, value) != ("hold_out", True)
        },
        "task": {key: value for key, value in asdict(TASKS[str(config.task.name)]).items() if key in TASK},
        "precision": {kind: run.precision for kind, run in runs.items()},
        "identity": {kind: identify(r.config, "data", r.precision, 3).key for kind, r in runs.items()},
        "schedule": {
            "steps": total,
            "warmup_steps": warmup,
            "learning_rates": [learning_rate(run, step) for step in (0, warmup, total // 2, total - 1)],
        },
        "first_batch": run.plan.epoch(0).batch(0).tolist(),
    }


@pytest.mark.parametrize("id", [experiment.id for experiment in list_experiments()])
def test_a_published_recipe_is_what_it_was(id, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    assert json.loads(json.dumps(recipe(id))) == json.loads(KNOWN.read_text())[id]


def test_all_22_are_known():
    assert set(json.loads(KNOWN.read_text())) == {experiment.id for experiment in list_experiments()}
