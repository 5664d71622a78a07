"""A study as a file and as a value: what is accepted, what is refused, and that nothing is lost."""

from pathlib import Path

import pytest

from oelm.config import to_toml
from oelm.errors import UserError
from oelm.study.decide import fewest_seeds
from oelm.study.design import make_study, read_study, shipped_studies
from oelm.study.request import plan_study

FILE = """
title = "two tasks"
[study]
tasks = ["imdb", "sst2"]
methods = ["baseline", "oelm", {name = "oelm", init = "own"}]
lrs = [1e-3, 3e-4]
[task]
max_length = 128
[model]
name = "gpt-small"
[training]
epochs = 2
[per_task.imdb.training]
steps = 10
"""


def test_a_file_becomes_a_study_and_comes_back(tmp_path):
    (tmp_path / "s.toml").write_text(FILE)
    study = make_study(read_study(str(tmp_path / "s.toml")))
    assert list(study.arms) == ["baseline", "oelm", "oelm (init=own)"]
    assert study.reference_arm == "baseline" and study.table.lrs == [3e-4, 1e-3]
    imdb, sst2 = study.task_config("imdb"), study.task_config("sst2")
    assert imdb.training.steps == 10 and imdb.training.epochs is None  # a task's steps replace the epochs
    assert sst2.training.epochs == 2 and sst2.task.name == "sst2" and sst2.task.max_length == 128
    (tmp_path / "again.toml").write_text(to_toml(study.to_dict()))
    again = make_study(read_study(str(tmp_path / "again.toml")))
    assert again.to_dict() == study.to_dict()


def test_options_and_the_tables_of_single_tasks(tmp_path, capsys):
    """An option is for the tasks that say nothing themselves, which is noted; --set changes a task's table,
    and there too epochs replace steps."""
    (tmp_path / "s.toml").write_text(FILE)
    name, out = str(tmp_path / "s.toml"), tmp_path / "out"
    kept, _ = plan_study(name, out, {"epochs": 1.0, "max_length": 64}, {})
    assert [kept.task_config(task).training.steps for task in ("imdb", "sst2")] == [10, None]
    assert [kept.task_config(task).task.max_length for task in ("imdb", "sst2")] == [64, 64]
    note = "note: imdb keeps steps 10, which this study sets for it alone; "
    assert capsys.readouterr().err == f"{note}--set per_task.imdb.training.epochs=... changes it\n"
    changed, _ = plan_study(name, out, {"epochs": 1.0}, {}, ["per_task.imdb.training.epochs=4"])
    assert [changed.task_config(task).training.epochs for task in ("imdb", "sst2")] == [4, 1]
    assert changed.task_config("imdb").training.steps is None
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"per_task\.imdb must be a table"):
        plan_study(name, out, {}, {}, ["per_task.imdb=3"])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"study": {"methods": ["baseline"]}}, "at least two"),
        ({"study": {"methods": ["oelm", "oelm-qk"]}}, "oelm twice"),
        ({"study": {"methods": ["baseline", "nonsense"]}}, "nonsense"),
        ({"study": {"reference": "oelm-random"}}, "not among the methods"),
        (
            {"study": {"methods": [{"name": "oelm", "arm": "a, b"}, "frozen"], "reference": "b"}},
            'not among the methods: "a, b", frozen',
        ),
        ({"study": {"lrs": [0.0, 1e-3]}}, "positive learning rates"),
        ({"study": {"lrs": []}}, "positive learning rates"),
        ({"study": {"seeds": 0}}, "study.seeds must be positive"),
        ({"study": {"colour": 1}}, "unknown key 'study.colour'"),
        ({"study": {"tasks": ["imdb", "imdb"]}}, "twice"),
        ({"training": {"lr": 1e-3}}, "study.lrs"),
        ({"training": {"seed": 1}}, "study.seeds"),
        ({"method": {"name": "oelm"}}, "study.methods"),
        ({"method": {"gain": 3.0}}, r'method.gain is set by study.methods, such as {name = "oelm", gain'),
        ({"study": {"tasks": ["imdb"]}, "per_task": {"imdb": 3}}, "per_task.imdb must be a table"),
        (
            {"study": {"tasks": ["imdb"]}, "per_task": {"imdb": {"training": {"lr": 5.0}}}},
            "per_task.imdb.training.lr is set by study.lrs",
        ),
        ({"training": {"choose_on": "test"}}, "several study.lrs are chosen on validation"),
        ({"study": {"memory_gb": float("nan")}}, "study.memory_gb must be 0 or more, got nan"),
        ({"study": {"lrs": [1e-3, 0.001]}}, "study.lrs names 0.001 twice"),
        ({"study": {"seeds": True}}, "study.seeds must be a number, got true"),
        ({"training": {"epoch": 1}}, "unknown key 'training.epoch'"),
        ({"study": {"tasks": ["imdb"]}, "per_task": {"sst2": {}}}, "per_task.sst2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(values, says):
    with pytest.raises(UserError, match=says) as error:
        make_study({"task": {"data": "x.csv"}, **values})
    assert "\n" not in str(error.value)


ARMS = [
    "baseline",
    {"name": "no warm-up", "method": "baseline", "training": {"warmup": 0}},
    {"method": "oelm"},
]


def test_arms_have_a_name_a_method_and_settings_and_are_written_so(tmp_path):
    text = """[study]
arms = ["baseline", {name = "no warm-up", method = "baseline", training.warmup = 0}, {method = "oelm"}]
[task]
data = "x.csv"
"""
    (tmp_path / "s.toml").write_text(text)
    study = make_study(read_study(str(tmp_path / "s.toml")))
    assert list(study.arms) == ["baseline", "no warm-up", "oelm"]
    assert study.differs_in == ("training.warmup",)
    old = ["baseline", {"name": "baseline", "arm": "no warm-up", "training": {"warmup": 0}}, {"name": "oelm"}]
    same = make_study({"study": {"methods": old}, "task": {"data": "x.csv"}})
    assert same.arms == study.arms and same.plan == study.plan  # the spelling changes no digest of a plan
    written = study.as_written()["study"]
    assert written["arms"] == ARMS and "methods" not in written
    (tmp_path / "again.toml").write_text(to_toml(study.as_written()))
    assert make_study(read_study(str(tmp_path / "again.toml"))) == study
    plain = make_study({"study": {"methods": ["baseline", "oelm"]}, "task": {"data": "x.csv"}})
    assert "arms" not in plain.as_written()["study"]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"arms": ARMS, "methods": ["baseline", "oelm"]}, "leave one of them out"),
        ({"arms": "baseline"}, "must be a list"),
        ({"arms": ["baseline", {"name": "x", "training": {"warmup": 0}}]}, "needs its method"),
        ({"arms": ["baseline", {"method": "baseline", "training": {"warmup": 0}}]}, "needs a name"),
        ({"arms": ["baseline", {"name": "x", "method": "nonsense"}]}, "nonsense"),
        ({"arms": ["baseline", {"name": "baseline", "method": "oelm"}]}, "baseline twice"),
        (
            {"arms": ["baseline", {"name": "x", "method": "oelm", "training": {"lr": 1.0}}]},
            "leave it out, or give study.lrs one rate",
        ),
    ],
)
def test_arms_that_cannot_be_are_refused_in_one_line(table, says):
    with pytest.raises(UserError, match=says) as error:
        make_study({"study": table, "task": {"data": "x.csv"}})
    assert "\n" not in str(error.value)


