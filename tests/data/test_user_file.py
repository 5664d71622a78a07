"""A user's own file: labels, splits, subsets, and every mistake named with its file and row."""

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.data import load_file, prepare
from oelm.data.dataset import Dataset
from oelm.errors import UserError
from oelm.system.messages import notice
from tests.data.made import labelled, parquet, split_sizes, write_csv, write_jsonl


def _rows(path: Path, **options: Any) -> dict[str, set[int]]:
    data = load_file(path, text="body", label="topic", **options)
    codes = data.parts[0].split
    return {
        name: set(np.flatnonzero(codes == code).tolist())
        for code, name in enumerate(("train", "val", "test"))
    }


def test_a_file_is_split_stratified_and_the_same_every_time(tmp_path: Path) -> None:
    path = labelled(tmp_path / "x.csv", rows=300, classes=("a", "b", "c"))
    data = load_file(path, text="body", label="topic")
    assert split_sizes(data) == {"train": 240, "validation": 30, "test": 30}
    part = data.parts[0]
    for code in range(3):
        assert (
            np.bincount(part.labels[part.split == code]).tolist()
            == [split_sizes(data)["train"] // 3, 10, 10][code : code + 1] * 3
        )
    assert _rows(path) == _rows(path)
    assert _rows(path) != _rows(path, split_seed=1)


def test_train_size_takes_nested_subsets_and_leaves_the_other_splits_alone(tmp_path: Path) -> None:
    path = labelled(tmp_path / "x.csv", rows=300, classes=("a", "b", "c"))
    small, large, full = _rows(path, train_size=30), _rows(path, train_size=100), _rows(path)
    assert len(small["train"]) == 30
    assert small["train"] < large["train"] < full["train"]
    assert small["val"] == full["val"]
    assert small["test"] == full["test"]


def test_a_test_file_is_the_test_split(tmp_path: Path) -> None:
    train, test = labelled(tmp_path / "a.csv", 100), labelled(tmp_path / "b.csv", 20, seed=1)
    data = load_file(train, text="body", label="topic", test_file=test)
    assert split_sizes(data) == {"train": 90, "validation": 10, "test": 20}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["pos", " neg"], ["neg", "pos"]),
        (["10", "9"], ["9", "10"]),
        (["1.0", "0.0"], ["0", "1"]),
        (["-1", "1"], ["-1", "1"]),
        (["True", "False"], ["False", "True"]),
    ],
)
def test_labels_of_a_csv_become_classes(tmp_path: Path, values: list[str], names: list[str]) -> None:
    rows = [[f"text {i}", values[i % 2]] for i in range(40)]
    assert load_file(write_csv(tmp_path / "x.csv", ["text", "label"], rows)).label_names == names


