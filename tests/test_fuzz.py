"""Commands and files with mistakes in them: never a traceback or a hang, one line, and nothing is left.

Every case is a valid command, or a valid file and a command that reads it, with one or two seeded mutations.
What still works after them may work. `python -m tests.test_fuzz GROUP NUMBER` prints a case.
"""

import io
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from oelm.config import MethodConfig, ModelConfig, TaskConfig, TrainingConfig
from oelm.study.design import StudyConfig
from oelm.system.files import delete
from tests.command_line import caller

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SLOWEST = 20.0  # seconds of one command: beyond it, it hangs
ROOM = 6 << 30  # bytes of memory that a case may ask for
CASES = 60  # of each group of commands, and half of it of each file
QUICK = ["--steps", "1", "--stop-after", "5s"]
NO_RUNS = ["--import", "run"]  # of a study: it is resolved and prepared, and no process is started
OWN = ["--tokenizer", "train:300"]
SMALL = ["--tokenizer", "train:300", "--max-length", "24", "--model", "gpt-tiny", "--batch-size", "4"]

COMMANDS: dict[str, list[tuple[list[str], list[str]]]] = {  # group -> commands: what is mutated, what is not
    "train": [
        (["train", "--data", "d.csv", *SMALL, "--method", "oelm", "--lr", "1e-3", "--seed", "1"], QUICK),
        (["train", "--data", "d.jsonl", "--text", "text", "--label", "label", "--train-size", "20", *SMALL],
         QUICK),
        (["train", "--config", "run.toml", "--out", "new", "--precision", "fp32"], QUICK),
        (["train", "GPT-02", "--data-dir", "data", "--epochs", "0.1", *SMALL], ["--stop-after", "3s"]),
        (["train", "--data", "d.csv", "--model", "bert", "--max-length", "24", "--out", "new"], QUICK),
        (["train", "--task", "imdb", "--data-dir", "data", *SMALL, "--train-on", "mnli"], QUICK),
    ],
    "settings": [(["train", "--data", "d.csv", *SMALL, "--out", "new"], QUICK)],
    "study": [
        (["study", "--data", "d.csv", "--methods", "baseline,oelm", "--lrs", "1e-3,1e-2", "--seeds", "5",
          "--margin", "1", "--jobs", "1", *SMALL, "--out", "s"], ["--steps", "1", *NO_RUNS]),
        (["study", "study.toml", "--out", "s", "--max-seeds", "10", "--lang", "en"], NO_RUNS),
        (["study", "--task", "imdb", "--data-dir", "data", "--until-decided", *SMALL], NO_RUNS),
    ],
    "data": [
        (["data", "inspect", "d.csv", "--text", "text", "--label", "label", *OWN], []),
        (["data", "prepare", "d.jsonl", "--max-length", "24", "--out", "p", "--split-seed", "1"], OWN),
        (["data", "inspect", "d.parquet", "--kind", "classification", "--test-file", "d.csv"], OWN),
        (["data", "list", "--json"], []),
        (["data", "inspect", "tales.txt", "--max-length", "16", *OWN], []),
        (["train", "--data", "tales.txt", "--lm", *SMALL, "--max-length", "16", "--out", "new"], QUICK),
    ],
    "machines": [
        (["work", "done", "--jobs", "1", "--expires", "5s"], ["--idle", "1s"]), (["doctor", "--json"], []),
        (["demo", "--lang", "xx", "--out", "s"], ["--nothing"]), (["cancel", "done"], []),
        (["bench", "--work", "lm", "--size", "gpt-tiny", "--max-length", "16", "--rounds", "1", "--steps",
          "1", "--tokens-per-step", "32", "--leave-out", "x", "--json", "b.json"], ["--data", "nowhere"]),
        (["bench", "--read", "b.json", "--chart", "b.svg"], []),
    ],
    "trained": [
        (["evaluate", "run", "--split", "test", "--max-length", "24"], []),
        (["evaluate", "run", "--data", "d.jsonl", "--test-file", "d.csv"], []),
        (["predict", "run", "lines.txt"], []),
        (["predict", "run", "d.csv", "--text", "text", "--label", "label", "--out", "p.csv"], []),
        (["predict", "done", "d.parquet", "--out", "p.jsonl"], []),
        (["explain", "run", "done", "--texts", "2", "--lines", "lines.txt", "--out", "heads.html"], []),
        (["explain", "done", "--split", "test", "--texts", "2", "--json"], []),
        (["generate", "run", "a text", "--tokens", "3", "--temperature", "1", "--top-k", "5"], []),
        (["audit", "run", "--json"], []),
        (["convert", "bert", "--method", "oelm", "--set", "method.gain=1.0", "--out", "new"], []),
    ],
    "looking": [
        (["status", "run", "--json"], []), (["logs", "run"], []), (["experiments", "GPT-02", "--json"], []),
        (["experiments", "--read", "run.toml"], []), (["report", "run", "--lang", "en"], []),
        (["report", "run", "--publish", "new"], []), (["claims", "run", "--json"], []), (["--version"], []),
    ],
}  # fmt: skip

