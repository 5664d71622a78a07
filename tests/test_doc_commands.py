"""Every command in a code block of README and docs: parsed, and run on small stand-ins wherever it can be.

Commands run in the order of their page, in a folder with files of the names that the pages use. What is only
parsed, so that an option or a file of ours that no longer exists is found, stands in ONLY_PARSED with the
reason.
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from oelm.cli.main import app
from oelm.config import make_config
from oelm.data.tokenizer import train_tokenizer
from oelm.study.stand_ins import StandIns
from oelm.system.files import delete
from tests import tiny
from tests.command_line import caller
from tests.data.made import WORDS, ciphers, write_csv
from tests.data.test_own_shapes import conll, questions, squad
from tests.data.test_plain_text import TEXTS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "README.zh-CN.md", "results/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PROGRAMS = ("oelm", "python", "pip", "export", "torchrun", "accelerate", "tensorboard")

# Pages whose commands another test runs.
ELSEWHERE = {
    "docs/data.md": "tests/data/test_docs.py",
    "docs/tutorial.md": "tests/test_tutorial.py",
}
# The beginning of a command -> why it is not run here.
ONLY_PARSED = {
    "torchrun ": "tests/training/test_shards.py has several processes",
    "oelm study fair-classification": "hours on a GPU",
    "pip ": "tests/test_package.py installs a wheel",
    "export ": "it says where a shared folder is",
    "oelm demo": "minutes",
    "oelm train GPT-02": "hours; tests/study/test_check.py makes its first steps",
    "oelm data prepare xnli": "data that is not ours to copy",
    "oelm data prepare sst2 --tokenizer all-MiniLM-L6-v2": "weights that are not ours to copy",
    "oelm data prepare imdb": "data that is not ours to copy",
    "oelm study --data imdb": "hours on a GPU, on prepared data",
    "oelm study results/minilm-sst2": "minutes on a GPU, on prepared data",
    "oelm study --task ptb-pos": "hours, and data that is not ours to copy",
    "oelm train --task ptb-pos": "data that is not ours to copy",
    "oelm study --data my.csv --text body --label topic --launcher": "tests/study/test_work.py has workers",
    "oelm study --data my.csv --text body --label topic --model": "tests/study/test_slurm.py has a Slurm",
    "oelm work": "tests/study/test_work.py has the study",
    "oelm claims results": "tests/claims/test_findings.py writes the page",
    "oelm bench": "minutes to hours; tests/test_bench.py measures",
    "python benchmarks/": "hours, most of them on a GPU",
    "python results/make.py": "hours on a GPU; tests/study/test_make_results.py makes small studies",
    "oelm train --data my.csv --model": "tests/test_docs.py",
    "oelm train --data ner": "tests/test_docs.py",
    "oelm train --data questions": "tests/test_docs.py",
    "oelm train --data articles": "tests/test_docs.py",
}
RUN_ALL_THE_SAME = ("oelm bench --read",)
QUICK = ["--steps", "2", "--batch-size", "4"]
ONE = ["--seeds", "1", "--lrs", "1e-3", "--jobs", "2"]
ONE += ["--set", "study.choose_seeds=1", "--set", "study.widen=0"]


def commands(page: str) -> list[str]:
    """The commands of a page, each on one line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.M | re.S):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split()
            answer = len(words) > 1 and words[0] == "oelm" and re.match(r"[\d−+]", words[1])
            if words and words[0] in PROGRAMS and not answer:
                found += [part.strip() for part in without_comment(line).split(" && ")]
    return found


def without_comment(line: str) -> str:
    return " ".join(re.sub(r"\s#.*", "", line).split()) if "'" not in line else re.sub(r"\s+# .*", "", line)


def reason(command: str) -> str | None:
    """Why a command is not run here."""
    if command.startswith(RUN_ALL_THE_SAME):
        return None
    return next((why for start, why in ONLY_PARSED.items() if f"{command} ".startswith(start)), None)


def test_the_list_of_what_is_only_parsed_is_current() -> None:
    every = [command for page in PAGES for command in commands(page)]
    assert len(every) > 80
    unused = [start for start in ONLY_PARSED if not any(f"{one} ".startswith(start) for one in every)]
    assert unused == []
    assert sum(reason(command) is None for command in every) > 40


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_understood(page: str) -> None:
    for command in commands(page):
        words = shlex.split(command.partition(" > ")[0])
        if words[:3] == ["python", "-m", "oelm"]:
            words = words[2:]
        match words:
            case ["oelm", *given]:
                understand(given)
            case ["python", script, *given]:
                known = (ROOT / script).read_text()
                assert all(f'"{word}"' in known for word in given if word.startswith("--")), command
            case ["torchrun", *given]:
                understand(given[given.index("oelm") + 1 :])
            case ["pip", "install", "-c", pins, wheel]:
                extras = re.findall(r"\w+", wheel.partition("[")[2])
                assert (ROOT / pins).is_file()
                assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
            case ["export", assignment]:
                assert re.match(r"OELM_(CACHE|DATA|TOKENIZER)_DIR=", assignment)
            case _:
                pytest.fail(f"{command}: no test knows this program")


