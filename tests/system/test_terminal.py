"""What is printed is text: nothing that a user's data holds steers the terminal it is shown on."""

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table
from rich.text import Text

from oelm.study.analysis import analyse
from oelm.study.report import summary
from oelm.system.terminal import UNPRINTABLE, columns, console, plain
from tests.command_line import caller
from tests.data.made import sentence, write_csv

RED, CLEAR, TITLE = "\x1b[31m", "\x1b[2J", "\x1b]0;mine\x07"
FOLDER = os.fsdecode(b"f\xff")  # a name that is not UTF-8


@given(st.text())
def test_text_made_plain_is_printable_and_means_the_same_in_json(text: str) -> None:
    assert not UNPRINTABLE.search(plain(text))
    shown = plain(json.dumps({"label": text}, ensure_ascii=False))
    assert not UNPRINTABLE.search(shown)
    assert json.loads(shown) == {"label": text}
    assert plain("a\tb\nä 语") == "a\tb\nä 语"


def test_a_console_keeps_its_own_colours_and_none_of_a_texts() -> None:
    screen = console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    table = Table("name")
    table.add_row(Text(f"spam{CLEAR}", style="green"))
    with Live(table, console=screen):
        screen.print(Text(f"line{TITLE}"))
    written = screen.file.getvalue()  # type: ignore[attr-defined]
    assert CLEAR not in written and "\x07" not in written
    assert "spam\\u0" in written and "\x1b[32m" in written and "\x1b[?25h" in written


@pytest.mark.parametrize("verb", ["inspect", "train", "predict"])
def test_labels_and_columns_do_not_reach_the_terminal_raw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    rng = random.Random(0)
    labels = (f"ham{RED}", f"spam{TITLE}")
    rows = [[f"{sentence(rng)} {i}", labels[i % 2]] for i in range(120)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path / "cache"))
    path = write_csv(tmp_path / f"x{CLEAR}.csv", ["text", f"topic{RED}"], [*rows, ["", labels[0]]])
    oelm = caller(monkeypatch, capsys)
    data = [path, "--label", f"topic{RED}", "--tokenizer", "train:300", "--max-length", 16]
    if verb == "inspect":
        answers = [oelm("data", verb, *data), oelm("data", verb, *data, "--json")]
    else:
        answers = [oelm("train", "--data", *data, "--steps", 2, "--out", "run")]
        if verb == "predict":
            (tmp_path / "lines.txt").write_text("a good film\n")
            answers.append(oelm("predict", "run", "lines.txt"))
            assert json.loads(answers[-1][1])["label"] in labels
        answers.append(oelm("train", "--data", path, "--label", f"no{RED}", "--out", "other"))
        assert answers[-1][0] == 2
    for _, out, err in answers:
        assert "\x1b" not in out + err and "\x07" not in out + err
        assert "\\u001b" in out + err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--task", "sst2", "--out", FOLDER],
        ["study", "--task", "sst2", "--out", FOLDER],
        ["study", "--task", "sst2", "--out", FOLDER, "--dry-run"],
        ["demo", "--out", FOLDER],
        ["convert", "bert-base-uncased", "--out", FOLDER],
        ["data", "prepare", "sst2", "--out", FOLDER],
    ],
    ids=lambda words: " ".join(words[:2]) if words[0] == "data" else words[0],
)
def test_a_folder_whose_name_is_not_utf8_is_refused_at_once(tmp_path: Path, words: list[str]) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OELM_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("OELM_DATA_DIR", None)
    done = subprocess.run(
        [sys.executable, "-m", "oelm", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.decode() == "oelm: f\\udcff is not a name in UTF-8; name another folder\n"
    assert not [*tmp_path.iterdir()]


def test_a_narrow_terminal_gets_narrow_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a pipe or a log the usual one."""
    assert columns(80) == 80
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for wide, shown in ((60, 60), (120, 80), (10, 40)):
        monkeypatch.setenv("COLUMNS", str(wide))
        assert columns(80) == shown
    analysis = analyse(Path(__file__).parents[2] / "results" / "demo")
    for width in (40, 60, 80):
        assert max(map(len, summary(analysis, width=width).splitlines())) <= width