FILES: dict[str, list[list[str]]] = {  # a file -> commands that read it
    "d.csv": [["data", "inspect", "d.csv", *OWN], ["train", "--data", "d.csv", *SMALL, *QUICK]],
    "d.jsonl": [["data", "inspect", "d.jsonl", *OWN]],
    "d.parquet": [["data", "inspect", "d.parquet", *OWN]],
    "run.toml": [["train", "--config", "run.toml", *QUICK]],
    "study.toml": [["study", "study.toml", *NO_RUNS]],
    "bert/config.json": [["convert", "bert", "--out", "new"],
                         ["train", "--data", "d.csv", "--model", "bert", "--max-length", "24", *QUICK]],
    "bert/model.safetensors": [["convert", "bert", "--out", "new"]],
    "bert/tokenizer.json": [["convert", "bert", "--out", "new"]],
    "run/results.json": [["status", "run"], ["report", "run"]],
    "run/config.toml": [["audit", "run"], ["predict", "run", "lines.txt"], ["report", "run"]],
    "run/metrics.jsonl": [["logs", "run"], ["status", "run"]],
    "run/model/config.json": [["predict", "run", "lines.txt"], ["audit", "run"]],
    "run/freeze_audit.json": [["audit", "run"]],
    "tales.txt": [["data", "inspect", "tales.txt", *OWN], ["predict", "run", "tales.txt"],
                  ["train", "--data", "tales.txt", "--lm", *SMALL, *QUICK]],
    "done/study.toml": [["predict", "done", "lines.txt"], ["status", "done"],
                        ["work", "done", "--idle", "1s"]],
    "done/runs/d/oelm/kept/results.json": [["predict", "done", "lines.txt"], ["report", "done"]],
}  # fmt: skip

TEXTS = [
    "", " ", "-1", "0", "1", "1.5", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000, "true", "null", "[",
    "[" * 3000, "{}", "a,b", ",", "a=b", "=", "x" * 300, "é" * 130, "..", "/", "/dev/null", "/dev/zero",
    "pipe", "d.csv", "run", "bert", "nowhere", "no/x", "~", "--", "-", "--json", "\udcff", "\u202e", "\n",
    "a b", "%s{}", "oelm", "imdb", "train:300", "train:-1", "train:" + "9" * 30, "gpt-tiny",
    "gpt-none", "text", "label", "99999999999h",
]  # fmt: skip
BYTES = [b"\0", b"\xff", b'"', b"\n", b",", b"[" * 3000, b"9" * 5000, b"=", b"nan", b"\xed\xa0\x80"]
VALUES = [
    None, True, -1, 0, 1, 1.5, 2**31, 10**30, float("nan"), float("inf"), "", "x", "\ud800", "é", [], {},
    [[]], [1], {"a": {}},
]  # fmt: skip


def settings() -> list[str]:
    tables = {"task": TaskConfig, "model": ModelConfig, "method": MethodConfig, "training": TrainingConfig}
    keys = [f"{table}.{key}" for table, of in tables.items() for key in of.__dataclass_fields__]
    return [
        *keys,
        *(f"study.{key}" for key in StudyConfig.__dataclass_fields__),
        *tables,
        "arm",
        "plugins",
        "oven.heat",
    ]


