"""oelm.train, oelm.study, oelm.report and oelm.Predictor: the command line from Python."""

import inspect
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import typer

import oelm
import oelm.study.design
from oelm.cli.main import app
from oelm.config import read_toml
from oelm.errors import UserError
from oelm.study.request import plan_study
from oelm.training.request import normalized_options
from oelm.training.run_result import RunResult
from tests.command_line import caller
from tests.data.made import labelled, sentence

SMALL = {"model": "gpt-tiny", "tokenizer": "train:300", "max_length": 16, "batch_size": 4}
# What only a terminal needs, and what only Python does; lists of the command line have one value each time.
NOT_IN_PYTHON = {"as_json", "gpu", "dry_run", "import_"}
ONLY_IN_PYTHON = {"show", "on_step", "on_evaluation"}


@pytest.mark.parametrize("verb", ["train", "study"])
def test_the_names_are_those_of_the_command_line(verb: str) -> None:
    command: Any = typer.main.get_command(app)
    words = {parameter.name.rstrip("_") for parameter in command.commands[verb].params} - {"help"}
    names = set(inspect.signature(getattr(oelm, verb)).parameters)
    assert words - {name.rstrip("_") for name in NOT_IN_PYTHON} == names - ONLY_IN_PYTHON


@pytest.fixture(scope="module")
def tales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tales") / "tales.txt"
    path.write_text("\n\n".join(f"{sentence(random.Random(i))} {i}" for i in range(30)))
    return path


@pytest.fixture(scope="module")
def run(tales: Path) -> tuple[RunResult, list[dict[str, Any]], list[dict[str, Any]]]:
    """A language model of one's own text, and what the callbacks heard."""
    steps: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    result = oelm.train(
        data=tales, **SMALL, steps=4, lr=1e-3, out=tales.parent / "lm", show=False,
        set={"training.log_every": 1, "training.eval_every": 2},
        on_step=steps.append, on_evaluation=evaluations.append,
    )  # fmt: skip
    return result, steps, evaluations


def test_the_callbacks_hear_what_the_log_says(run: Any) -> None:
    result, steps, evaluations = run
    log = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [entry for entry in log if entry["kind"] == "train"] and len(steps) == 4
    assert evaluations == [entry for entry in log if entry["kind"] == "eval"] and len(evaluations) == 2
    table = result.to_pandas()
    assert table["step"].tolist() == [entry["step"] for entry in log]
    assert table["perplexity"].dropna().tolist() == [e["metrics"]["perplexity"] for e in evaluations]


def test_a_result_says_where_and_how_good(run: Any) -> None:
    result = run[0]
    assert result.results == json.loads((result.folder / "results.json").read_text())
    assert f"test perplexity {result.metrics['perplexity']:.4f}" in repr(result)
    assert isinstance(oelm.Predictor(result.folder).generate("the film", tokens=5), str)
    with pytest.raises(UserError, match="predicts nothing of texts"):
        oelm.Predictor(result.folder)(["a text"])


