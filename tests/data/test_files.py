"""Reading users' files: what a spreadsheet or a script may write is read, what cannot be read is named."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oelm.data.files import open_file
from oelm.errors import UserError
from tests.data.made import parquet, write_csv, write_jsonl

anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def read(path: Path, *columns: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {column: [] for column in columns}
    for chunk in open_file(path).chunks(list(columns)):
        for column in columns:
            found[column] += chunk[column]
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.tuples(anything, anything), min_size=1, max_size=20), st.sampled_from([".csv", ".tsv"]))
def test_any_text_survives_csv_and_tsv(tmp_path: Path, rows: list[tuple[str, str]], suffix: str) -> None:
    path = write_csv(
        tmp_path / f"x{suffix}", ["a", "b"], [list(row) for row in rows],
        delimiter="\t" if suffix == ".tsv" else ",", quoting=csv.QUOTE_ALL,
    )  # fmt: skip
    assert read(path, "b", "a") == {"b": [b for _, b in rows], "a": [a for a, _ in rows]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.tuples(anything, st.integers()), min_size=1, max_size=20))
def test_any_text_survives_jsonl(tmp_path: Path, rows: list[tuple[str, int]]) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"a": a, "b": b} for a, b in rows])
    assert read(path, "a", "b") == {"a": [a for a, _ in rows], "b": [b for _, b in rows]}


def test_a_csv_of_many_rows_reads_as_pandas_reads_it(tmp_path: Path) -> None:
    rows = [[f'text {i}, with a comma\nand a "quoted" line', str(i % 7)] for i in range(1500)]
    path = write_csv(tmp_path / "x.csv", ["text", "label"], rows)
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    assert read(path, "text", "label") == {"text": frame["text"].tolist(), "label": frame["label"].tolist()}


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbftext,label\r\none,a\r\ntwo,b\r\n",  # BOM and Windows line ends
        b"text,label\none,a\n\ntwo,b\n\n",  # blank lines
        b"text\tlabel\none\ta\ntwo\tb",
        b"text;label\none;a\ntwo;b",  # semicolons, no last line end
        b'"text","label"\n"one",a\n"two","b"\n',
    ],
)
def test_files_as_spreadsheets_write_them(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    assert read(path, "text", "label") == {"text": ["one", "two"], "label": ["a", "b"]}


def test_a_text_of_a_million_characters_is_read(tmp_path: Path) -> None:
    long = "long " * 200_000
    assert read(write_csv(tmp_path / "x.csv", ["text"], [[long]]), "text") == {"text": [long]}
    assert read(write_jsonl(tmp_path / "x.jsonl", [{"text": long}]), "text") == {"text": [long]}


def test_parquet_in_several_chunks(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(1300)]
    assert read(parquet(tmp_path / "x.parquet", text=texts, other=[0] * 1300), "text") == {"text": texts}


def _parquet_bytes() -> bytes:
    buffer = io.BytesIO()
    pandas.DataFrame({"text": ["a"]}).to_parquet(buffer)
    return buffer.getvalue()


def _two_texts() -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.table([["a"], ["b"], ["c"]], names=["text", "text", "label"])
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


BAD: list[tuple[str, bytes, str]] = [
    ("x.csv", b"text,label\none,a\ntwo,b,c\n", r"x.csv, row 2 \(line 3\): 3 fields where the header has 2"),
    ("x.csv", b'text,label\n"a\nb",x\none\n', r"row 2 \(line 4\): 1 fields"),
    ("x.csv", b"text,label\none,a\ncaf\xe9,b\n", r"x.csv, line 3: byte 0xe9 is not UTF-8"),
    ("x.csv", b'text,label\n"one,a\ntwo,b\n', r"x.csv, line 3: unexpected end of data .*quote is not closed"),
    ("x.csv", b'text,label\n"on"e,a\n', r"x.csv, line 2: .*quote"),
    ("x.csv", b"", r"x.csv is empty: the first line must name the columns"),
    ("x.csv", b"body,topic\none,a\n", r"x.csv has no column 'text'; it has: body, topic"),
    ("x.csv", b"text,text,label\na,b,c\n", r"x.csv has 2 columns named 'text'"),
    ("x.csv", b"\xff\xfet\x00e\x00", r"x.csv, line 1: byte 0xff is not UTF-8"),
    (
        "x.csv",
        b"PK\x03\x04\xfdrest",
        r"byte 0xfd is not UTF-8; save .*it may be compressed, or a spread",
    ),
    ("x.csv", _parquet_bytes(), r"is not UTF-8"),
    ("x.csv", b"\x1f\x8b\x08", r"line 1: byte 0x8b is not UTF-8"),
    ("x.parquet", b"text,label\na,b\n", r"x.parquet cannot be read as Parquet"),
    ("x.parquet", b"PAR1 and then nothing", r"x.parquet cannot be read as Parquet"),
    ("x.parquet", _two_texts(), r"x.parquet has 2 columns named 'text'"),
    ("x.parquet", _parquet_bytes(), r"x.parquet has no column 'label'; it has: text"),
    (
        "x.jsonl",
        b'{"text": "a", "label": 1}\n{"text": "b"}\n',
        r"x.jsonl, line 2 has no 'label'; it has: text",
    ),
    ("x.jsonl", b'{"text": "a", "label": 1}\n{"text": \n', r"x.jsonl, line 2 is not JSON"),
    ("x.jsonl", b'[{"text": "a",\n "label": 1}]', r"x.jsonl is one JSON array; write one object per line"),
    ("x.jsonl", b'"text"\n', r"x.jsonl, line 1: an object .* was expected, not str"),
    ("x.jsonl", b'{"text": "caf\xe9", "label": 1}\n', r"x.jsonl, line 1: byte 0xe9 is not UTF-8"),
    ("x.jsonl", b"[" * 100_000, r"x.jsonl"),
    ("x.xlsx", b"", r"x.xlsx: cannot tell what kind of file this is; name it .csv"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD)
def test_what_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read(path, "text", "label")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        open_file(tmp_path / "no.csv")
    with pytest.raises(UserError, match="is a folder; give one file"):
        open_file(tmp_path)


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("text\na\n")
    before = open_file(path).digest()
    assert open_file(path).digest() == before
    path.write_text("text\nb\n")
    assert open_file(path).digest() != before


def test_json_values_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"a": None, "b": [1], "c": 1.5}) + "\n")
    assert read(path, "a", "b", "c") == {"a": [None], "b": [[1]], "c": [1.5]}
