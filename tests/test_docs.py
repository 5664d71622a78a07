"""docs/pretrained.md: its commands and its program run as they stand, on a tiny model under the same name.

docs/reports.md: its commands, options, methods, models and experiments exist.
"""

import json
import re
import shlex
from pathlib import Path

import transformers
import typer

import oelm
from oelm.cli.main import app
from oelm.config import resolve_config
from oelm.models.gpt_sizes import SIZES
from oelm.study.catalogue import list_experiments
from tests.data.made import ciphers
from tests.data.test_own_shapes import conll, questions, squad
from tests.models.test_pretrained import oelm_cli, save, world  # noqa: F401 - fixtures

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "pretrained.md").read_text()
REPORTS = (DOCS / "reports.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_on_pretrained_models(oelm_cli, world, save):  # noqa: F811
    for name, family in {"bert-base-uncased": "bert", "t5-small": "t5", "facebook/bart-base": "bart"}.items():
        save(name, family)
    (world / "my.csv").write_text((world / "three.csv").read_text())
    (world / "ner.conll").write_text(conll()[0])
    (world / "questions.json").write_text(json.dumps(squad(questions())))
    texts = ciphers(world / "articles.csv", 60).read_text()
    (world / "articles.csv").write_text(texts.replace("source,target", "article,summary"))
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 9
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] == "train":
            words += ["--max-length", "24", "--steps", "2"]
        code, _, err = oelm_cli(*words)
        assert code == 0, (command, err)
    for program in blocks("python"):
        exec(program, {})
    assert oelm.load(str(world / "bert-oelm")).config.oelm["method"]["name"] == "oelm"
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        world / "runs" / "probe" / "model"
    )
    assert plain.config.num_labels == 3
    metric = {"ner": "entity_f1", "answers": "f1", "t5": "f1", "bart": "f1"}
    for name in metric:
        results = json.loads((world / "runs" / name / "results.json").read_text())
        assert results["metric"] == metric[name] and 0 <= results["test"]["metrics"][metric[name]] <= 1
        assert results["parameters"]["frozen"] > 0 and results["architecture"] in ("bert", name)
    for name, line in {"ner": "the film", "answers": "who?\ta dog and a cat", "t5": "the dog"}.items():
        (world / "line.txt").write_text(f"{line}\n")
        assert oelm_cli("predict", f"runs/{name}", "line.txt")[0] == 0


def test_every_method_it_names_is_a_preset():
    names = re.findall(r"^\| `([a-z0-9-]+)`(?:, `([a-z0-9-]+)`)? \|", PAGE, flags=re.MULTILINE)
    named = {name for pair in names for name in pair if name}
    assert {"baseline", "frozen", "oelm-polar-scaled", "linear-probe", "top-2"} <= named <= set(oelm.PRESETS)


def test_every_command_of_the_page_on_the_reports_exists():
    known = {experiment.id for experiment in list_experiments()}
    commands = re.findall(r"`(?:torchrun \S+ \d -m )?oelm ([a-z][^`]*)`", REPORTS)
    assert len(commands) >= 20
    for line in commands:
        words, command = shlex.split(line), typer.main.get_command(app)
        while words and isinstance(getattr(command, "commands", None), dict):
            command = command.commands[words.pop(0)]
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, line
        if command.name == "train" and words[0][0] not in ".-":
            assert words[0] in known, line
    assert all(id in REPORTS for id in known)


def test_its_methods_models_and_keys_exist():
    methods = re.findall(r"--methods? ([a-z0-9,-]+)", REPORTS)
    methods += re.findall(r"\| `((?:oelm|random)-[a-z-]+)` \|", REPORTS)
    assert {name for names in methods for name in names.split(",")} <= set(oelm.PRESETS)
    assert set(re.findall(r"`(gpt2?-[a-z0-9-]+)`", REPORTS)) <= set(SIZES)
    for setting in re.findall(r"--set ((?:training|model)\.[a-z_]+=[0-9.]+)", REPORTS):
        resolve_config({"task": {"name": "imdb"}}, None, {}, [setting])
