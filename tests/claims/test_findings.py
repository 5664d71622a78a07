"""docs/findings.md and its pictures are what the records give."""

import re
import shutil
from pathlib import Path

import pytest

from oelm.claims.collect import collect
from oelm.claims.findings import make_page, write_page
from oelm.claims.verdicts import judge
from tests.command_line import caller

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_again_from_the_records() -> None:
    page = ROOT / "docs" / "findings.md"
    given = collect([ROOT / "results", ROOT / "benchmarks"])
    text, pictures = make_page(page, given, judge(given.analyses, given.benchmarks))
    assert text == page.read_text(), "oelm claims results benchmarks --page docs/findings.md"
    found = {path.name: path.read_text() for path in (ROOT / "docs" / "findings").iterdir()}
    assert found == {picture.file: picture.svg for picture in pictures}
    rows = [line for line in text.splitlines() if line.startswith("| imdb ") and "fair-" not in line]
    assert len(rows) == len(set(rows)) > 4  # studies share runs
    assert text.count("equivalent, a small but certain difference") == 2  # in the answer and in the table
    for link in ("../results/fair-classification", "studies.md"):
        assert f"({link})" in text and (page.parent / link).exists()


def test_the_readmes_say_what_the_page_says() -> None:
    """The first difference of the page with its interval, and IMDB's scores beside the linear one."""
    text = (ROOT / "docs" / "findings.md").read_text()
    mean, low, high = re.search(r"points: (\S+) \((\S+) to (\S+)\) on imdb \(equivalent", text).groups()  # type: ignore[union-attr]
    rows = re.findall(r"\| imdb \| gpt-medium-512 \| (?:baseline|oelm) \| (\S+) \| (\S+) \(TF-IDF", text)
    for name, words in (("README.md", " to "), ("README.zh-CN.md", " 至 ")):
        page = (ROOT / name).read_text()
        assert len(rows) == 2 and all(f"{score} %" in page for row in rows for score in row), name
        assert mean in page and f"{low}{words}{high}" in page and "docs/findings.md" in page, name


def test_what_is_not_there_is_not_told_as_measured(tmp_path: Path) -> None:
    """A rate with a part of its trials is neither the best nor in a range; an arm alone is not compared."""
    study = tmp_path / "orthogonality"
    shutil.copytree(ROOT / "results" / "fair-orthogonality", study)
    for seed in (1001, 1002):
        (run,) = study.glob(f"runs/imdb/oelm/choice-lr0.001-s{seed}-*")
        shutil.rmtree(run)
    given = collect([study])
    text, pictures = make_page(tmp_path / "found.md", given, judge(given.analyses))
    (row,) = (line for line in text.splitlines() if line.startswith("| imdb | gpt-medium-512 | oelm | 0"))
    assert "| 0.003 | 0.003 |" in row and "0.001: 88.8 (1 of 3)" in row
    (picture,) = (picture for picture in pictures if "learning_rates" in picture.file)
    assert "imdb" in picture.file and "oelm-trainable orange" in picture.title  # of xnli only oelm has runs
    assert "| xnli |" not in text


def test_numbers_say_what_they_are_of(tmp_path: Path) -> None:
    """All benchmarks, not one of them; a number without a conclusion; when the shown runs ended."""
    given = collect([ROOT / "results" / "minilm-sst2", ROOT / "results" / "demo", ROOT / "benchmarks"])
    verdicts = {verdict.id: verdict for verdict in judge(given.analyses, given.benchmarks)}
    text, _ = make_page(tmp_path / "found.md", given, [*verdicts.values()])
    for start in ("- Time of a training step", "| C2 |"):
        (line,) = (line for line in text.splitlines() if line.startswith(start))
        assert line.split("classifier ")[1].count(" %") == len(verdicts["C2"].details) == 4
    assert "% (sst2 (all-MiniLM-L6-v2): no conclusion) | 5 |" in text  # C3
    assert "20 of 20 measured runs ended after that, and 18 of 18 trials" in text  # of the demo alone


def test_a_page_of_one_study(tmp_path: Path) -> None:
    given = collect([ROOT / "results" / "demo"])
    verdicts = judge(given.analyses)
    write_page(tmp_path / "found.md", given, verdicts)
    (tmp_path / "found" / "old.svg").write_text("of an earlier page")
    write_page(tmp_path / "found.md", given, verdicts)
    text = (tmp_path / "found.md").read_text()
    pictures = [path.name for path in (tmp_path / "found").iterdir()]
    assert "old.svg" not in pictures and pictures and all(f"(found/{name})" in text for name in pictures)
    assert "no study of it is complete" in text  # the demo has another size than the published one
    assert "| movie-reviews | gpt-tiny | oelm − baseline |" in text


def test_a_page_needs_a_name_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = caller(monkeypatch, capsys)
    code, _, error = call("claims", ROOT / "results" / "demo", "--page", tmp_path / "page.html")
    assert code == 2 and "ends in .md" in error
