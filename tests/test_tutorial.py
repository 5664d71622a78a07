"""The site's pages: the tutorial runs as it stands, and the reference names all that is public."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

import oelm
from oelm.cli.main import app
from tests.command_line import caller
from tests.data.made import write_csv

DOCS = Path(__file__).parents[1] / "docs"
SMALL = ["--tokenizer", "train:300", "--steps", "2", "--batch-size", "4"]
QUICK = ["--seeds", "1", "--set", "study.choose_seeds=1", "--set", "study.widen=0"]


@pytest.mark.slow
def test_the_tutorial(tmp_path, monkeypatch, capsys):
    """Its commands with fewer steps, on fewer reviews."""
    reviews = [
        [f"a {word} film {i}", label]
        for i in range(60)
        for word, label in (("fine", "positive"), ("dull", "negative"))
    ]
    small = write_csv(tmp_path / "small.csv", ["text", "label"], reviews)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oelm.data.demo.demo_files", lambda: (small, small))
    call, commands = caller(monkeypatch, capsys), []
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.S):
        if language == "python":
            exec(compile(block, "docs/tutorial.md", "exec"), {})
            continue
        for line in block.splitlines():
            words = shlex.split(line.replace("--train-size 2000", "--train-size 40"))[1:]
            more = {"train": SMALL, "study": SMALL + QUICK}.get(words[0], [])
            code, _, err = call(*words, *more)
            assert code == 0, (line, err)
            commands.append(words[0])
    assert commands == ["data", "study", "study", "predict", "train", "audit", "evaluate"]
    assert (tmp_path / "s" / "report.html").exists()
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 3


def test_the_reference_names_all_that_is_public():
    page = (DOCS / "reference.md").read_text()
    public = set(oelm.__all__) - {"__version__"}
    assert {name for name in public if not re.search(rf"\b{name}\b", page)} == set()
    documented = re.findall(r"heading: oelm\.(\w+),", page)
    assert len(documented) > 20 and all(getattr(oelm, name).__doc__ for name in documented)


def test_the_command_line_of_the_reference():
    """It has every verb and every option, as typer has them."""
    import typer

    text = runpy.run_path(str(DOCS / "hooks" / "command_line.py"))["markdown"]()
    sections = dict(re.findall(r"^#+ (oelm [\w ]+)\n(.*?)(?=^#+ oelm|\Z)", text, re.M | re.S))
    commands = typer.main.get_command(app).commands
    for name in commands["data"].commands:
        commands[f"data {name}"] = commands["data"].commands[name]
    assert {f"oelm {name}" for name in commands} == set(sections)
    for name, command in commands.items():
        options = {opt for p in command.params if p.param_type_name == "option" for opt in p.opts} - {
            "--help"
        }
        assert options <= set(re.findall(r"`(-[\w-]+)`", sections[f"oelm {name}"])), name
