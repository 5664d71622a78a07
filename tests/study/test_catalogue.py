"""The catalogue against the published table, written here a second time and independently of the files."""

import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel
from typer.testing import CliRunner

from oelm.cli.experiments import _print_table, _render
from oelm.cli.main import app
from oelm.config import ModelConfig
from oelm.data.catalogue import TASKS
from oelm.errors import UserError
from oelm.method import get_method
from oelm.models.gpt import OelmGPTForCausalLM, OelmGPTForSequenceClassification
from oelm.models.gpt_config import gpt_config
from oelm.study.catalogue import (
    differences,
    experiment_config,
    get_experiment,
    list_experiments,
    shared_figures,
)
from tests.study.report_folders import copy_run

ROOT = Path(__file__).parents[2]
GPT, BERT = "gpt-medium-512", "bert-base-uncased"


def hours(h: int, m: int = 0, s: int = 0) -> int:
    return 3600 * h + 60 * m + s


def timing(*seconds: float) -> dict[str, float]:
    """The seconds per step of a timing_stats.json."""
    names = ("mean", "std", "median", "min", "max", "p95", "p99")
    return {f"{name}_seconds_per_step": value for name, value in zip(names, seconds, strict=True)}


# ID: task, model, method, learning rate, length of the run, published figures in percent, PPL, loss, seconds.
# fmt: off
ROWS: dict[str, tuple[str, str, str, float, int, dict[str, float]]] = {
    "M512-GPT": ("tinystories", GPT, "baseline", 5e-4, 100_000,
                 {"perplexity": 4.14, "loss": 1.4215, "best_loss": 1.4215, "last_training_loss": 1.4600,
                  "time_s": hours(6, 30), "checkpoint_mb": 514,
                  "perplexity_per_parameter": 9.22e-8, "perplexity_per_hour": 0.637}),
    "M512-OELM": ("tinystories", GPT, "oelm-global-trainable", 5e-4, 100_000,
                  {"perplexity": 4.66, "loss": 1.5389, "best_loss": 1.5389, "last_training_loss": 1.5946,
                   "time_s": hours(5), "relative_speed": 0.29, "checkpoint_mb": 490,
                   "perplexity_per_parameter": 1.12e-7, "perplexity_per_hour": 0.932}),
    "M512-OELM-frozen": ("tinystories", GPT, "oelm-global", 5e-4, 100_000,
                         {"perplexity": 4.94, "loss": 1.5971, "best_loss": 1.5971,
                          "last_training_loss": 1.6755, "checkpoint_mb": 490}),
    "GPT-01": ("tinystories", GPT, "baseline", 3e-4, 100_000,
               {"perplexity": 4.27, "loss": 1.4516, "best_loss": 1.4514286, "time_s": hours(4, 31, 27),
                "seconds_per_step": 0.184, "steps_measured": 99_899, "validation_time_s": 7268.8,
                "validations": 99, "checkpoint_mb": 514,
                **timing(0.0836594, 0.0303154, 0.0622322, 0.0557398, 0.1869414, 0.1479120, 0.1741810)}),
    "GPT-02": ("tinystories", GPT, "oelm", 1e-3, 100_000,
               {"perplexity": 4.69, "loss": 1.5456, "time_s": hours(4, 32, 46), "seconds_per_step": 0.184,
                "mean_seconds_per_step": 0.083535, "validation_time_s": 7393, "checkpoint_mb": 490}),
    "GPT-03": ("tinystories", GPT, "oelm-random", 1e-3, 100_000,
               {"perplexity": 4.97, "loss": 1.6038, "best_loss": 1.6037630, "time_s": hours(4, 15, 18),
                "seconds_per_step": 0.184, "steps_measured": 99_899, "validation_time_s": 7021.4,
                "validations": 99, "checkpoint_mb": 490,
                **timing(0.0768998, 0.0248614, 0.0622793, 0.0563219, 0.1867454, 0.1318567, 0.1649102)}),
    "GPT-04": ("openwebtext", GPT, "baseline", 3e-4, 100_000,
               {"perplexity": 47.24, "loss": 3.855, "best_loss": 3.8553374, "time_s": hours(9, 10, 18),
                "seconds_per_step": 0.184, "steps_measured": 149_899, "validation_time_s": 4848.7,
                "validations": 149,
                **timing(0.1836593, 0.0561986, 0.1673197, 0.0573537, 0.3683894, 0.2840400, 0.3275398)}),
    "GPT-05": ("openwebtext", GPT, "oelm", 1e-3, 100_000,
               {"perplexity": 54.29, "loss": 3.994, "best_loss": 3.9944218, "time_s": hours(9, 8, 46),
                "relative_time": -0.004, "seconds_per_step": 0.184, "steps_measured": 149_899,
                "validation_time_s": 4707.5, "validations": 149,
                **timing(0.1840975, 0.0529620, 0.1695027, 0.0591595, 0.3834020, 0.2815625, 0.3244827)}),
    "GPT-06": ("wikitext-103", GPT, "baseline", 3e-4, 200_000,
               {"perplexity": 25.13, "loss": 3.224, "best_loss": 3.224, "time_s": hours(3, 49, 35),
                "seconds_per_step": 0.06168, "median_seconds_per_step": 0.06169, "steps_measured": 199_899,
                "validation_time_s": 586.9}),
    "GPT-07": ("wikitext-103", GPT, "oelm", 1e-3, 200_000,
               {"perplexity": 29.03, "loss": 3.368, "best_loss": 3.368, "time_s": hours(3, 47, 29),
                "relative_time": -0.009, "seconds_per_step": 0.06123, "median_seconds_per_step": 0.06125,
                "steps_measured": 199_899, "validation_time_s": 591.1}),
    "IMDB-baseline": ("imdb", GPT, "baseline", 3e-4, 3,
                      {"best": 78.56, "final": 69.368, "loss": 0.639, "time_s": hours(0, 22, 51)}),
    "IMDB-oelm": ("imdb", GPT, "oelm", 1e-3, 3,
                  {"best": 85.70, "final": 85.70, "loss": 0.405, "time_s": hours(0, 22, 1),
                   "relative_time": -0.036}),
    "AGNews-baseline": ("ag_news", GPT, "baseline", 3e-4, 3,
                        {"best": 87.05, "final": 82.49, "loss": 0.512, "time_s": hours(1, 19, 12)}),
    "AGNews-oelm": ("ag_news", GPT, "oelm", 1e-3, 3,
                    {"best": 92.74, "final": 92.09, "loss": 0.266, "time_s": hours(1, 14, 41),
                     "relative_time": -0.057}),
    "XNLI-GPT-baseline": ("xnli", GPT, "baseline", 3e-4, 2,
                          {"best": 46.39, "final": 44.90, "loss": 1.035, "time_s": hours(3, 12, 59)}),
    "XNLI-GPT-oelm": ("xnli", GPT, "oelm", 1e-3, 2,
                      {"best": 57.99, "final": 57.99, "loss": 0.902, "time_s": hours(2, 32, 22),
                       "relative_time": -0.21}),
    "XNLI-01": ("xnli", BERT, "random-trainable", 2e-5, 3,
                {"best": 76.71, "loss": 0.523, "epochs_to_converge": 2.5, "steps": 73_632, "time_s": 11_971,
                 "wall_time_s": hours(3, 48), "seconds_per_step": 0.162}),
    "XNLI-02": ("xnli", BERT, "oelm", 1e-4, 3,
                {"best": 77.79, "loss": 0.498, "epochs_to_converge": 2.0, "steps": 73_632, "time_s": 5_138,
                 "relative_time": -0.571, "wall_time_s": hours(4, 2), "seconds_per_step": 0.069}),
    "SST2-01": ("sst2", BERT, "baseline", 2e-5, 3,
                {"best": 93.12, "best_f1": 0.9389, "loss": 0.2518, "steps": 6_315, "time_s": hours(0, 29, 45),
                 "seconds_per_step": 0.284, "interleaved_seconds_per_step": 0.3218,
                 "interleaved_training_time_s": 2000.1, "interleaved_wall_time_s": 2116.7,
                 "checkpoint_mb": 1140}),
    "SST2-02": ("sst2", BERT, "oelm", 1e-4, 3,
                {"best": 91.28, "best_f1": 0.9159, "loss": 0.3152, "last_training_loss": 0.0054,
                 "steps": 6_315, "time_s": hours(0, 35, 48), "relative_time": -0.57,
                 "seconds_per_step": 0.336, "interleaved_seconds_per_step": 0.3262,
                 "interleaved_training_time_s": 2027.4, "interleaved_wall_time_s": 2144.9,
                 "checkpoint_mb": 1140}),
    "MNLI-01": ("mnli", BERT, "baseline", 2e-5, 3,
                {"best": 83.44, "best_f1": 0.8885, "loss": 0.5074, "time_s": hours(4), "validations": 73}),
    "MNLI-02": ("mnli", BERT, "oelm", 1e-4, 3,
                {"best": 82.23, "best_f1": 0.8758, "loss": 0.5620, "time_s": hours(4), "relative_time": -0.57,
                 "validations": 73}),
}

