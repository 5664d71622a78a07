"""A run is resolved once, into objects that nothing changes afterwards."""

from dataclasses import FrozenInstanceError, asdict

import pytest
import torch

import oelm
from oelm.bench.load import made_stream, made_texts
from oelm.config import RunConfig, TaskConfig, make_config, resolve_config
from oelm.data import open_store
from oelm.study.catalogue import experiment_config, list_experiments
from oelm.study.design import StudyConfig
from oelm.study.request import plan_study
from oelm.training import loop
from oelm.training.loop import train
from oelm.training.resolve import choice_of, objective_of, prepare_data, resolve_run
from tests.data.made import labelled, write_csv
from tests.training.runs import make_store

CPU = torch.device("cpu")


def resolved(training, store=None, device=CPU, processes=1, **tables):
    store = store or made_texts("made", [5, 9, 32, 2] * 10, 300, 32)
    config = make_config({"task": {"max_length": 32}, "training": training, **tables})
    return resolve_run(config, objective_of(config, store), device, processes)


def test_configs_and_resolved_runs_are_frozen():
    run = resolved({"steps": 5})
    sections = [getattr(run.config, name) for name in ("task", "model", "method", "training", "arm")]
    for frozen in (run, run.plan, run.config, *sections, StudyConfig()):
        for name in vars(frozen):
            with pytest.raises(FrozenInstanceError):
                setattr(frozen, name, None)


def test_what_is_left_open_is_filled_in_and_the_given_config_stays():
    asked = RunConfig()
    before = asdict(asked)
    run = resolve_run(asked, objective_of(asked, made_texts("made", [5, 9] * 20, 300, 512)), CPU)
    assert asdict(asked) == before and run.config.model.name == "gpt-tiny"
    assert (run.precision, run.total_steps, run.warmup_steps) == ("fp32", 9, 0)  # 3 epochs of 3 steps, 6 %
    assert resolved({}, device=torch.device("cuda")).config.model.name == "gpt-medium-512"
    again = resolve_run(run.config, objective_of(run.config, made_texts("made", [5, 9] * 20, 300, 512)), CPU)
    assert again.config == run.config


def test_steps_are_those_of_the_data():
    assert resolved({"epochs": 1.5, "batch_size": 4}).total_steps == 15
    assert resolved({"steps": 50, "warmup": 0.1}).warmup_steps == 5
    windows = resolved({"epochs": 2, "batch_size": 4}, made_stream(32 * 20, 300, 32))
    assert windows.total_steps == 10 and windows.plan.mean_tokens == 4 * 32


def test_warnings_come_with_the_run():
    run = resolved({"precision": "fp16", "choose_on": "test"})
    assert run.precision == "fp32"
    codes = [warning.code for warning in run.warnings]
    assert codes[0] == "training.fp16_on_cpu" and codes[-1] == "training.chosen_on_test"


def test_the_smallest_model_learns_its_own_vocabulary_from_a_corpus():
    """On a task, unless one is named: what is published keeps GPT-2's."""
    tokenizer = lambda model, **task: choice_of(TaskConfig(**task), model).tokenizer  # noqa: E731
    assert tokenizer("gpt-tiny", name="wikitext-2") == "train:8192"
    assert tokenizer("gpt-tiny", name="wikitext-2", tokenizer="gpt2") == "gpt2"
    assert tokenizer("gpt-small", name="wikitext-2") is tokenizer("gpt-tiny", name="imdb") is None
    assert tokenizer("gpt-tiny", data="x.csv") is tokenizer(None, name="wikitext-2") is None
    for experiment in list_experiments():
        config = experiment_config(experiment.id)
        chosen = choice_of(config.task, config.model.name).tokenizer
        assert chosen in (config.task.tokenizer, config.model.name)


@pytest.mark.parametrize(
    ("model", "vocabulary", "percent"),
    [
        ("gpt-tiny", 50_257, 93), ("gpt-tiny", 8_192, None), ("gpt-small", 50_257, 80),
        ("gpt-medium-512", 50_257, None),
    ],
)  # fmt: skip
def test_a_vocabulary_far_larger_than_the_model_is_noted(model, vocabulary, percent):
    stream = made_stream(32 * 20, vocabulary, 32)
    codes = {
        note.code: note.values for note in resolved({"steps": 1}, stream, model={"name": model}).warnings
    }
    assert ("training.large_vocabulary" in codes) == (percent is not None)
    if percent is not None:  # the model as it is built says the same
        assert codes["training.large_vocabulary"]["percent"] == percent
        built = oelm.OelmGPTForCausalLM(oelm.gpt_config(model, vocab_size=vocabulary))
        parts = {name: value.numel() for name, value in built.named_parameters()}
        assert percent == round(100 * parts["transformer.wte.weight"] / sum(parts.values()))
    texts = made_texts("made", [5, 9] * 20, vocabulary, 32)
    notes = resolved({"steps": 1}, texts, model={"name": model}).warnings
    assert all(note.code != "training.large_vocabulary" for note in notes), "a classifier has no such head"
    noted = any(note.code == "training.large_embedding" for note in notes)
    assert noted == (percent is not None and percent > 90)