def understand(words: list[str]) -> None:
    """Parse a command as typer does; an unknown verb, option or argument is an error."""
    command: Any = typer.main.get_command(app)
    if words[0].startswith("--"):
        assert words[0] in {name for parameter in command.params for name in parameter.opts}
        return
    while isinstance(getattr(command, "commands", None), dict):
        command = command.commands[words[0]]
        words = words[1:]
    command.make_context("oelm", list(words))


def shrunk(command: str) -> tuple[list[str], Path | None]:
    """A command's words with few steps, a small model and short texts; and where its output goes."""
    told, _, to = command.partition(" > ")
    words = shlex.split(told)[1:]
    if words[0] in ("train", "study"):
        if "--epochs" in words:
            at = words.index("--epochs")
            del words[at : at + 2]
        words += QUICK + ([] if "--max-length" in words else ["--max-length", "24"])
        model = words[words.index("--model") + 1] if "--model" in words else "gpt-"
        if model.startswith("gpt-"):
            words += ["--model", "gpt-tiny", "--tokenizer", "train:300"]
    if words[0] == "study":
        words += ONE
    if words[0] == "data" and "gpt2" in words:
        words += ["--tokenizer", "train:300"]
    if words[0] == "evaluate" and "--zero-shot" in words:
        words += ["--limit", "8"]
    if words[0] == "evaluate" and "--generation" in words:
        words += ["--prompts", "2", "--tokens", "4", "--prompt-tokens", "4"]
    if words[0] == "generate":
        words += ["--tokens", "4"]
    return [word for word in words if word != "--watch"], Path(to) if to else None


def make_world(root: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    """Files, models, runs, a study and records under the names that the pages use."""
    texts = [(f"a fine film about {WORDS[i % len(WORDS)]} {i}", "yes") for i in range(40)]
    texts += [(f"a dull film about {WORDS[i % len(WORDS)]} {i}", "no") for i in range(40)]
    head = ["body", "topic", "text", "label", "article", "summary"]
    write_csv(root / "my.csv", head, [[text, label, text, label, text, label] for text, label in texts])
    write_csv(root / "mails.csv", ["body"], [[text] for text, _ in texts[:5]])
    (root / "new.jsonl").write_text("\n".join(json.dumps({"body": text}) for text, _ in texts[:3]))
    (root / "texts.txt").write_text("\n".join(text for text, _ in texts[:3]))
    (root / "tales.txt").write_text("\n\n".join(TEXTS))
    (root / "run.toml").write_text('[task]\ndata = "my.csv"\n[training]\nseed = 7\n')
    (root / "ner.conll").write_text(conll()[0])
    (root / "questions.json").write_text(json.dumps(squad(questions())))
    ciphers(root / "articles.csv", 60)
    tokenizer = train_tokenizer([text for text, _ in texts], 300)
    for name, family in {"bert-base-uncased": "bert", "t5-small": "t5"}.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "VOCAB", 300)
            patch.setitem(tiny.SIZES, "vocab_size", 300)
            tiny.build(family).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    made = StandIns(root / "made", None, 1, shrink=True)
    for task in ("sst2", "wikitext-2"):
        config, _ = made.fit(make_config({"task": {"name": task, "tokenizer": "gpt2"}}))
        shutil.copytree(str(config.task.data_dir), root / "data", dirs_exist_ok=True)
    os.symlink(ROOT / "benchmarks", root / "benchmarks")
    shutil.copy(ROOT / "benchmarks" / "cpu.json", root / "b.json")
    shutil.copy(ROOT / "benchmarks" / "cpu.json", root / "bench.json")
    shutil.copytree(ROOT / "results" / "imdb-one-rate", root / "studies" / "imdb")
    own = ["--data", "my.csv", "--text", "body", "--label", "topic"]
    for words in (
        ["train", *own, "--out", "runs/x"], ["train", *own, "--method", "oelm", "--out", "runs/oelm"],
        ["train", *own, "--out", "runs/baseline"], ["train", "--data", "tales.txt", "--out", "runs/lm"],
        ["study", *own, "--out", "studies/mails"], ["study", *own, "--out", "s"],
    ):  # fmt: skip
        code, _, err = call(*shrunk(shlex.join(["oelm", *words]))[0])
        assert code == 0, err


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_commands_run(
    page: str,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each in its first page: README and its translation have the same."""
    before = [
        one for other in PAGES[: PAGES.index(page)] if other not in ELSEWHERE for one in commands(other)
    ]
    mine = [one for one in commands(page) if reason(one) is None and one not in before]
    if not mine:
        return
    monkeypatch.setenv("OELM_CACHE_DIR", str(world / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    call = caller(monkeypatch, capsys)
    if not (world / "ready").exists():
        (world / "made").mkdir()
        monkeypatch.chdir(world / "made")
        monkeypatch.setenv("OELM_DATA_DIR", str(world / "made" / "data"))
        make_world(world / "made", call)
        (world / "ready").touch()
    here = tmp_path / "here"
    shutil.copytree(world / "made", here, symlinks=True)
    monkeypatch.setenv("OELM_DATA_DIR", str(here / "data"))
    monkeypatch.chdir(here)
    for command in mine:
        words, to = shrunk(command)
        if words[0] in ("train", "study") and "--out" in words:
            delete(here / words[words.index("--out") + 1])  # what stood there for other pages
        code, out, err = call(*words)
        assert code == 0, (command, err)
        if to is not None:
            to.write_text(out)