# Parameters in all and frozen, as published: the rest is trained.
PARAMETERS = {
    "M512-GPT": (44_896_768, 0), "M512-OELM": (41_751_040, 0), "M512-OELM-frozen": (44_896_768, 3_145_728),
    **{f"GPT-0{i}": (44_896_768, 0 if i in (1, 4, 6) else 3_145_728) for i in range(1, 8)},
    "IMDB-baseline": (44_897_794, 0), "IMDB-oelm": (44_897_794, 3_145_728),
    "AGNews-baseline": (44_898_820, 0), "AGNews-oelm": (44_898_820, 3_145_728),
    "XNLI-GPT-baseline": (44_898_307, 0), "XNLI-GPT-oelm": (44_898_307, 3_145_728),
    "XNLI-01": (109_484_547, 0), "XNLI-02": (109_484_547, 14_174_208),
    "SST2-01": (109_480_000, 0), "SST2-02": (109_480_000, 14_170_000),
    "MNLI-01": (109_484_547, 0), "MNLI-02": (109_484_547, 14_174_208),
}

# Rows of the training split, of the tasks that are trained in epochs.
TRAIN_ITEMS = {"imdb": 25_000, "ag_news": 120_000, "xnli": 392_702, "mnli": 392_702, "sst2": 67_349}
TRAIN_TOKENS = {"tinystories": 448_000_000, "openwebtext": 99_000_000}

