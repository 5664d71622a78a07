"""The catalogue against the published table, written here a second time and independently of the files."""

import json
import math
import shutil
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from oelm.data.catalogue import TASKS
from oelm.errors import UserError
from oelm.method import get_method
from oelm.models.gpt import OelmGPTForCausalLM, OelmGPTForSequenceClassification
from oelm.models.gpt_config import gpt_config
from oelm.study.catalogue import experiment_config, get_experiment, list_experiments

ROOT = Path(__file__).parents[2]
GPT, BERT = "gpt-medium-512", "bert-base-uncased"


def hours(h: int, m: int = 0, s: int = 0) -> int:
    return 3600 * h + 60 * m + s


# ID: task, model, method, learning rate, length of the run, published figures in percent, PPL, loss, seconds.
# fmt: off
ROWS: dict[str, tuple[str, str, str, float, int, dict[str, float]]] = {
    "M512-GPT": ("tinystories", GPT, "baseline", 5e-4, 100_000,
                 {"perplexity": 4.14, "loss": 1.4215, "time_s": hours(6, 30)}),
    "M512-OELM": ("tinystories", GPT, "oelm-global-trainable", 5e-4, 100_000,
                  {"perplexity": 4.66, "loss": 1.5389, "time_s": hours(5)}),
    "M512-OELM-frozen": ("tinystories", GPT, "oelm-global", 5e-4, 100_000, {"loss": 1.5971}),
    "GPT-01": ("tinystories", GPT, "baseline", 3e-4, 100_000,
               {"perplexity": 4.27, "time_s": hours(4, 31), "seconds_per_step": 0.184}),
    "GPT-02": ("tinystories", GPT, "oelm", 1e-3, 100_000,
               {"perplexity": 4.69, "time_s": hours(4, 32), "seconds_per_step": 0.184}),
    "GPT-03": ("tinystories", GPT, "oelm-random", 1e-3, 100_000,
               {"perplexity": 4.97, "time_s": hours(4, 15)}),
    "GPT-04": ("openwebtext", GPT, "baseline", 3e-4, 100_000,
               {"perplexity": 47.24, "time_s": hours(9, 10)}),
    "GPT-05": ("openwebtext", GPT, "oelm", 1e-3, 100_000, {"perplexity": 54.29, "time_s": hours(9, 8)}),
    "GPT-06": ("wikitext-103", GPT, "baseline", 3e-4, 200_000,
               {"perplexity": 25.13, "loss": 3.224, "time_s": hours(3, 49, 35), "seconds_per_step": 0.06168}),
    "GPT-07": ("wikitext-103", GPT, "oelm", 1e-3, 200_000,
               {"perplexity": 29.03, "loss": 3.368, "time_s": hours(3, 47, 29), "seconds_per_step": 0.06123}),
    "IMDB-baseline": ("imdb", GPT, "baseline", 3e-4, 3,
                      {"best": 78.56, "final": 69.37, "loss": 0.639, "time_s": hours(0, 22, 51)}),
    "IMDB-oelm": ("imdb", GPT, "oelm", 1e-3, 3,
                  {"best": 85.70, "final": 85.70, "loss": 0.405, "time_s": hours(0, 22, 1)}),
    "AGNews-baseline": ("ag_news", GPT, "baseline", 3e-4, 3,
                        {"best": 87.05, "final": 82.49, "loss": 0.512, "time_s": hours(1, 19, 12)}),
    "AGNews-oelm": ("ag_news", GPT, "oelm", 1e-3, 3,
                    {"best": 92.74, "final": 92.09, "loss": 0.266, "time_s": hours(1, 14, 41)}),
    "XNLI-GPT-baseline": ("xnli", GPT, "baseline", 3e-4, 2,
                          {"best": 46.39, "final": 44.90, "loss": 1.035, "time_s": hours(3, 12, 59)}),
    "XNLI-GPT-oelm": ("xnli", GPT, "oelm", 1e-3, 2,
                      {"best": 57.99, "final": 57.99, "loss": 0.902, "time_s": hours(2, 32, 22)}),
    "XNLI-01": ("xnli", BERT, "random-trainable", 2e-5, 3,
                {"best": 76.71, "time_s": 11_971, "seconds_per_step": 0.162}),
    "XNLI-02": ("xnli", BERT, "oelm", 1e-4, 3, {"best": 77.79, "time_s": 5_138, "seconds_per_step": 0.069}),
    "SST2-01": ("sst2", BERT, "baseline", 2e-5, 3, {"best": 93.12}),
    "SST2-02": ("sst2", BERT, "oelm", 1e-4, 3, {"best": 91.28}),
    "MNLI-01": ("mnli", BERT, "baseline", 2e-5, 3, {"best": 83.44}),
    "MNLI-02": ("mnli", BERT, "oelm", 1e-4, 3, {"best": 82.23}),
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
    assert published.pop("seed", None) == (42 if id.startswith("GPT-") else None)
    assert published == pytest.approx(
        {PERCENT.get(key, key): value / 100 if key in PERCENT else value for key, value in expected.items()}
    )
    if {"perplexity", "loss"} <= set(published):
        assert math.exp(published["loss"]) == pytest.approx(published["perplexity"], rel=1e-3)


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
    assert named("chosen on the test set") == (training.choose_on == "test")
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
    assert rows["SST2-02"] == ["sst2", BERT, "oelm", "1e-4", "3", "epochs", "91.28", "%"]
    assert "…" not in done.stdout


def test_one_experiment_is_shown_with_its_figures_and_the_command_to_run_it():
    done = oelm("experiments", "xnli-01")
    assert done.returncode == 0, done.stderr
    for words in ('name = "random-trainable"', "0.7671", "overwritten with N(0, 0.02)", "about 0.84",
                  "oelm train XNLI-01 --out runs/XNLI-01"):  # fmt: skip
        assert words in done.stdout
    assert f"{VARIANT} is a variant of M512-OELM" in oelm("experiments", VARIANT).stdout


def test_json_for_programs():
    everything: list[dict[str, Any]] = json.loads(oelm("experiments", "--json").stdout)
    assert [entry["id"] for entry in everything] == sorted(ROWS)
    one = json.loads(oelm("experiments", "gpt-02", "--json").stdout)
    assert one == next(entry for entry in everything if entry["id"] == "GPT-02")
    assert one["published"]["perplexity"] == 4.69
    assert one["config"]["method"] == {"name": "oelm"}


def test_an_unknown_id_is_one_line_and_exit_code_2():
    done = oelm("experiments", "GPT-99")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "GPT-99" in done.stderr and "GPT-01" in done.stderr


def test_the_catalogue_does_not_wait_for_torch():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "oelm", "experiments", "GPT-01"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
