"""Prediction on files: every format gives what lines of text give, columns stay, labels are compared."""

import csv
import datetime
import json
import random
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet
import pytest
import torch

import oelm
from oelm.data.files import open_file
from oelm.errors import UserError
from oelm.inference.agreement import Agreement
from oelm.inference.trained import Trained
from oelm.study.kept_models import best_model
from tests.command_line import caller
from tests.data.made import parquet, sentence, write_csv, write_jsonl
from tests.training.language_models import tokenizer as byte_level

TEXTS = [sentence(random.Random(i)) + (',\n"quoted";\tß' if i % 5 == 0 else "") for i in range(30)]
TEXTS[7] = ""
NAMES = {0: "no", 1: "yes", 2: "maybe"}


def save(folder: Path, **config: Any) -> Path:
    torch.manual_seed(0)
    words = byte_level()
    sizes = {"d_model": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    model = oelm.OelmGPTForSequenceClassification(
        oelm.OelmGPTConfig(**sizes, vocab_size=len(words), **config)
    )
    with torch.no_grad():  # large enough that answers differ
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), id2label=NAMES)


@pytest.fixture(scope="module")
def answers(model: Path) -> list[dict[str, Any]]:
    """What the model says of the texts as lines."""
    return list(Trained(model).predict(TEXTS))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return caller(monkeypatch, capsys)


def files(folder: Path, labels: list[Any]) -> list[Path]:
    numbers = range(len(TEXTS))
    rows = [[i, text, label] for i, text, label in zip(numbers, TEXTS, labels, strict=True)]
    write_csv(folder / "a.csv", ["id", "body", "label"], rows)
    write_csv(folder / "a.tsv", ["id", "body", "label"], rows, delimiter="\t")
    records = [dict(zip(("id", "body", "label"), row, strict=True)) for row in rows]
    write_jsonl(folder / "a.jsonl", records)
    (folder / "a.json").write_text(json.dumps(records))
    day = datetime.date(2020, 1, 1)
    parquet(folder / "a.parquet", id=[*numbers], body=TEXTS, label=labels, day=[day] * len(TEXTS))
    return [folder / f"a.{kind}" for kind in ("csv", "tsv", "jsonl", "json", "parquet")]


def test_every_format_in_and_out(call: Any, model: Path, answers: list[Any], tmp_path: Path) -> None:
    predicted = [answer["label"] for answer in answers]
    assert len(set(predicted)) > 2  # None among them
    labels = [label if i % 3 else "yes" for i, label in enumerate(predicted)]
    right = sum(a == b for a, b in zip(predicted, labels, strict=True) if a)
    for number, path in enumerate(files(tmp_path, labels)):
        out = tmp_path / f"{number}{('.jsonl', '.parquet', '.csv', '.tsv', '.parquet')[number]}"
        code, said, err = call("predict", model, path, "--text", "body", "--out", out)
        assert (code, said) == (0, ""), err
        assert f"{right} of the 29 labels in column 'label'" in err and f"{out}: 30 rows" in err
        rows = list(open_file(out).rows())
        assert [*rows[0]][:3] == ["id", "body", "label"]
        assert [str(row["id"]) for row in rows] == [*map(str, range(30))]
        assert [row["body"] for row in rows] == TEXTS
        assert [row["predicted_label"] or None for row in rows] == predicted
        scores = [row["predicted_scores"] or None for row in rows]
        scores = [json.loads(value) if isinstance(value, str) else value for value in scores]
        assert scores == [answer["scores"] for answer in answers]
    schema = pyarrow.parquet.read_schema(out)  # of the file that was Parquet before
    assert [str(schema.field(name).type) for name in ("id", "day")] == ["int64", "date32[day]"]
    code, said, _ = call("predict", model, tmp_path / "a.parquet", "--text", "body")
    assert code == 0 and json.loads(said.splitlines()[3])["day"] == "2020-01-01"