# Validation by step: thousands of steps, and the losses, accuracies (per cent) or F1 at these.
M512_STEPS = (*range(1, 11), *range(15, 100, 5), 99)
SST2_STEPS, LATE = (0.5, 1, 2, 3, 4, 6), tuple(i / 2 for i in range(1, 13))
HISTORIES: dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]] = {
    ("M512-GPT", "history"): (M512_STEPS, (
        3.7234, 2.8164, 2.3812, 2.1802, 2.0468, 1.9679, 1.9091, 1.8660, 1.8338, 1.8044, 1.7084, 1.6428,
        1.6051, 1.5727, 1.5465, 1.5235, 1.5060, 1.4948, 1.4813, 1.4724, 1.4653, 1.4578, 1.4517, 1.4473,
        1.4434, 1.4380, 1.4328, 1.4215)),
    ("M512-OELM", "history"): (M512_STEPS, (
        3.8295, 3.0094, 2.6056, 2.3830, 2.2195, 2.1328, 2.0647, 2.0186, 1.9806, 1.9482, 1.8609, 1.7943,
        1.7488, 1.7111, 1.6812, 1.6565, 1.6373, 1.6191, 1.6038, 1.5900, 1.5769, 1.5651, 1.5549, 1.5466,
        1.5396, 1.5405, 1.5427, 1.5389)),
    ("M512-OELM-frozen", "history"): ((99, 99.9), (1.5985, 1.5971)),
    ("GPT-01", "history"): ((20, 61), (1.7315, 1.5057)),
    ("GPT-02", "history"): ((19, 59), (1.8482, 1.6176)),
    ("SST2-01", "history"): (SST2_STEPS, (0.2987, 0.2876, 0.2765, 0.2689, 0.2612, 0.2518)),
    ("SST2-01", "accuracy_history"): (SST2_STEPS, (90.14, 91.06, 92.09, 92.43, 92.66, 93.12)),
    ("SST2-01", "f1_history"): (SST2_STEPS, (0.9012, 0.9123, 0.9234, 0.9287, 0.9312, 0.9389)),
    ("SST2-02", "history"): (LATE, (
        0.3380, 0.3125, 0.3052, 0.2987, 0.3012, 0.3078, 0.2989, 0.3056, 0.3674, 0.3710, 0.3096, 0.3152)),
    ("SST2-02", "accuracy_history"): (LATE, (
        88.19, 88.76, 90.25, 90.83, 91.17, 91.28, 91.42, 91.31, 90.25, 90.83, 91.17, 91.28)),
    ("SST2-02", "f1_history"): (LATE, (
        0.8872, 0.8901, 0.9031, 0.9127, 0.9143, 0.9159, 0.9168, 0.9154, 0.9031, 0.9127, 0.9143, 0.9159)),
    ("MNLI-01", "history"): ((0.5, 2), (1.0553, 0.7669)),
    ("MNLI-01", "accuracy_history"): ((0.5, 2, 4, 6, 8, 10), (46.14, 66.37, 77.89, 80.90, 80.72, 81.39)),
    ("MNLI-01", "f1_history"): ((0.5, 2), (0.6267, 0.7966)),
    ("MNLI-02", "history"): ((0.5, 2), (0.9202, 0.6790)),
    ("MNLI-02", "accuracy_history"): ((0.5, 2, 4, 6, 8, 10), (58.87, 71.92, 77.82, 77.69, 77.82, 76.46)),
    ("MNLI-02", "f1_history"): ((0.5, 2), (0.7567, 0.8361)),
}
EPOCH_TIMES = {
    "GPT-04": [6709.98, 6409.81, 5617.39, 5429.67, 3928.70, 4217.09],
    "GPT-05": [6650.03, 6357.54, 5566.41, 5451.83, 3930.88, 4180.78],
}