def test_the_same_run_as_the_command_lines(
    run: Any, tales: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call, out = caller(monkeypatch, capsys), tmp_path / "lm"
    words = [word for key, value in SMALL.items() for word in (f"--{key.replace('_', '-')}", value)]
    words += ["--steps", 4, "--lr", "1e-3", "--set", "training.log_every=1", "--set", "training.eval_every=2"]
    assert call("train", "--data", tales, *words, "--out", out)[0] == 0
    assert read_toml(out / "config.toml") == read_toml(run[0].folder / "config.toml")
    ours, theirs = (json.loads((f / "results.json").read_text()) for f in (run[0].folder, out))
    assert ours["test"] == theirs["test"]


def test_a_callback_that_fails_ends_the_run(tales: Path, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(entry: dict[str, Any]) -> None:
        raise Enough

    options = {**SMALL, "steps": 4, "out": tmp_path / "x", "show": False}
    with pytest.raises(Enough):
        oelm.train(data=tales, **options, on_evaluation=stop)
    assert json.loads((tmp_path / "x" / "results.json").read_text())["status"] == "failed"


def test_a_study_is_planned_alike_from_lists_and_from_text(tmp_path: Path) -> None:
    data = str(labelled(tmp_path / "my.csv", 60))
    options = {"data": data, "text": "body", "label": "topic", "steps": 2}
    lists = {"methods": ["baseline", "oelm"], "lrs": [1e-3, 3e-4], "seeds": 3}
    text = {"methods": "baseline, oelm", "lrs": "1e-3,3e-4", "seeds": 3}
    one, folder = plan_study(None, tmp_path / "s", options, lists, {"study.widen": 0})
    other, _ = plan_study(None, tmp_path / "s", options, text, ["study.widen=0"])
    assert one.to_dict() == other.to_dict() and folder == tmp_path / "s"
    assert (one.table.lrs, one.table.seeds, one.table.widen) == ([3e-4, 1e-3], 3, 0)
    assert plan_study(None, None, options, {})[1] == Path("studies/my")


def test_mistakes() -> None:
    with pytest.raises(TypeError, match="unknown option 'lrr'; there are: task, model"):
        oelm.train(data="a.csv", lrr=1)
    with pytest.raises(TypeError, match="a study has no option 'lr'; it has task, methods, lrs and seeds"):
        oelm.study(data="a.csv", lr=1e-3)
    with pytest.raises(UserError, match="contradict"):
        oelm.train(data="a.csv", lm=True, kind="regression")
    with pytest.raises(UserError, match=r"training\.clip"):
        oelm.train(data="a.csv", set={"training.clip": -1})
    with pytest.raises(UserError, match=r"training\.clip.*-1"):  # a string is one assignment, not its letters
        oelm.train(data="a.csv", set="training.clip=-1")
    with pytest.raises(UserError, match=r"^data is a table in memory, but must name a file: .*to_csv"):
        oelm.train(data=pandas.DataFrame({"text": ["a"]}))
    with pytest.raises(
        UserError, match=r"^method is the name of a method; its fields are keys, such as set="
    ):
        oelm.train(data="a.csv", method=oelm.Method.from_dict({"name": "oelm"}))
    with pytest.raises(UserError, match=r"^stop_after is a number of seconds, such as 540, not '9m'"):
        oelm.train(data="a.csv", stop_after="9m")
    with pytest.raises(UserError, match="neither a file nor a shipped study"):
        oelm.study("none.toml")


def test_the_function_and_the_package_of_a_study_live_together() -> None:
    """`import oelm.study.design`, above, leaves `oelm.study` the function."""
    assert inspect.isfunction(oelm.study) and oelm.study.__module__ == "oelm.study.request"


def test_what_a_caller_of_python_relies_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_plugin.py").write_text("")
    labelled(tmp_path / "d.csv", 80)
    columns = {"text": "body", "label": "topic"}
    result = oelm.train(data=tmp_path / "d.csv", **columns, **SMALL, steps=2, out=tmp_path / "x", show=False,
                        plugin="own_plugin")  # fmt: skip
    assert result.config.plugins == ("own_plugin",)
    answers = oelm.Predictor(result.folder).file(tmp_path / "d.csv", **columns)
    right = sum(row["topic"] == row["predicted_label"] for row in answers)
    assert len(answers) == 80 and f"{right} of the 80 labels" in answers.compared
    with pytest.raises(UserError, match=r"x is the folder of a run; its model is .*x/model$"):
        oelm.load(result.folder)
    with pytest.raises(TypeError, match="unknown option 'stepz'"):
        oelm.train(data=tmp_path / "d.csv", stepz=2)
    with pytest.raises(oelm.Interrupted):
        oelm.train(data=tmp_path / "d.csv", **columns, **SMALL, steps=5000, out=tmp_path / "y", show=False,
                   stop_after=0.5)  # fmt: skip


def test_a_time_limit_holds_in_a_thread(tales: Path, tmp_path: Path) -> None:
    """Of a notebook's widget, or of asyncio.to_thread, where no signal arrives."""
    given = {"data": tales, **SMALL, "steps": 1000, "out": tmp_path / "x", "show": False, "stop_after": 0.5}
    with ThreadPoolExecutor(1) as pool, pytest.raises(oelm.Interrupted, match="time limit"):
        pool.submit(lambda: oelm.train(**given)).result()
    assert json.loads((tmp_path / "x" / "results.json").read_text())["status"] == "interrupted"


def test_a_tab_in_a_text_of_a_pair_is_a_space():
    asked = []
    predictor = object.__new__(oelm.Predictor)
    predictor.trained = SimpleNamespace(predict=lambda lines: asked.extend(lines) or [])
    predictor([("a\tpremise", "a hypothesis")])
    assert asked == ["a premise\ta hypothesis"]


@pytest.mark.parametrize("value", [None, float("nan"), 7, ("a premise", None)])
def test_a_missing_text_is_named(value):
    predictor = object.__new__(oelm.Predictor)
    predictor.trained = SimpleNamespace(predict=list)
    with pytest.raises(
        oelm.UserError, match=r"^texts\[1\] is .+: neither a text nor a tuple of two; leave it out"
    ):
        predictor(["fine", value])


@pytest.mark.parametrize(
    "texts",
    [pandas.DataFrame({"text": ["a"]}), {"text": ["a"]}, None, 7],
    ids=lambda texts: type(texts).__name__,
)
def test_what_is_no_list_of_texts_is_refused(texts):
    """Iterating over a table would predict the names of its columns."""
    predictor = object.__new__(oelm.Predictor)
    predictor.trained = SimpleNamespace(predict=list)
    with pytest.raises(
        oelm.UserError, match=rf"^texts must be .*, not {type(texts).__name__}; of a table give"
    ):
        predictor(texts)


def test_numbers_of_numpy_are_numbers():
    given = {"lr": np.float64(1e-3), "seed": np.int64(2), "data": Path("d.csv"), "text": None, "tracker": []}
    plain = normalized_options(given)
    assert plain == {"lr": 1e-3, "seed": 2, "data": "d.csv"}
    assert [type(value) for value in plain.values()] == [float, int, str]


def test_one_learning_rate_needs_no_list(tmp_path):
    """As for `--lrs 1e-3`."""
    study, _ = plan_study(None, tmp_path / "s", {"data": "d.csv"}, {"lrs": 1e-3})
    assert study.table.lrs == [1e-3]
