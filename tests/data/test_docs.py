"""docs/data.md: every command and the program in it run as they stand."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from oelm.cli import main as cli
from tests.data.made import ciphers, labelled
from tests.data.test_own_shapes import conll, questions, squad

OWN = (".csv", ".conll", ".json")  # files of one's own
PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def _commands() -> list[str]:
    return [line for block in _blocks("sh") for line in block.splitlines()]


def _run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def test_the_commands_for_a_file_and_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    labelled(tmp_path / "my.csv", 400)
    texts = ciphers(tmp_path / "articles.csv", 100).read_text()
    (tmp_path / "articles.csv").write_text(texts.replace("source,target", "article,summary"))
    (tmp_path / "ner.conll").write_text(conll()[0])
    (tmp_path / "questions.json").write_text(json.dumps(squad(questions())))
    commands = [command for command in _commands() if any(suffix in command for suffix in OWN)]
    assert len(commands) == 6
    for command in commands:
        assert _run(command, monkeypatch) == 0, command
    for program in _blocks("python"):
        exec(compile(program, "docs/data.md", "exec"), {})


def test_the_commands_for_tasks(data_dir: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [command for command in _commands() if not any(suffix in command for suffix in OWN)]
    assert len(commands) == 4
    for command in commands:
        assert _run(command, monkeypatch) == 0, command


def test_every_task_is_on_the_page() -> None:
    from oelm.data import TASKS

    assert [name for name in TASKS if name not in PAGE] == []