# Which fields of a recipe a report states, beside task, model, method and learning rate, and which are our
# own choice; the rest is only in the group's scripts.
STATED = {
    "M512": "task.max_length task.tokenizer model.dropout steps batch_size warmup schedule weight_decay clip "
            "eval_every save_every choose_on",
    "GPT": "task.max_length steps batch_size choose_on",
    "classifier": "task.max_length batch_size",
    "BERT, XNLI": "task.train_on epochs batch_size choose_on",
    "BERT, GLUE": "task.hold_out epochs choose_on",
}
STATED_TOO = {
    **{f"GPT-0{i}": "eval_every" for i in (1, 2, 3)},
    **{f"IMDB-{method}": "epochs" for method in ("baseline", "oelm")},
    **{f"SST2-0{i}": "task.max_length task.tokenizer batch_size warmup weight_decay clip eval_every"
       for i in (1, 2)},
}
OURS = {
    "M512-GPT": "betas precision", "M512-OELM": "betas precision", "M512-OELM-frozen": "lr betas precision",
}
# fmt: on
VARIANT = "M512-OELM-frozen"
PERCENT = {"best": "best_accuracy", "final": "final_accuracy"}
CHOSEN_ON_TEST = {"imdb", "ag_news", "sst2", "mnli"}

# The four recipes: (max_length, batch, warm-up, schedule, weight decay, precision, evaluation every).
RECIPES = {
    "M512": (512, 16, 2000, "cosine", 0.1, "fp16", 1000),
    "GPT": (512, 8, 1000, "cosine", 0.01, "fp16", 1000),
    "classifier": (512, 16, 0, "constant", 0.01, "fp32", 0),
    "BERT, XNLI": (128, 16, 0.1, "linear", 0.01, "fp32", 500),
    "BERT, GLUE": (128, 32, 0.1, "linear", 0.01, "fp32", 500),
}


def recipe(id: str, model: str, task: str) -> str:
    if model == BERT:
        return "BERT, XNLI" if task == "xnli" else "BERT, GLUE"
    prefix = id.partition("-")[0]
    return prefix if prefix in ("M512", "GPT") else "classifier"


def test_the_catalogue_is_the_21_and_one_variant():
    found = {experiment.id: experiment for experiment in list_experiments()}
    assert set(found) == set(ROWS)
    assert {id for id, experiment in found.items() if experiment.variant_of is None} == set(ROWS) - {VARIANT}
    assert len(ROWS) == 22
    assert found[VARIANT].variant_of == "M512-OELM"
    # The variant is the same recipe, frozen.
    frozen, trained = found[VARIANT].config, found["M512-OELM"].config
    assert {**frozen, "method": None} == {**trained, "method": None}