HUGE = "1" + "0" * 5000  # more digits than int() takes


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["9007199254740993", "9007199254740992", "5"], ["5", "9007199254740992", "9007199254740993"]),
        ([HUGE, "+7.0", "-7"], ["-7", "7", HUGE]),
        (["2", "01", "1", "001"], ["001", "01", "1", "2"]),
        (["1_0", "10", "1e1"], ["10", "1_0", "1e1"]),
        (["1e5", "1E5", "2"], ["1E5", "1e5", "2"]),
        (["inf", "1"], ["1", "inf"]),
        (["١", "1"], ["1", "١"]),
        (["1", "1.0", "01"], ["01", "1", "1.0"]),
    ],
)
def test_labels_that_are_written_differently_are_not_merged(
    tmp_path: Path, values: list[str], names: list[str]
) -> None:
    rows = [[f"text {i}", values[i % len(values)]] for i in range(60)]
    data = load_file(write_csv(tmp_path / "x.csv", ["text", "label"], rows))
    assert data.label_names == names
    assert np.bincount(data.parts[0].labels).tolist() == [60 // len(values)] * len(values)


def test_large_integers_of_a_typed_source_are_exact(tmp_path: Path) -> None:
    for values in ([10**400, 1], [2**53 + 1, 2**53, 3]):
        rows = _labels([values[i % len(values)] for i in range(60)])
        names = [str(value) for value in sorted(values)]
        assert load_file(write_jsonl(tmp_path / "x.jsonl", rows)).label_names == names


def test_a_test_file_s_labels_are_names_where_the_training_file_s_are(tmp_path: Path) -> None:
    train = write_csv(
        tmp_path / "a.csv", ["text", "label"], [[f"{i}", ["01", "1.0"][i % 2]] for i in range(40)]
    )
    test = write_csv(tmp_path / "b.csv", ["text", "label"], [["x", "1.0"]])
    data = load_file(train, test_file=test)
    assert [data.label_names[i] for i in data.parts[1].labels] == ["1.0"]


def test_labels_that_may_mean_a_missing_one_are_classes_and_said(tmp_path: Path) -> None:
    values = ["a", "NA", "None", "b"]
    rows = [[f"text {i}", values[i % 4]] for i in range(60)]
    data = load_file(write_csv(tmp_path / "x.csv", ["text", "label"], rows))
    assert data.label_names == ["NA", "None", "a", "b"]
    assert [str(w) for w in data.warnings if w.code == "data.maybe_missing"] == [
        "these labels may stand for a missing one, but count as classes: 'NA' (15 rows); 'None' (15 rows). "
        "Where a label is missing, remove the row"
    ]


@pytest.mark.parametrize(
    ("values", "names"), [([1, 0], ["0", "1"]), ([True, False], ["False", "True"]), ([2.0, 0.0], ["0", "2"])]
)
def test_typed_labels_become_classes(tmp_path: Path, values: list[Any], names: list[str]) -> None:
    texts, labels = [f"text {i}" for i in range(40)], [values[i % 2] for i in range(40)]
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    assert load_file(write_jsonl(tmp_path / "x.jsonl", rows)).label_names == names
    assert load_file(parquet(tmp_path / "x.parquet", text=texts, label=labels)).label_names == names


def test_the_store_holds_the_labels_of_the_rows(tmp_path: Path) -> None:
    path = labelled(tmp_path / "x.csv", 60, ("no", "yes"))
    store = prepare(load_file(path, text="body", label="topic"), tokenizer="train:300")
    lines = path.read_text().splitlines()[1:]
    tokenizer = store.tokenizer()
    seen = []
    for split in store.splits.values():
        for item, row in enumerate(split.ids):
            text = tokenizer.decode(split.tokens[split.offsets[item] : split.offsets[item + 1]])
            assert lines[row] == f"{text},{store.label_names[split.labels[item]]}"
            seen.append(int(row))
        assert split.meta["class_counts"] == np.bincount(split.labels).tolist()
    assert sorted(seen) == list(range(60))


def test_empty_texts_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [[f"text {i}" if i % 5 else " \n"[: i % 3], "ab"[i % 2]] for i in range(50)]
    data = load_file(write_csv(tmp_path / "x.csv", ["text", "label"], rows))
    assert data.dropped == {"empty": 10}
    assert sum(split_sizes(data).values()) == 40
    assert "10 rows dropped: empty texts" in map(str, data.warnings)


def test_pairs_without_one_of_their_texts_are_dropped_and_counted(tmp_path: Path) -> None:
    whole = [[f"one {i}", f"two {i}", "ab"[i % 2]] for i in range(40)]
    halves = [["", "two", "a"], ["one", " \n", "b"], ["", "", "a"]]

    def read(rows: list[list[str]]) -> Dataset:
        return load_file(write_csv(tmp_path / "x.csv", ["text", "other", "label"], rows), text_pair="other")

    data = read(whole + halves)
    assert data.dropped == {"empty": 3}
    assert sum(split_sizes(data).values()) == 40
    # A store that was made with the halves must not be found again; one without any is what it was.
    assert "whole_pairs" in data.fingerprint()
    assert "whole_pairs" not in read(whole).fingerprint()


def test_texts_in_train_and_test_are_counted(tmp_path: Path) -> None:
    train, test = labelled(tmp_path / "a.csv", 100), labelled(tmp_path / "b.csv", 20, seed=1)
    lines = train.read_text().splitlines()
    test.write_text(test.read_text() + "\n".join(lines[1:8]) + "\n")
    data = load_file(train, text="body", label="topic", test_file=test)
    assert data.duplicates["train/test"] + data.duplicates["validation/test"] == 7
    assert any("test items also occur in train" in str(warning) for warning in data.warnings)


def _labels(values: list[Any]) -> list[dict[str, Any]]:
    return [{"text": f"text {i}", "label": value} for i, value in enumerate(values)]


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    (_labels(["a"] * 20), r"holds only 'a'; a classifier needs at least two classes"),
    (_labels([-1] * 20), r"holds only '-1'.*hidden labels in GLUE"),
    (_labels(["a", "b"] * 10 + [None]), r"x.jsonl, row 21: the label is missing"),
    (_labels([0, 1] * 10 + [float("nan")]), r"x.jsonl, row 21: the label is missing"),
    (_labels(["a", "b", ""]), r"row 3: the label is missing"),
    (_labels([0, 1, "1"]), r"row 3: .* holds a string here and a number in row 1; use one type"),
    (_labels([[0, 1], [1]]), r"row 1: .*is a list; multi-label tasks are not supported"),
    (_labels(["['a', 'b']", "['a']"]), r"row 1: .*is a list; multi-label"),
    (_labels([0.25, 0.5] * 10), r"row 1: label 0.25 .*--kind regression"),
    (_labels(["0.25", "1e-05"] * 10), r"row 1: label '0.25' .*--kind regression"),
    (_labels([1.0, float("inf")] * 10), r"row 2: label inf .*is not a whole number, so not a class"),
    (
        _labels(list(range(500))),
        r"holds 500 different values in 500 rows: too many for classes.*--kind regression",
    ),
    (_labels(["a", "b"] * 10 + ["c"] * 2), r"label 'c' has 2 rows; at least 3 are needed"),
    ([{"text": 5, "label": "a"}], r"row 1: column 'text' holds int '5' where text was expected"),
    ([{"text": "\ud800", "label": "a"}], r"line 1: .*half a surrogate pair"),
    ([{"text": "a", "label": "\ud800"}], r"line 1: .*'label' holds half a surrogate pair"),
]