def test_a_table_is_never_read_as_lines_nor_lines_as_a_table(call: Any, model: Path, tmp_path: Path) -> None:
    table = write_csv(tmp_path / "A.CSV", ["text"], [["one"], ["two, three"]])
    lines = tmp_path / "lines.txt"
    lines.write_text("text\none\n", encoding="utf-8")
    for path, texts in ((table, ["one", "two, three"]), (lines, ["text", "one"])):
        code, said, err = call("predict", model, path)
        assert code == 0 and "accuracy" not in err
        assert [json.loads(line)["text"] for line in said.splitlines()] == texts


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a.csv"], "a.csv has no column 'text'; it has: id, body, label; name one with --text"),
        (
            ["a.csv", "--text", "body", "--label", "x"],
            "no column 'x'; it has: id, body, label; name one with",
        ),
        (["a.csv", "--text", "body", "--text-pair", "id"], "reads one text, not pairs"),
        (["a.jsonl", "--text", "id"], "a.jsonl, row 1: column 'id' holds int '0' where text was expected"),
        (["a.csv", "--text", "body", "--out", "a.tsv"], "a.tsv exists already"),
        (["a.csv", "--text", "body", "--out", "a.xlsx"], "cannot tell what kind of file to write"),
        (["a.csv", "--text", "body", "--out", "none/a.csv"], "there is no folder none"),
        (["there.csv"], "there is no file there.csv"),
        (["lines", "--text", "body"], "lines is read line by line"),
        (["nothing"], "nothing cannot be read: No such file"),
        (["a.conll"], "not lines of text"),
    ],
)
def test_refusals_leave_nothing_behind(
    call: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path, ["no"] * len(TEXTS))
    (tmp_path / "lines").write_text("a\n")
    before = sorted(tmp_path.iterdir())
    code, said, err = call("predict", model, *words)
    assert (code, said) == (2, "") and says in err and len(err.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_records_that_differ(call: Any, model: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": None, "more": 1}])
    assert call("predict", model, path, "--out", tmp_path / "b.jsonl")[0] == 0
    second = list(open_file(tmp_path / "b.jsonl").rows())[1]
    assert second["more"] == 1 and second["predicted_label"] is None
    code, _, err = call("predict", model, path, "--out", tmp_path / "b.csv")
    assert code == 2 and "row 2 has 'more'" in err and not (tmp_path / "b.csv").exists()


def test_what_is_written_is_json_whatever_numbers_the_rows_hold(
    call: Any, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "x": NaN, "y": [1.5, {"z": -Infinity}]}\n')

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    code, said, err = call("predict", model, path)
    row = json.loads(said, parse_constant=refuse)
    assert code == 0 and (row["x"], row["y"]) == (None, [1.5, {"z": None}]), err
    assert call("predict", model, path, "--out", tmp_path / "b.csv")[0] == 0
    (cells,) = open_file(tmp_path / "b.csv").rows()
    assert json.loads(cells["y"], parse_constant=refuse) == row["y"]


@pytest.mark.parametrize(
    "record", ['{"text": "a", "other": "\\ud800"}', '{"text": "\\ud800"}', '{"text": "a", "\\ud800": 1}']
)
def test_half_a_surrogate_pair_anywhere_is_refused(
    call: Any, model: Path, tmp_path: Path, record: str
) -> None:
    """It cannot be written again, and no tokenizer takes it."""
    (tmp_path / "a.jsonl").write_text(record)
    for out in ([], ["--out", tmp_path / "b.csv"]):
        code, said, err = call("predict", model, tmp_path / "a.jsonl", *out)
        assert (code, said) == (2, "") and "line 1: column" in err and "half a surrogate pair" in err
    assert [*tmp_path.iterdir()] == [tmp_path / "a.jsonl"]


def test_pairs_are_read_from_two_columns(tmp_path: Path) -> None:
    """As the lines "text, tab, text" are; a row with half a pair has no answer."""
    from oelm.inference.tables import Table

    folder = save(tmp_path / "pairs", id2label=NAMES, text_pairs=True)
    rows = [["one film", "two"], ["a", ""], ["dark", "the dog"]]
    path = write_csv(tmp_path / "a.csv", ["one", "two"], rows)
    trained = Trained(folder)
    found = [row["predicted_label"] for row in Table(trained, path, "one", "two").predict()]
    assert found[1] is None
    lines = [answer["label"] for answer in trained.predict(["one film\ttwo", "dark\tthe dog"])]
    assert [found[0], found[2]] == lines


def test_labels_are_compared_as_classes(model: Path) -> None:
    """Names, their places, and numbers however they are written."""
    reader = Trained(model).reader
    agreement = Agreement(reader, "label")
    for predicted, label in [("no", "no"), ("yes", 1), ("maybe", "2.0"), ("no", "strange"), (None, "no")]:
        agreement.add(predicted, label)
    agreement.add("no", None)
    agreement.add("no", float("nan"))
    assert (agreement.rows, agreement.right, agreement.without) == (4, 3, 2)
    assert "accuracy 0.7500: 3 of the 4 labels" in str(agreement) and "'strange' (1)" in str(agreement)
    reader.model.config.id2label = {0: "1", 1: "5"}
    agreement = Agreement(reader, "label")
    for predicted, label in [("5", 5.0), ("1", "1"), ("1", 0)]:
        agreement.add(predicted, label)
    assert (agreement.rows, agreement.right) == (3, 2)
    reader.compared = "value"
    agreement = Agreement(reader, "label")
    for predicted, label in [(1.0, "2"), (2.0, 2), (3.0, "?")]:
        agreement.add(predicted, label)
    assert str(agreement).startswith("rmse 0.7071 on the 2 labels") and agreement.without == 1
    assert str(agreement).endswith("; 1 row has no number")
    agreement.add(1.0, "1e200")  # whose square is beyond what a float holds
    assert str(agreement).startswith("rmse inf on the 3 labels")


def test_a_studys_best_model(call: Any, tmp_path: Path, model: Path) -> None:
    """By validation, larger or smaller; several tasks are listed; without models, why."""
    study = tmp_path / "s"
    (study / "runs").mkdir(parents=True)
    (study / "study.toml").write_text("[study]\n")
    with pytest.raises(UserError, match=r"holds no model: .* or its records were imported or published"):
        best_model(study)

    def keep(task: str, method: str, metric: str, value: float) -> None:
        run = study / "runs" / task / method / "measured-1"
        run.mkdir(parents=True)
        (run / "model").symlink_to(model)
        results = {"task": task, "method": method, "metric": metric, "best": {"metrics": {metric: value}}}
        (run / "results.json").write_text(json.dumps(results))

    keep("a", "baseline", "accuracy", 0.7)
    keep("a", "oelm", "accuracy", 0.8)
    assert best_model(study).method == "oelm"
    keep("b", "baseline", "perplexity", 7.0)
    code, _, err = call("predict", study, tmp_path / "lines")
    assert code == 2 and "several tasks" in err and err.index("oelm on a") < err.index("baseline on b")


def test_pandas_reads_what_is_written(call: Any, model: Path, tmp_path: Path) -> None:
    """An oracle for the CSV: quotes, line ends and commas inside texts."""
    path = write_csv(tmp_path / "a.csv", ["text", "n"], [[text, i] for i, text in enumerate(TEXTS)])
    assert call("predict", model, path, "--out", tmp_path / "b.csv")[0] == 0
    table = pandas.read_csv(tmp_path / "b.csv", keep_default_na=False)
    assert table["text"].tolist() == TEXTS and table["n"].tolist() == [*range(30)]
    with (tmp_path / "b.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 31