def mutated(words: list[str], dice: random.Random) -> list[str]:
    """A command line with one or two mistakes; its verb stays."""
    words = list(words)
    for _ in range(dice.choice((1, 1, 2)) if words else 0):
        at = dice.randrange(1, len(words)) if len(words) > 1 else 0
        match dice.randrange(6):
            case 0 | 1 | 2:
                words[at] = dice.choice(TEXTS)
            case 3 if len(words) > 1:
                del words[at]
            case 4:
                words.insert(at + 1, dice.choice(TEXTS))
            case 5:
                words += ["--set", f"{dice.choice(settings())}={dice.choice(TEXTS)}"]
    return words or [""]


def damaged(content: bytes, name: str, dice: random.Random) -> bytes:
    """A file with one mistake: in its bytes or, where it is JSON, sometimes in a value."""
    if name.endswith(".json") and dice.random() < 0.7:
        value = json.loads(content)
        _replace(value, dice)
        return json.dumps(value).encode()
    if name.endswith(".jsonl") and dice.random() < 0.5:
        lines = content.decode().splitlines()
        at = dice.randrange(len(lines))
        entry = json.loads(lines[at])
        _replace(entry, dice)
        lines[at] = json.dumps(entry)
        return "\n".join(lines).encode()
    at = dice.randrange(len(content))
    some = dice.choice(BYTES)
    match dice.randrange(5):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + some + content[at:]
        case 2:
            return content[:at] + bytes([content[at] ^ (1 << dice.randrange(8))]) + content[at + 1 :]
        case 3:
            return content[:at] + content[min(len(content), at + dice.randrange(1, 400)) :]
        case _:
            return dice.choice([b"", some, content * 2])


def _replace(value: Any, dice: random.Random) -> None:
    """Give one place in a JSON value another value."""
    while True:
        keys = [*value] if isinstance(value, dict) else range(len(value))
        key = dice.choice(list(keys)) if keys else None
        inner = value[key] if key is not None else None
        if not isinstance(inner, dict | list) or not inner or dice.random() < 0.3:
            break
        value = inner
    if key is not None:
        value[key] = dice.choice(VALUES)


def case(group: str, number: int) -> tuple[list[str], random.Random]:
    """The command of a case, and the dice that damage the file where the group is a file's."""
    dice = random.Random(f"{group} {number}")
    if group in FILES:
        return dice.choice(FILES[group]), dice
    words, fixed = dice.choice(COMMANDS[group])
    if group == "settings":
        extra = [f"{dice.choice(settings())}={dice.choice(TEXTS)}" for _ in range(2)]
        return [
            *words,
            "--set",
            extra[0],
            *(["--set", extra[1]] if dice.random() < 0.3 else []),
            *fixed,
        ], dice
    return [*mutated(words, dice), *fixed], dice


def _texts(count: int) -> list[dict[str, str]]:
    kinds = {"pos": "a fine film", "neg": "a dull film"}
    return [
        {"text": f"{text} number {i}", "label": label} for i in range(count) for label, text in kinds.items()
    ]


def make_world(root: Path) -> None:
    """Valid files of every kind, a trained run and a small checkpoint."""
    import transformers

    from oelm.data.tokenizer import train_tokenizer

    rows = _texts(30)
    (root / "d.csv").write_text("\n".join(["text,label", *(f"{row['text']},{row['label']}" for row in rows)]))
    (root / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "d.parquet")
    (root / "tales.txt").write_text("\n\n".join(f"{row['text']} in a tale\nof two lines" for row in rows))
    (root / "lines.txt").write_text("a fine film\n\na dull film\n")
    task = '[task]\ndata = "d.csv"\ntokenizer = "train:300"\nmax_length = 24\n\n[model]\nname = "gpt-tiny"\n'
    training = "\n[training]\nbatch_size = 4\nwarmup = 0.1\nbetas = [0.9, 0.99]\n"
    (root / "run.toml").write_text(
        task + '\n[method]\nname = "oelm"\n' + training + "lr = 1e-3\nsteps = 1\nseed = 3\n"
    )
    study = '[study]\nmethods = ["baseline", {name = "oelm", gain = 2.0}]\nlrs = [1e-3]\nseeds = 5\n\n'
    (root / "study.toml").write_text(study + task + training + "steps = 1\n")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, vocab_size=300, max_position_embeddings=32)
    transformers.BertForSequenceClassification(config).save_pretrained(root / "bert")
    train_tokenizer([row["text"] for row in rows], 300).save_pretrained(root / "bert")
    os.mkfifo(root / "pipe")
    os.mkfifo(root / "pipe.txt")
    (root / "folder.csv").mkdir()
    (root / "data").mkdir()


