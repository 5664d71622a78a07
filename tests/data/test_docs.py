"""docs/data.md: every command and the program in it run as they stand."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from oelm.cli import main as cli
from tests.data.made import ciphers, labelled, write_csv
from tests.data.test_own_shapes import conll, questions, squad
from tests.data.test_plain_text import TEXTS

OWN = (".csv", ".conll", ".json")  # files of one's own
PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def _commands(verb: str = "oelm data") -> list[str]:
    return [line for block in _blocks("sh") for line in block.splitlines() if line.startswith(verb)]


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


@pytest.mark.slow
def test_a_language_model_of_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tales").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "tales" / f"{i}.txt").write_text(text)
    (tmp_path / "tales.txt").write_text("\n\n".join(TEXTS))
    write_csv(tmp_path / "mails.csv", ["body"], [[text] for text in TEXTS])
    trained = _commands("oelm train")
    assert len(trained) == 3
    for command in trained:
        small = " --tokenizer train:300 --max-length 16 --batch-size 4 --steps 2"
        assert _run(command + small, monkeypatch) == 0, command
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("lm", "lm-2", "lm-3")]
    assert {result["metric"] for result in results} == {"perplexity"}
    (generate,) = _commands("oelm generate")
    assert _run(generate, monkeypatch) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Once upon a time")


@pytest.mark.slow
def test_the_commands_for_tasks(data_dir: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [command for command in _commands() if not any(suffix in command for suffix in OWN)]
    assert len(commands) == 4
    for command in commands:
        assert _run(command, monkeypatch) == 0, command


def test_every_task_is_on_the_page() -> None:
    from oelm.data import TASKS

    assert [name for name in TASKS if name not in PAGE] == []
    folders = {task.folder for task in TASKS.values() if task.folder != task.name}
    assert [name for name in folders if f"`{name}`" not in PAGE] == []