@pytest.mark.parametrize("id", ROWS)
def test_each_run_is_the_published_recipe(id):
    task, model, method, lr, length, _ = ROWS[id]
    config = experiment_config(id)
    training = config.training
    assert config.experiment == id
    assert (config.task.name, config.model.name, config.method.name) == (task, model, method)
    assert training.lr == lr
    assert (training.steps, training.epochs) == ((length, None) if length > 3 else (None, length))
    assert (
        config.task.max_length,
        training.batch_size,
        training.warmup,
        training.schedule,
        training.weight_decay,
        training.precision,
        training.eval_every,
    ) == RECIPES[recipe(id, model, task)]
    assert (training.betas, training.clip, training.seed) == ((0.9, 0.999), 1.0, 42)
    assert training.accumulate == 1  # batch_size is the whole batch
    assert training.choose_on == ("test" if task in CHOSEN_ON_TEST else "validation")
    assert config.task.hold_out == (task not in CHOSEN_ON_TEST)  # those trained on all training data
    dropout = 0.1 if model == GPT else None  # BERT keeps its own
    assert (config.model.dropout, config.model.attention_dropout) == (dropout, dropout)
    assert config.task.tokenizer == ("gpt2" if model == GPT else BERT)
    assert config.task.train_on == ("mnli" if task == "xnli" else None)


@pytest.mark.parametrize("id", ROWS)
def test_each_run_names_things_that_exist(id):
    config = experiment_config(id)
    task = TASKS[config.task.name]
    assert get_method(config.method.name).name == config.method.name
    assert config.task.train_on is None or config.task.train_on in task.train_on
    assert (task.kind == "lm") == (config.training.steps is not None)


@pytest.mark.parametrize("id", ROWS)
def test_each_published_figure_is_the_reports(id):
    task, expected = ROWS[id][0], ROWS[id][-1]
    published = dict(get_experiment(id).published)
    assert published.pop("split") == ("test" if task in CHOSEN_ON_TEST else "validation")
    assert all(isinstance(note, str) for note in published.pop("notes"))
    assert published.pop("train_items", None) == TRAIN_ITEMS.get(task)
    assert published.pop("train_tokens", None) == TRAIN_TOKENS.get(task)
    total, frozen = PARAMETERS[id]
    assert published.pop("parameters") == {"total": total, "trainable": total - frozen, "frozen": frozen}
    assert published.pop("epoch_times_s", None) == pytest.approx(EPOCH_TIMES.get(id), abs=0.06)
    histories = {key: published.pop(key) for key in list(published) if key.endswith("history")}
    assert histories.keys() == {key for experiment, key in HISTORIES if experiment == id}
    for key, points in histories.items():
        thousands, values = HISTORIES[id, key]
        scale = 100 if key == "accuracy_history" else 1
        assert [step for step, _ in points] == [1000 * step for step in thousands]
        assert [scale * value for _, value in points] == pytest.approx(values)
    figures = {
        PERCENT.get(key, key): value / 100 if key in PERCENT else value for key, value in expected.items()
    }
    assert published == pytest.approx(figures, rel=1e-5)
    if {"perplexity", "loss"} <= set(published):
        assert math.exp(published["loss"]) == pytest.approx(published["perplexity"], rel=1e-3)


@pytest.mark.parametrize("id", ROWS)
def test_every_key_of_a_recipe_has_one_source(id):
    experiment = get_experiment(id)
    keys = {f"{section}.{key}" for section, values in experiment.config.items() for key in values}
    listed = [key for source in experiment.sources.values() for key in source]
    assert len(listed) == len(set(listed))
    assert set(listed) == keys
    assert list(experiment.sources) == ["report", "scripts", "ours"]

    def whole(names: str) -> set[str]:
        return {name if "." in name else f"training.{name}" for name in names.split()}

    ours = whole(OURS.get(id, ""))
    named = f"{STATED[recipe(id, ROWS[id][1], ROWS[id][0])]} {STATED_TOO.get(id, '')}"
    stated = whole(named) | {"task.name", "model.name", "method.name", "training.lr"} - ours
    assert set(experiment.sources["ours"]) == ours
    assert set(experiment.sources["report"]) == stated