@pytest.mark.parametrize(("rows", "said"), REFUSED)
def test_labels_and_texts_that_cannot_be_learned_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load_file(write_jsonl(tmp_path / "x.jsonl", rows))
    assert "\n" not in str(caught.value)


def test_a_number_json_cannot_read_and_a_type_that_is_no_class(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "a", "label": {HUGE}}}\n')
    with pytest.raises(UserError, match=r"x\.jsonl, line 1 is not JSON"):
        load_file(path)
    days = [date(2024, 1, 1 + i % 2) for i in range(40)]
    with pytest.raises(
        UserError, match=r"row 1: label column 'label' holds date; write the classes as words"
    ):
        load_file(parquet(tmp_path / "x.parquet", text=[f"text {i}" for i in range(40)], label=days))


def test_a_header_without_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x\.csv has no rows"):
        load_file(write_csv(tmp_path / "x.csv", ["text", "label"], []))


def test_a_label_that_only_the_test_file_has(tmp_path: Path) -> None:
    train = labelled(tmp_path / "a.csv", 40)
    test = write_csv(tmp_path / "b.csv", ["body", "topic"], [["x", "yes"], ["y", "maybe"]])
    with pytest.raises(
        UserError, match=r"b.csv, row 2: no training text has the label 'maybe'; known: no, yes"
    ):
        load_file(train, text="body", label="topic", test_file=test)


def test_hidden_test_labels_are_refused_by_name(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", _labels([0, 1] * 20))
    test = write_jsonl(tmp_path / "b.jsonl", _labels([-1] * 5))
    with pytest.raises(UserError, match=r"b.jsonl, row 1: .*hidden labels, as in GLUE's test splits"):
        load_file(train, test_file=test)


def test_a_class_missing_from_the_test_file_is_a_warning(tmp_path: Path) -> None:
    train = labelled(tmp_path / "a.csv", 40)
    test = write_csv(tmp_path / "b.csv", ["body", "topic"], [["x", "yes"]])
    data = load_file(train, text="body", label="topic", test_file=test)
    assert notice("data.no_label", split="test", labels=["no"]) in data.warnings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train_size": 1000}, "train_size 1000 does not fit x: it has 48 training rows in 2 classes"),
        ({"train_size": 1}, "train_size 1 does not fit"),
        ({"label": "topic,other"}, "multi-label tasks are not supported"),
        ({"label": "body"}, "must be different columns"),
        ({"text": "nothing"}, "has no column 'nothing'; it has: body, topic"),
    ],
)
def test_options_that_do_not_fit_the_file(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = labelled(tmp_path / "x.csv", 60)
    with pytest.raises(UserError, match=said):
        load_file(path, **({"text": "body", "label": "topic"} | options))