def test_an_unknown_name_is_answered_with_those_that_exist(tmp_path):
    with pytest.raises(UserError, match="neither a file nor a shipped study"):
        read_study("nonsense")
    (tmp_path / "run.toml").write_text("[task]\nname = 'imdb'\n")
    with pytest.raises(UserError, match="no \\[study\\] table"):
        read_study(str(tmp_path / "run.toml"))
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "study.toml").write_text("[study]\n")
    with pytest.raises(UserError, match=f"oelm study --out {tmp_path / 's'} goes on with it"):
        read_study(str(tmp_path / "s"))


@pytest.mark.parametrize("name", list(shipped_studies()))
def test_every_shipped_study_is_one(name):
    study = make_study(read_study(name), name)
    assert study.title and len(study.arms) >= 2


@pytest.mark.parametrize("gpus", [0, 2])
def test_runs_side_by_side_take_no_more_threads_than_they_are_given(monkeypatch, gpus):
    """Else each takes all cores, and they wait for one another: on GPUs too."""
    import torch

    from oelm.study.launchers.local import slots_for

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 * 10**10, 8 * 10**10))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    study = make_study({"study": {"tasks": ["sst2"], "threads": 3, "jobs": 4}})
    slots = slots_for(study.table, 1e9)
    assert [slot.environment["OMP_NUM_THREADS"] for slot in slots] == ["3"] * 4
    places = [slot.environment.get("CUDA_VISIBLE_DEVICES") for slot in slots]
    assert places == (["0", "1", "0", "1"] if gpus else [None] * 4)


def test_a_worker_on_slurm_must_have_the_gpus_of_a_run():
    table = {"launcher": "slurm", "gpus_per_run": 4, "slurm": {"gpus": 2}}
    with pytest.raises(UserError, match=r"gpus_per_run is 4, but a worker asks for 2: raise"):
        make_study({"task": {"name": "imdb"}, "study": table})
    make_study({"task": {"name": "imdb"}, "study": table | {"slurm": {"gpus": 4}}})
    make_study({"task": {"name": "imdb"}, "study": table | {"slurm": {}}})  # asked for by `extra`, or none


def test_the_page_names_every_shipped_study():
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    assert not [name for name in shipped_studies() if f"`{name}`" not in page]


def test_studies_of_the_gap_have_seeds_enough_and_share_their_runs():
    """Their trials and runs can be imported from one into the other: the same settings but for the length."""
    studies = {name: make_study(read_study(name)) for name in shipped_studies() if name.startswith("lm-gap")}
    beside = make_study(read_study("lm-wikitext-2"))
    for study in (*(studies[name] for name in ("lm-gap", "lm-gap-controls", "lm-gap-starts")), beside):
        assert study.table.seeds >= fewest_seeds(len(study.contrasts)), study.title
    assert {*studies["lm-gap"].arms} < {*studies["lm-gap-screen"].arms}
    configs = {name: study.task_config("imdb-text").to_dict() for name, study in studies.items()}
    tokens = {config["training"]["batch_size"] * config["task"]["max_length"] for config in configs.values()}
    assert tokens == {32_768}
    lengths = {name: config["training"].pop("steps") for name, config in configs.items()}
    assert [lengths[f"lm-gap{end}"] for end in ("-short", "", "-screen", "-long")] == [300, 1500, 1500, 3000]
    assert (
        len({config["training"].pop("eval_every") / lengths[name] for name, config in configs.items()}) == 1
    )
    assert all(config == configs["lm-gap"] for config in configs.values())
    other = beside.task_config("wikitext-2").to_dict()
    assert other["training"].pop("steps") == 300 and other["training"].pop("eval_every") == 25
    assert other | {"task": configs["lm-gap"]["task"]} == configs["lm-gap"]