def make_done_study(root: Path) -> None:
    """A study's folder with one kept model: the trained run."""
    shutil.copytree(root / "run", root / "done" / "runs" / "d" / "oelm" / "kept")
    shutil.copy(root / "study.toml", root / "done")
    (root / "done" / "study.json").write_text('{"made": [], "imported": []}')


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OELM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("OELM_DATA_DIR", raising=False)
        patch.chdir(root)
        make_world(root)
        patch.setattr(sys, "argv", ["oelm", "train", "--config", "run.toml", "--steps", "2", "--out", "run"])
        from oelm.cli.main import main

        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        make_done_study(root)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, limits[1]))
        yield root
        resource.setrlimit(resource.RLIMIT_AS, limits)


def tree(root: Path) -> set[str]:
    """All that lies in the folder; what a finished report or a lock leaves in a run is the run's."""
    return {str(path) for path in root.rglob("*")}


def problems(code: int, out: str, err: str, seconds: float, left: set[str]) -> Iterator[str]:
    """What is wrong with the end of a command."""
    if code not in (0, 1, 2, 75):
        yield f"exit code {code}"
    if "Traceback" in err or "panicked" in err:
        yield "a traceback"
    if seconds > SLOWEST:
        yield f"{seconds:.0f} s"
    told = [line for line in err.splitlines() if line.startswith("oelm: ")]
    after = err.rpartition("oelm: ")[2].splitlines()[1:]  # what an audit found is listed
    helped = code == 2 and not err and "Usage" in out
    if code in (1, 2) and not helped and (len(told) != 1 or any(not line.startswith("  ") for line in after)):
        yield "not one line at the end"
    if told and len(told[0]) > 700:
        yield f"a line of {len(told[0])} characters"
    if code in (1, 2) and left:
        yield f"left behind: {sorted(left)[:3]}"


@pytest.mark.parametrize("group", [*COMMANDS, *FILES])
def test_whatever_is_wrong_is_told_in_one_line(
    group: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oelm_cli: Callable[..., tuple[int, str, str]] = caller(monkeypatch, capsys)
    found = []
    before = tree(world)
    for number in range(CASES if group in COMMANDS else CASES // 2):
        words, dice = case(group, number)
        content = (world / group).read_bytes() if group in FILES else b""
        if group in FILES:
            (world / group).write_bytes(damaged(content, group, dice))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        began = time.monotonic()
        try:
            code, out, err = oelm_cli(*words)
        except Exception as error:
            code, out, err = -1, "", f"Traceback: {type(error).__name__}: {error}"
        left = tree(world) - before
        wrong = [*problems(code, out, err, time.monotonic() - began, left)]
        found += [f"{group} {number}: {words!r:.300}: {what}\n    {err[-400:]!r}" for what in wrong]
        for path in map(Path, sorted(left)):
            delete(path)
        if group in FILES:
            (world / group).write_bytes(content)
        assert before <= tree(world), f"{group} {number}: {words!r:.300}: files are gone"
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("words", [
    ["predict", "run", "/dev/zero"], ["predict", "done", "/dev/random"], ["predict", "run", "folder.csv"],
    ["explain", "run", "--lines", "/dev/zero"], ["bench", "--read", "/dev/zero"],
    ["train", "--config", "/dev/zero"], ["data", "inspect", "pipe.txt"],
    ["study", "--profile", "/dev/zero", "--data", "d.csv"],
    ["predict", "run", "d.csv", "--out", "no/p.csv"], ["explain", "run", "--out", "no/x.html"],
    ["cancel", "run"], ["work", "nowhere"], ["doctor", "now"], ["demo", "--lang", "xx"],
    ["bench", "--steps", "0"], ["bench", "--work", "sleep"], ["bench", "--data", "nowhere"],
])  # fmt: skip
def test_what_never_ends_or_is_not_there_is_refused_at_once(
    words: list[str], world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, began = tree(world), time.monotonic()
    code, out, err = caller(monkeypatch, capsys)(*words)
    seconds = time.monotonic() - began
    assert code == 2 and not [*problems(code, out, err, seconds, tree(world) - before)], (code, err)


if __name__ == "__main__":
    print(case(sys.argv[1], int(sys.argv[2]))[0])