@pytest.mark.parametrize("id", ROWS)
def test_habits_say_what_the_configuration_does(id):
    """A habit is a warning to the reader: each that the configuration shows is named, and no other."""
    habits = get_experiment(id).habits
    config = experiment_config(id)
    training = config.training

    def named(words: str) -> bool:
        return any(words in habit for habit in habits)

    assert habits and all(isinstance(habit, str) for habit in habits)
    assert named("constant learning rate without warm-up") == (
        (training.schedule, training.warmup) == ("constant", 0)
    )
    assert named("chosen on the test set") == named("trained on all") == (training.choose_on == "test")
    assert named("overwritten with N(0, 0.02)") == (config.method.name == "random-trainable")
    assert named("micro-batch timing artefact") == (id == "XNLI-02")
    classifier = config.model.name == GPT and training.steps is None
    assert named("padded to 512") == named("second forward pass") == named("fp32") == classifier


def build(id: str) -> PreTrainedModel:
    """The experiment's real model, without memory for its weights."""
    config = experiment_config(id)
    task = TASKS[config.task.name]
    with torch.device("meta"):
        if config.model.name == BERT:
            return BertForSequenceClassification(BertConfig(num_labels=len(task.labels)))
        dropout = {"dropout": config.model.dropout, "attention_dropout": config.model.attention_dropout}
        if task.kind == "lm":
            return OelmGPTForCausalLM(gpt_config(config.model.name, **dropout))
        sizes = gpt_config(config.model.name, num_labels=len(task.labels), **dropout)
        return OelmGPTForSequenceClassification(sizes)


LABELS = {"imdb": 2, "ag_news": 4, "xnli": 3, "sst2": 2, "mnli": 3}


@pytest.mark.parametrize("id", ROWS)
def test_the_real_model_has_the_published_number_of_parameters(id):
    task, name, _, _, _, _ = ROWS[id]
    model = build(id)
    total = sum(p.numel() for p in model.parameters())
    parts = ("q_proj.", "k_proj.") if name == GPT else ("query.", "key.")
    qk = sum(p.numel() for key, p in model.named_parameters() if any(part in key for part in parts))
    if name == BERT:
        head = 769  # parameters of one label: a row of the classifier and its bias
        assert total == 109_484_547 + (LABELS[task] - 3) * head
        assert qk == 14_174_208
    else:
        head = sum(p.numel() for key, p in model.named_parameters() if not key.startswith("transformer."))
        assert total - head == 44_896_768
        assert head in ((0,) if TASKS[task].kind == "lm" else (512 * LABELS[task], 513 * LABELS[task]))
        assert qk == 3_145_728


def test_ids_in_any_case_and_an_unknown_one_is_answered_with_the_known():
    assert get_experiment("agnews-OELM").id == experiment_config("AGNEWS-oelm").experiment == "AGNews-oelm"
    with pytest.raises(UserError, match=r"no experiment 'GPT-08'; known: .*GPT-07.*XNLI-GPT-oelm"):
        get_experiment("GPT-08")


def test_every_file_is_an_experiment_in_the_source_tree():
    there = {
        path.stem
        for path in (ROOT / "src/oelm/experiments").glob("*.toml")
        if "[published]" in path.read_text()
    }
    assert there == set(ROWS)
    assert {file.name for file in (files("oelm") / "experiments").iterdir()} >= {f"{id}.toml" for id in ROWS}


