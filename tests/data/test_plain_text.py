"""A user's own texts as a corpus: .txt, folders of .txt, and the texts of a table hold the same documents."""

import random
from pathlib import Path

import numpy as np
import pytest

from oelm.data import Choice, Store, load_file, prepare
from oelm.data.documents import is_text, text_files
from oelm.errors import UserError
from tests.command_line import caller
from tests.data.made import parquet, sentence, write_csv, write_jsonl

TEXTS = [f"{sentence(random.Random(i))}\n{sentence(random.Random(-i))} – {i}" for i in range(40)]


def documents(store: Store) -> dict[str, list[str]]:
    tokenizer = store.tokenizer()
    end = tokenizer.eos_token
    texts = {
        name: tokenizer.decode(split.tokens, clean_up_tokenization_spaces=False)
        for name, split in store.splits.items()
    }
    return {name: text.removeprefix(end).removesuffix(end).split(end) for name, text in texts.items()}


def test_the_same_documents_from_every_kind_of_file(tmp_path: Path) -> None:
    """Blank lines, byte order mark and line ends of any number and kind leave no trace."""
    gaps = ["\n\n", "\n \t\n\n", "\n\n\n\n"]
    text = "".join(text + gaps[i % 3] for i, text in enumerate(TEXTS))
    (tmp_path / "tales.txt").write_text("\n\n" + text, encoding="utf-8")
    (tmp_path / "windows.txt").write_bytes(("\ufeff" + text.replace("\n", "\r\n")).encode())
    for i, document in enumerate(TEXTS):
        file = tmp_path / "tales" / str(i % 2) / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(document + "\n", encoding="utf-8")
    (tmp_path / "tales" / "empty.txt").write_text("\n")
    write_csv(tmp_path / "a.csv", ["n", "story"], [[i, text] for i, text in enumerate(TEXTS)])
    write_jsonl(tmp_path / "a.jsonl", [{"story": text} for text in TEXTS])
    parquet(tmp_path / "a.parquet", story=TEXTS, n=[*range(40)])
    choices = [
        Choice(str(tmp_path / name), tokenizer="train:300") for name in ("tales.txt", "windows.txt", "tales")
    ]
    choices += [
        Choice(str(tmp_path / f"a.{kind}"), text="story", kind="lm", tokenizer="train:300")
        for kind in ("csv", "jsonl", "parquet")
    ]
    assert all(choice.has_validation for choice in choices)
    first, *others = [documents(choice.store()) for choice in choices]
    assert {name: len(texts) for name, texts in first.items()} == {"train": 32, "validation": 4, "test": 4}
    assert sorted(text for texts in first.values() for text in texts) == sorted(TEXTS)
    for other in others:
        assert {name: sorted(texts) for name, texts in other.items()} == {
            name: sorted(texts) for name, texts in first.items()
        }


def test_a_file_without_blank_lines_has_a_document_a_line(tmp_path: Path) -> None:
    lines = [text.replace("\n", " ") for text in TEXTS]
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(lines) + "\n\n\n", encoding="utf-8")
    found = documents(prepare(load_file(path), tokenizer="train:300"))
    assert sorted(text for texts in found.values() for text in texts) == sorted(lines)


def test_a_test_file_and_another_split_seed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS[:30]), encoding="utf-8")
    (tmp_path / "b.txt").write_text("\n\n".join(TEXTS[30:]), encoding="utf-8")
    data = load_file(tmp_path / "a.txt", test_file=tmp_path / "b.txt")
    found = documents(prepare(data, tokenizer="train:300"))
    assert found["test"] == TEXTS[30:] and len(found["validation"]) == 3
    other = load_file(tmp_path / "a.txt", test_file=tmp_path / "b.txt", split_seed=1)
    assert not np.array_equal(data.parts[0].split, other.parts[0].split)


@pytest.mark.parametrize(
    ("name", "content", "options", "says"),
    [
        ("a.txt", b"one\n\ntwo", {}, "has 2 documents with text; at least 3 are needed"),
        ("a.txt", b"", {}, "a.txt has no text"),
        ("a.txt", b"a\n\nb\n\nc\xff\n\nd", {}, "line 5: byte 0xff is not UTF-8"),
        ("a.txt", b"a\n\nb\n\nc\n\nd", {"label": "topic"}, "leave out label"),
        ("a.txt", b"a\n\nb\n\nc\n\nd", {"text": "body"}, "no column 'body'; it has: text"),
        ("a.txt", b"a\n\nb\n\nc\n\nd", {"kind": "classification"}, "no column 'label'"),
        ("tales/a.txt", b"a\xff", {}, "a.txt, line 1: byte 0xff is not UTF-8"),
        ("a.csv", b"text,n\na,b\n", {}, "no column 'label'; it has: text, n; .* language model with --lm"),
        ("a.csv", b"text,label\na,b\n", {"kind": "lm", "text": "body"}, "no column 'body'"),
    ],
)
def test_refusals(tmp_path: Path, name: str, content: bytes, options: dict[str, str], says: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if path.parent != tmp_path:
        path = path.parent
    with pytest.raises(UserError, match=says):
        load_file(path, **options)


def test_a_folder_of_files_named_in_capitals(tmp_path: Path) -> None:
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i:02}.{'TXT' if i % 2 else 'txt'}").write_text(text)
    assert len(text_files(tmp_path)) == len(TEXTS) and is_text(tmp_path)


@pytest.mark.slow
def test_a_study_of_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "tales.txt").write_text("\n\n".join(TEXTS))
    words = ["study", "--data", tmp_path / "tales.txt", "--tokenizer", "train:300", "--max-length", 16]
    words += [
        "--steps",
        2,
        "--model",
        "gpt-tiny",
        "--lrs",
        "1e-3",
        "--seeds",
        1,
        "--jobs",
        1,
        "--out",
        tmp_path / "s",
    ]
    call = caller(monkeypatch, capsys)
    code, out, err = call(*words)
    assert code == 0 and "perplexity" in out, err
    assert out.splitlines()[-1].endswith(f"oelm generate {tmp_path / 's'} 'Once upon a time'")
    code, out, err = call("generate", tmp_path / "s", "Once", "--tokens", 3)
    assert code == 0 and out.startswith("Once"), err
