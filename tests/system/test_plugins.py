"""Plugins: the module of docs/extending.md, and one that is installed, beside the package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from oelm.config import resolve_config
from oelm.data.tasks import KINDS, task_kind
from oelm.errors import UserError
from oelm.method import PRESETS
from oelm.models.families import FAMILIES
from oelm.study.launchers import LAUNCHERS
from oelm.study.request import plan_study
from oelm.system.plugins import Registry, load_plugins
from oelm.training.predictions import METRICS
from tests.data.made import wordpiece, write_csv

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
RUN = [
    "--data", "d.csv", "--kind", "absolute-regression", "--tokenizer", "train:300", "--max-length", "16",
    "--model", "gpt-tiny", "--steps", "2", "--batch-size", "8",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the plugin of the docs and some data."""
    folder = tmp_path_factory.mktemp("outside")
    (module,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (folder / "my_plugin.py").write_text(module)
    write_csv(folder / "d.csv", ["text", "label"], [[f"words {i} and more", i / 7] for i in range(60)])
    return folder


def oelm(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "oelm", *words], cwd=folder, text=True, capture_output=True,
        env={**os.environ, "OELM_CACHE_DIR": str(folder / "cache"), **environment},
    )  # fmt: skip


def one_line(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_kind_and_a_method_of_the_current_folder(folder):
    done = oelm(
        folder, "train", *RUN, "--plugin", "my_plugin", "--method", "frozen-values", "--out", "r", "--json"
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["metric"] == "mae" and results["method"] == "frozen-values"
    assert results["parameters"]["frozen"] > 0
    assert 'plugins = ["my_plugin"]' in (folder / "r" / "config.toml").read_text()
    done = oelm(folder, "evaluate", "r", "--plugin", "my_plugin", "--json")
    assert json.loads(done.stdout)["metrics"]["mae"] == pytest.approx(results["test"]["metrics"]["mae"])
    # A record makes nobody import anything.
    assert "unknown task kind 'absolute-regression'" in one_line(oelm(folder, "evaluate", "r"))


@pytest.mark.slow
def test_a_family_of_the_current_folder(folder):
    config = transformers.ElectraConfig(
        vocab_size=200, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        embedding_size=32,
    )  # fmt: skip
    transformers.ElectraForSequenceClassification(config).save_pretrained(folder / "electra")
    wordpiece().save_pretrained(folder / "electra")
    words = ["convert", "electra", "--method", "oelm", "--out", "frozen"]
    assert "'electra'" in one_line(oelm(folder, *words))
    done = oelm(folder, *words, "--plugin", "my_plugin")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_studys_workers_load_the_plugin_and_its_launcher_starts_them(folder):
    words = ["--methods", "baseline,frozen-values", "--lrs", "1e-3", "--set", "study.widen=0", "--out", "s"]
    words += ["--set", "study.launcher=one-at-a-time"]
    done = oelm(folder, "study", *RUN, *words, "--seeds", "1", "--plugin", "my_plugin", "--json")
    assert done.returncode == 0, done.stderr
    assert {group["metric"] for group in json.loads(done.stdout)["settings"]} == {"mae"}
    (compared,) = json.loads(done.stdout)["comparisons"]
    assert "no_items" not in compared["problems"]
    assert compared["combined"]["mean"] == pytest.approx(compared["by_seeds"]["mean"])
    done = oelm(folder, "study", "--out", "s", "--seeds", "2", "--json")  # goes on: study.toml names it
    assert done.returncode == 0, done.stderr
    assert len(list((folder / "s").rglob("results.json"))) == 4
    assert "frozen-values" in one_line(oelm(folder, "report", "s"))
    assert oelm(folder, "report", "s", "--plugin", "my_plugin").returncode == 0


@pytest.mark.slow
def test_an_installed_plugin_is_found_by_its_entry_point(folder, tmp_path):
    (tmp_path / "installed.py").write_text(
        "from oelm.method import PRESETS, Method\n"
        "PRESETS.add('from-afar', Method('from-afar', freeze={'o': 'all'}))\n"
    )
    metadata = tmp_path / "installed-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[oelm.plugins]\nanything = installed\n")
    path = f"{tmp_path}:{ROOT / 'src'}"
    words = ["train", *RUN[:2], "--kind", "regression", *RUN[4:], "--method", "from-afar", "--out", "afar"]
    assert "unknown method 'from-afar'" in one_line(oelm(folder, *words))
    done = oelm(folder, *words, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "afar" / "results.json").read_text())["method"] == "from-afar"


def test_what_cannot_be_loaded_is_said_in_one_line(folder):
    (folder / "taken.py").write_text("from oelm.method import *\nPRESETS.add('oelm', PRESETS['baseline'])\n")
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    for name, what in (
        ("taken", "plugin 'taken': there is a method 'oelm' already"),
        ("broken", "plugin 'broken' cannot be imported (ModuleNotFoundError"),
        ("absent", "plugin 'absent' cannot be imported"),
        ("../x.py", "plugin '../x.py' cannot be imported"),
    ):
        assert what in one_line(oelm(folder, "train", *RUN, "--plugin", name, "--out", "n"))
    assert not (folder / "n").exists()
    (folder / "run.toml").write_text('plugins = ["absent"]\n')
    assert "plugin 'absent'" in one_line(oelm(folder, "train", "--config", "run.toml", "--out", "n"))


@pytest.mark.parametrize("plugins", ['"my_plugin"', "3", "[3]"])
def test_plugins_that_are_no_list_of_names_are_refused_in_a_file(tmp_path, plugins):
    """A study's were taken letter by letter, or ended in a traceback."""
    file = tmp_path / "any.toml"
    file.write_text(f"plugins = {plugins}\n")
    with pytest.raises(UserError, match=r"plugins(\.0)? = .* should be a valid (list|string)"):
        resolve_config({}, file, {}, ())
    with pytest.raises(UserError, match="plugins must be a list of names"):
        plan_study(None, tmp_path / "s", {"data": "d.csv"}, {}, profile=file)


def test_a_registry_knows_its_names():
    registry: Registry[str] = Registry("thing", {"pi": "math:pi"})
    assert registry["pi"] == pytest.approx(3.14159, abs=1e-5) and list(registry) == ["pi"]
    registry.add("other", "x:y")
    with pytest.raises(UserError, match="there is a thing 'other' already"):
        registry.add("other", "x")
    with pytest.raises(UserError, match="unknown thing 'none'; known: pi, other"):
        registry.find("none")
    with pytest.raises(UserError, match="unknown task kind 'none'; known: classification, lm, token"):
        task_kind("none")
    with pytest.raises(UserError, match="cannot be imported"):
        load_plugins(["no.such.module"])
    for built_in in (KINDS, PRESETS, FAMILIES, LAUNCHERS):
        with pytest.raises(UserError, match="already"):
            built_in.add(next(iter(built_in)), None)  # type: ignore[arg-type]


def test_nothing_outside_the_kinds_asks_for_one_by_name():
    """A kind that is not known there must work there."""
    names = "|".join(KINDS)
    question = re.compile(rf"kind\b[^\n]*(==|!=| in )[^\n]*[\"']({names})[\"']")
    for path in sorted((ROOT / "src" / "oelm").rglob("*.py")):
        if path.parent.name not in ("tasks", "bench", "claims"):  # these have kinds of cases of their own
            assert not question.search(path.read_text()), path


def test_metrics_are_the_kinds_own():
    assert {name: better for kind in KINDS.values() for name, better in kind.metrics.items()} == METRICS
