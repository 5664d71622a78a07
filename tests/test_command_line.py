"""What the command line shows: defaults in the help, completion in the shell, the end of a command."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from oelm.cli import show
from oelm.cli.bench import ON_CPU, ON_GPU
from oelm.cli.main import app
from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.study.analysis import analyse, unfinished
from oelm.study.design import StudyConfig
from oelm.study.kept_models import best_model
from oelm.study.report import summary
from oelm.system.files import delete
from tests.command_line import caller
from tests.study.report_folders import make_study


def _help(verb: str) -> dict[str, str]:
    """The help of each option of a verb, by its name."""
    command: Any = typer.main.get_command(app)
    return {option.name: option.help or "" for option in command.commands[verb].params}


def test_the_help_names_the_defaults_that_hold() -> None:
    train, study, run, table = _help("train"), _help("study"), RunConfig(), StudyConfig()
    for name, value in {
        "lr": run.training.lr, "epochs": run.training.epochs, "batch_size": run.training.batch_size,
        "seed": run.training.seed, "max_length": run.task.max_length,
    }.items():  # fmt: skip
        told = re.search(r"[Dd]efault: ([\de.-]+?)\.?$", train[name])
        assert told, train[name]
        assert float(told[1]) == value
    assert f"{run.training.precision} (the default)" in train["precision"]
    assert f"{run.method.name} (the default)" in train["method"]
    assert f"default: {run.task.text}" in train["text"] and f"default: {run.task.label}" in train["label"]
    assert f"Default: {','.join(map(str, table.methods))}" in study["methods"]
    grid = re.search(r"default: (.+)\.$", study["lrs"])
    assert grid and [float(lr) for lr in grid[1].split(",")] == table.lrs
    assert f"{table.launcher} (the default)" in study["launcher"]
    bench = _help("bench")
    for name in ("steps", "rounds", "max_length", "tokens_per_step"):
        assert f"Default: {ON_CPU[name]}, on a GPU {ON_GPU[name]}." in bench[name]
    assert f"default: {table.seeds}" in study["seeds"] and f"default: {table.margin:g}" in study["margin"]


def test_no_help_names_a_default_beside_the_one_that_typer_prints() -> None:
    command: Any = typer.main.get_command(app)
    verbs = [*command.commands.values(), *command.commands["data"].commands.values()]
    twice = [
        (verb.name, option.name)
        for verb in verbs
        for option in verb.params
        if option.default not in (None, False, [], ()) and "efault" in (option.help or "")
    ]
    assert not twice


def test_the_shell_completes_verbs_and_options() -> None:
    words = {"_OELM_COMPLETE": "complete_bash", "COMP_WORDS": "oelm tr", "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['oelm']; from oelm.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program], env=words | {"PYTHONPATH": ":".join(sys.path)},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.split() == ["train"]


def test_a_finished_run_says_where_it_is_and_what_is_next(tmp_path: Path) -> None:
    measured = {"split": "test", "step": 1500, "metrics": {"accuracy": 0.9, "f1_macro": 0.8}}
    results = {
        "metric": "f1_macro", "chosen_on": "validation", "best": {"split": "validation"}, "test": measured,
        "method": "oelm", "task": "mine", "steps": 2000, "warnings": [],
        "references": {"tfidf_logreg": {"test": {"f1_macro": 0.7}}},
    }  # fmt: skip
    assert show.trained(results, tmp_path).splitlines() == [
        "oelm on mine: test macro F1 0.8000 (step 1,500 of 2,000, chosen on validation)",
        "  TF-IDF + logistic regression: 0.7000",
        f"run      {tmp_path}",
    ]
    (tmp_path / "model").mkdir()
    told = show.trained(results, tmp_path).splitlines()
    assert told[-2] == f"model    {tmp_path}/model"
    assert told[-1] == f"next     oelm predict {tmp_path} texts.txt; oelm report {tmp_path}"
    measured["metrics"] |= {"perplexity": 9.5}  # which an encoder-decoder has, too
    for kind, verb in {"lm": "generate", "seq2seq": "predict", "classification": "predict"}.items():
        (tmp_path / "model" / "config.json").write_text(json.dumps({"task_kind": kind}))
        assert f"next     oelm {verb} {tmp_path} " in show.trained(results, tmp_path)


def test_evaluation_as_a_table_has_the_classes_by_name() -> None:
    metrics = {"loss": 1234.5, "accuracy": 0.6, "confusion": [[2, 1], [1, 1]]}
    answer = {"task": "mine", "split": "test", "items": 5, "metrics": metrics, "labels": ["no", "yes"]}
    assert show.evaluated(answer).splitlines() == [
        "mine, test: 5 items",
        "loss      1,234.5",
        "accuracy   0.6000",
        "",
        "class  items  precision  recall      F1",
        "no         3     0.6667  0.6667  0.6667",
        "yes        2     0.5000  0.5000  0.5000",
    ]


def test_the_status_of_a_study_is_its_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oelm_cli = caller(monkeypatch, capsys)
    folder = Path(__file__).parent.parent / "results" / "ptb-pos"
    code, out, err = oelm_cli("status", folder)
    assert code == 0, err
    assert "completed" in out and summary(analyse(folder)) in out
    assert out.splitlines()[-1] == f"next     oelm report {folder}"  # nobody goes on with published records


def test_only_an_unfinished_study_goes_on(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "my study", items=40)
    (folder / "runs").rename(tmp_path / "imdb")  # as studies have it: runs/TASK/METHOD/RUN
    (folder / "runs").mkdir()
    (tmp_path / "imdb").rename(folder / "runs" / "imdb")
    analysis = analyse(folder)
    assert not unfinished(analysis) and show.after_study(folder, analysis) == ""
    runs = sorted(path.parent for path in folder.glob("runs/*/*/*/results.json"))
    measured = [run for run in runs if json.loads((run / "results.json").read_text())["test"]]
    for run, value in zip(measured, (0.6, 0.9), strict=False):
        results = json.loads((run / "results.json").read_text())
        results["best"]["metrics"][results["metric"]] = value
        (run / "results.json").write_text(json.dumps(results))
        (run / "model").mkdir()
        (run / "model" / "config.json").write_text(json.dumps({"task_kind": "lm"}))
    assert show.after_study(folder, analysis) == f"oelm generate '{folder}' 'Once upon a time'"
    assert best_model(folder).run == measured[1]
    delete(measured[-1])
    assert show.after_study(folder, analyse(folder)) == f"oelm study --out '{folder}' (goes on with it)"
    for damage in ({}, {"best": None}, {"best": {"metrics": {}}}):
        (measured[0] / "results.json").write_text(json.dumps(damage))
        with pytest.raises(UserError, match=r"results\.json .*score"):
            best_model(folder)


def test_the_status_of_an_unfinished_study_shows_no_test_figures(tmp_path, monkeypatch, capsys) -> None:
    folder, oelm_cli = make_study(tmp_path / "s", items=40), caller(monkeypatch, capsys)
    assert summary(analyse(folder)) in oelm_cli("status", folder)[1]
    delete(next(folder.glob("runs/1/measured-*-s5")))
    code, out, err = oelm_cli("status", folder)
    assert code == 0 and "completed" in out, err
    assert "test figures are shown when the study is complete" in out
    figures = [line for line in summary(analyse(folder)).splitlines() if re.search(r"\d", line)]
    assert figures and not any(line in out for line in figures)
    assert out.splitlines()[-1] == f"next     oelm study --out {folder} (goes on with it)"


@pytest.mark.parametrize(("words", "told"), [
    (("experiments",), "oelm experiments AGNews-baseline"), (("doctor",), "oelm demo"),
    (("report", "results/ptb-pos"), "open the page in a browser"),
])  # fmt: skip
def test_the_end_of_a_command_says_what_is_next(words, told, monkeypatch, capsys, tmp_path):
    root = Path(__file__).parent.parent
    if words[0] == "report":
        words = (words[0], shutil.copytree(root / words[1], tmp_path / "records"))
    code, out, err = caller(monkeypatch, capsys)(*words)
    assert code == 0, err
    assert out.splitlines()[-1].startswith(f"next     {told}")