def test_settings_that_would_mislead_are_noted(tmp_path):
    codes = lambda *given, **more: [note.code for note in resolved(*given, **more).warnings]  # noqa: E731
    assert "training.long_warmup" in codes({"steps": 60, "warmup": 1000})
    assert "training.long_warmup" not in codes({"steps": 60, "warmup": 30})
    assert "training.unbalanced" not in codes({"steps": 5})
    rows = [[f"text {i}", "rare" if i % 9 == 0 else "often"] for i in range(180)]
    path = str(write_csv(tmp_path / "x.csv", ["text", "label"], rows))
    base = {"data": path, "tokenizer": "train:300", "max_length": 32}
    for metric, noted in ((None, True), ("f1_macro", False)):
        config, store = prepare_data(make_config({"task": base | {"metric": metric}}), CPU, show=False)
        notes = resolve_run(config, objective_of(config, store), CPU).warnings
        assert [str(note) for note in notes if note.code == "training.unbalanced"] == noted * [
            "the classes are unbalanced: often has 128 training items, rare has 16. Accuracy hardly notices "
            "the rare ones; task.metric = f1_macro counts all classes alike"
        ]


def test_what_cannot_run_is_refused():
    assert "training.one_process" in [note.code for note in resolved({"fsdp": True}).warnings]
    assert "training.one_process" not in [n.code for n in resolved({"fsdp": True}, processes=2).warnings]
    with pytest.raises(oelm.UserError, match="too few for 8 parts"):
        resolved({"batch_size": 4, "accumulate": 4}, processes=2)


def test_data_decides_tokenizer_and_length(tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path / "cache"))
    labelled(tmp_path / "x.csv")
    columns = {"data": str(tmp_path / "x.csv"), "text": "body", "label": "topic"}
    asked = make_config({"task": columns | {"tokenizer": "train:300", "max_length": 16}})
    config, store = prepare_data(asked, CPU, show=False)
    assert (config.task.tokenizer, config.task.max_length, config.model.name) == ("train:300", 16, "gpt-tiny")
    prepared = make_config({"task": {"data": str(store.folder)}})
    config, _ = prepare_data(prepared, CPU, show=False)
    assert (config.task.tokenizer, config.task.max_length) == ("train:300", 16)
    assert (prepared.task.tokenizer, prepared.task.max_length) == (None, 512)


@pytest.mark.parametrize(
    ("file", "assignment"), [('task = "imdb"', ""), ("", "training=3"), ("training = 3", "")]
)
def test_a_value_in_place_of_a_table_is_one_line(tmp_path, file, assignment):
    path = tmp_path / "run.toml"
    path.write_text(file)
    with pytest.raises(oelm.UserError, match=r"(task|training) must be a table"):
        resolve_config({"training": {"epochs": 3}}, path, {}, [assignment] if assignment else [])


def test_a_run_of_the_library_names_its_model(tmp_path):
    from oelm.data import open_store
    from oelm.training.folder import read_config
    from tests.training.runs import make_store

    asked = make_config(
        {"task": {"max_length": 32}, "training": {"steps": 2, "batch_size": 4, "test": False}}
    )
    train(asked, open_store(make_store(tmp_path)), tmp_path / "run", show=False)
    assert asked.model.name is None and read_config(tmp_path / "run").model.name == "gpt-tiny"


def test_without_save_every_the_clock_decides(tmp_path, monkeypatch):
    store = open_store(make_store(tmp_path))
    values = {"steps": 9, "batch_size": 4, "log_every": 2, "eval_every": 9, "keep": 9}
    config = make_config({"task": {"max_length": 32}, "training": values | {"test": False}})
    kept = {}
    for seconds in (0.0, 3600.0):
        monkeypatch.setattr(loop, "SAVE_AFTER", seconds)
        loop.train(config, store, tmp_path / str(seconds), show=False)
        kept[seconds] = sorted(path.name for path in (tmp_path / str(seconds)).glob("checkpoints/step-*"))
    assert [int(name[5:]) for name in kept[0.0]] == [2, 4, 6, 8, 9]  # where the run looks at its loss anyway
    assert not kept[3600.0]  # what improved was held in memory


def test_a_run_that_says_nothing_is_evaluated_about_ten_times(tmp_path, monkeypatch):
    """And keeps what it began with, where it is extended; a file, an experiment and `make_config` keep 0."""
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path / "cache"))
    labelled(tmp_path / "d.csv", 400)
    small = {"data": tmp_path / "d.csv", "model": "gpt-tiny", "tokenizer": "train:300", "max_length": 16}
    small |= {"text": "body", "label": "topic", "show": False, "out": tmp_path / "run"}

    def evaluated(result):
        log = result.to_pandas()
        return log[log["kind"] == "eval"]["step"].tolist()

    assert evaluated(oelm.train(**small, steps=50)) == [*range(5, 51, 5)]
    longer = oelm.train(**small, steps=60)
    assert evaluated(longer) == [*range(5, 61, 5)]
    (tmp_path / "run.toml").write_text("[training]\nsteps = 3\n")
    once = oelm.train(**small | {"out": tmp_path / "file"}, config=tmp_path / "run.toml")
    assert evaluated(once) == [3] and once.config.training.eval_every == 0
    assert make_config({}).training.eval_every == 0


def test_a_new_study_says_how_often_it_is_evaluated_and_an_older_one_keeps_its_own(tmp_path):
    data = {"data": str(labelled(tmp_path / "d.csv", 100))}
    new, _ = plan_study(None, tmp_path / "new", data, {})
    assert new.task_config(None).training.eval_every == "auto"
    named, _ = plan_study("fair-classification", tmp_path / "fair", {}, {})
    assert named.task_config("imdb").training.eval_every == 0
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "study.toml").write_text(f'[task]\ndata = "{data["data"]}"\n')
    old, _ = plan_study(None, tmp_path / "old", {}, {})
    assert old.task_config(None).training.eval_every == 0