def test_a_wheel_contains_the_files(tmp_path):
    """Built from a copy: a build leaves folders behind in the tree it builds."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src/oelm", tree / "src/oelm", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(tree),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"oelm/experiments/{id}.toml" for id in ROWS} <= set(names)


def oelm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oelm", *arguments], capture_output=True, text=True, timeout=120
    )


def test_the_table_fits_100_columns():
    done = oelm("experiments")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["ID", "task", "model", "method", "lr", "length", "published", "time"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:23]}
    assert set(rows) == set(ROWS)
    assert rows["GPT-06"] == ["wikitext-103", GPT, "baseline", "3e-4", "200k", "PPL", "25.13", "3h49m"]
    assert rows["SST2-02"] == ["sst2", BERT, "oelm", "1e-4", "3", "epochs", "91.28", "%", "35m"]
    assert "…" not in done.stdout


def test_one_experiment_is_shown_with_its_figures_and_the_command_to_run_it():
    done = oelm("experiments", "xnli-01")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    for words in ('name = "random-trainable" # report', "seed = 42 # scripts", "best_accuracy 0.7671",
                  "steps 73,632", "time_s 11,971 (3h19m)", "parameters.total 109,484,547",
                  "overwritten with N(0, 0.02)", "about 0.84",
                  "oelm train XNLI-01 --out runs/XNLI-01"):  # fmt: skip
        assert words in shown
    assert f"{VARIANT} is a variant of M512-OELM" in oelm("experiments", VARIANT).stdout


@pytest.mark.parametrize("id", ROWS)
def test_every_experiment_is_readable_at_80_columns(id):
    experiment = get_experiment(id)
    shown = _render(experiment)
    assert max(map(len, shown.splitlines())) <= 80
    assert (f"oelm train {id} --fair" in shown) == (ROWS[id][0] in CHOSEN_ON_TEST)
    recipe = shown.partition("[task]")[2].partition("\nPublished")[0]
    assert tomllib.loads("[task]" + recipe) == json.loads(json.dumps(experiment.config))
    for key, points in experiment.published.items():
        if key.endswith("history"):
            assert all(f"{step:,} {value:.4f}" in shown for step, value in points)


def test_a_narrow_terminal_shows_every_id_whole(monkeypatch, capsys):
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    _print_table(list_experiments())
    shown = capsys.readouterr().out
    assert all(id in shown for id in ROWS) and "…" not in shown


def test_runs_of_an_experiment_say_in_what_they_differ(monkeypatch, tmp_path):
    copy_run(tmp_path / "runs/a", "oelm", "imdb", 1e-3, 1, 0.8)
    config = tmp_path / "runs/a/config.toml"
    config.write_text('experiment = "IMDB-oelm"\n' + config.read_text())
    monkeypatch.chdir(tmp_path)
    shown = " ".join(_render(get_experiment("IMDB-oelm")).split())
    line = r"Records here - runs/a: validation accuracy 0\.8, test 0\.8, .*; differs in .*training\.seed"
    assert re.search(line, shown)


def test_runs_of_a_study_stand_beside_the_experiment_they_could_repeat(monkeypatch, tmp_path):
    for seed, score in ((1, 0.8), (2, 0.9)):
        copy_run(tmp_path / f"results/s/oelm/{seed}", "oelm", "imdb", 3e-4, seed, score)
    copy_run(tmp_path / "results/s/oelm/trial", "oelm", "imdb", 3e-4, 9, 0.1, test=False)
    copy_run(tmp_path / "results/s/baseline/1", "baseline", "imdb", 3e-4, 1, 0.5)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["experiments", "IMDB-oelm", "--json"])
    (record,) = json.loads(result.stdout)["records"]
    assert record["folder"] == str(Path("results/s/oelm")) and record["test"] == pytest.approx(0.85)
    assert record["runs"] == 2 and {"training.lr", "training.choose_on"} <= set(record["differs_in"])
    shown = " ".join(_render(get_experiment("IMDB-oelm")).split())
    assert "results/s/oelm: validation accuracy 0.85, test 0.85, mean of 2 runs" in shown
    assert "Records here" not in _render(get_experiment("AGNews-oelm"))


def test_json_for_programs():
    everything: list[dict[str, Any]] = json.loads(oelm("experiments", "--json").stdout)
    assert [entry["id"] for entry in everything] == sorted(ROWS)
    one = json.loads(oelm("experiments", "gpt-02", "--json").stdout)
    assert isinstance(one.pop("records"), list)
    assert one == next(entry for entry in everything if entry["id"] == "GPT-02")
    assert one["published"]["perplexity"] == 4.69
    assert one["published"]["parameters"]["frozen"] == 3_145_728
    assert one["config"]["method"] == {"name": "oelm"}
    assert "training.warmup" in one["sources"]["scripts"]


def test_an_unknown_id_is_one_line_and_exit_code_2():
    done = oelm("experiments", "GPT-99")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "GPT-99" in done.stderr and "GPT-01" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["GPT-01"], ["--read"]], ids=["all", "one", "read"])
def test_the_catalogue_does_not_wait_for_torch(arguments, tmp_path):
    if arguments == ["--read"]:
        about = {"schema": 1, "command": "c", "steps": 1, "environment": {"cpu": "C"}}
        record = about | {"experiments": [{"id": "GPT-01", "status": "failed", "problem": "no disk"}]}
        (tmp_path / "record.json").write_text(json.dumps(record))
        arguments = ["--read", str(tmp_path / "record.json")]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "oelm", "experiments", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "GPT-01" in done.stdout
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def made_results(config, **changes):
    """What a run that repeats an experiment exactly would record."""
    metrics = {"accuracy": 0.8, "loss": 0.5, "perplexity": 5.0}
    values = {
        "precision": config.training.precision, "samples": 75_000, "total_time_s": 100.0,
        "final": {"epoch": 3.0, "split": "test", "metrics": metrics},
        "best": {"split": config.training.choose_on, "metrics": metrics},
        "parameters": {"total": 44_896_768, "trainable": 41_751_040, "frozen": 3_145_728},
    }  # fmt: skip
    return values | changes


def test_a_run_says_whether_it_is_an_exact_repeat():
    experiment, config = get_experiment("IMDB-oelm"), experiment_config("IMDB-oelm")
    assert differences(experiment, config, made_results(config)) == []
    other = replace(
        config, training=replace(config.training, lr=3e-4, save_every=7), model=ModelConfig("Tiny")
    )
    found = differences(experiment, other, made_results(config, precision="bf16", samples=67_500))
    assert {"training.lr", "model.name", "training.precision"} <= set(found)
    assert "training items (22,500 of 25,000)" in found and "training.save_every" not in found
    start = {"epoch": 0.0045, "split": "test", "metrics": {}}  # seven steps, rounded
    short = made_results(config, samples=112, train_items=25_000, final=start)
    assert differences(experiment, config, short) == []
    config = experiment_config("GPT-02")
    whole, sample = (made_results(config, train_items=windows) for windows in (875_000, 20_000))
    assert differences(get_experiment("GPT-02"), config, whole) == []
    found = differences(get_experiment("GPT-02"), config, sample)
    assert found == ["training tokens (10.2M of 448M)"]
    config = experiment_config("IMDB-oelm")
    for damaged in ({"final": "?"}, {"final": {"epoch": "?"}}, {"samples": None}):
        assert differences(experiment, config, made_results(config, **damaged)) == []


def test_published_times_of_a_step_stand_beside_those_of_a_run():
    times = {"mean_step_time": 0.02, "median_step_time": 0.01}
    values = made_results(experiment_config("GPT-03"), eval_time_s=9.0, reports={"timing_stats": times})
    rows = {name: (a, b) for name, a, b in shared_figures(get_experiment("GPT-03"), values)}
    assert rows["seconds_per_step"] == (0.184, 0.02) and rows["mean_seconds_per_step"] == (0.0768998, 0.02)
    assert rows["median_seconds_per_step"] == (0.0622793, 0.01) and rows["validation_time_s"][1] == 9


def test_published_figures_stand_beside_those_of_the_same_split():
    config = experiment_config("IMDB-oelm")
    rows = {name: (a, b) for name, a, b in shared_figures(get_experiment("IMDB-oelm"), made_results(config))}
    assert rows["best_accuracy"] == (0.857, 0.8) and rows["time_s"] == (1321, 100)
    validation = {"split": "validation", "metrics": {"accuracy": 0.9}}
    fair = made_results(config, best=validation, final=validation)
    assert not {"best_accuracy", "final_accuracy"} & {
        n for n, _, _ in shared_figures(get_experiment("IMDB-oelm"), fair)
    }
    fair["test"] = {"split": "test", "metrics": {"accuracy": 0.7}}
    rows = {name: (a, b) for name, a, b in shared_figures(get_experiment("IMDB-oelm"), fair)}
    assert rows["best_accuracy"] == (0.857, 0.7) and "final_accuracy" not in rows
    language = {
        n: (a, b)
        for n, a, b in shared_figures(get_experiment("GPT-02"), made_results(experiment_config("GPT-02")))
    }
    assert language["perplexity"] == (4.69, 5.0) and language["frozen parameters"][1] == 3_145_728
