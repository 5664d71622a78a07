"""Sequence to sequence: sources and targets, against what Hugging Face's tokenizers and collator say."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import DataCollatorForSeq2Seq, MBartTokenizer

from oelm.cli import main as cli
from oelm.data import Choice, load_file, load_task, padded_batch, prepare
from oelm.errors import UserError
from tests.data.made import byte_pairs, parquet, sentence, split_sizes, unigram_pieces, write_csv, write_jsonl

ENDS = {"t5": ([], [1]), "bart": ([0], [2])}  # what stands before and after a text


def languages() -> Any:
    """mBART's tokenizer: a source and a target end with different tokens."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    letters = [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    return MBartTokenizer(vocab=[*pieces, *letters], src_lang="en_XX", tgt_lang="de_DE")


MAKE = {"t5": unigram_pieces, "bart": byte_pairs, "mbart": languages}


def texts(rows: int = 80, seed: int = 0) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    return [(f"{sentence(rng, 1, 25)} {i}", sentence(rng, 1, 12)) for i in range(rows)]


def pairs_file(path: Path, rows: list[tuple[str, str]]) -> Path:
    return write_csv(path, ["source", "target"], [[*row] for row in rows])


def folder_of(kind: str, tmp_path: Path) -> str:
    MAKE[kind]().save_pretrained(tmp_path / kind)
    return str(tmp_path / kind)


def item(split: Any, at: int) -> tuple[list[int], list[int]]:
    a, b = split.offsets[at : at + 2]
    c, d = split.target_offsets[at : at + 2]
    return split.tokens[a:b].tolist(), split.target_tokens[c:d].tolist()


@pytest.mark.parametrize("kind", MAKE)
def test_tokens_and_batches_are_those_of_hugging_face(tmp_path: Path, kind: str) -> None:
    rows, tokenizer = texts(), MAKE[kind]()
    data = load_file(pairs_file(tmp_path / "x.csv", rows), text="source", target="target")
    store = prepare(data, tokenizer=folder_of(kind, tmp_path), max_length=20, max_target_length=9)
    assert (store.kind, store.metric, store.label_names) == ("seq2seq", "f1", [])
    seen = []
    for split in store.splits.values():
        cut = [0, 0]
        for at, row in enumerate(split.ids.tolist()):
            source, target = rows[row]
            expected = tokenizer(source, truncation=True, max_length=20)["input_ids"]
            written = tokenizer(text_target=target, truncation=True, max_length=9)["input_ids"]
            assert item(split, at) == (expected, written)
            if kind in ENDS:
                before, after = ENDS[kind]
                assert written[: len(before)] == before and written[-len(after) :] == after
            cut[0] += len(tokenizer(source)["input_ids"]) > 20
            cut[1] += len(tokenizer(text_target=target)["input_ids"]) > 9
        assert [split.meta["truncated"], split.meta["target_truncated"]] == cut
        seen += split.ids.tolist()
    assert sorted(seen) == list(range(80))
    said = " ".join(map(str, store.warnings))
    assert "train items are cut at 20 tokens" in said and "train targets are cut at 9 tokens" in said
    train = store["train"]
    items = np.arange(7)
    batch = padded_batch(train, items, store.pad_id)
    features = [dict(zip(("input_ids", "labels"), item(train, at), strict=True)) for at in items]
    collated = DataCollatorForSeq2Seq(tokenizer, return_tensors="pt")(features)
    assert batch.inputs["input_ids"].tolist() == collated["input_ids"].tolist()
    assert batch.inputs["attention_mask"].tolist() == collated["attention_mask"].tolist()
    assert batch.targets["labels"].tolist() == collated["labels"].tolist()


def test_a_target_ends_even_where_the_tokenizer_adds_nothing(tmp_path: Path) -> None:
    data = load_file(pairs_file(tmp_path / "x.csv", texts()), text="source", target="target")
    store = prepare(data, tokenizer="train:300")
    end = store.tokenizer().eos_token_id
    for at in range(len(store["train"])):
        source, target = item(store["train"], at)
        assert end not in source
        assert target.index(end) == len(target) - 1


def test_what_the_tokens_stand_for(tmp_path: Path) -> None:
    """Bytes are those of the targets as they are kept; measured splits keep both texts whole."""
    rows = texts()
    data = load_file(pairs_file(tmp_path / "x.csv", rows), text="source", target="target")
    folder = folder_of("bart", tmp_path)
    whole, cut = prepare(data, tokenizer=folder), prepare(data, tokenizer=folder, max_target_length=5)
    assert whole.max_target_length == 512
    for name, split in whole.splits.items():
        ids = split.ids.tolist()
        assert split.meta["target_bytes"] == sum(len(rows[row][1].encode()) for row in ids)
        tokenizer = whole.tokenizer()
        kept = [item(cut[name], at)[1] for at in range(len(ids))]
        texts_kept = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in kept]
        assert cut[name].meta["target_bytes"] == sum(len(text.encode()) for text in texts_kept)
        if name != "train":
            known = cut[name].right_texts()
            assert {row: (r["source"], r["target"]) for row, r in known.items()} == {r: rows[r] for r in ids}


def test_every_kind_of_file_gives_the_same_items(tmp_path: Path) -> None:
    rows = texts(60)
    columns = {name: [row[i] for row in rows] for i, name in enumerate(("source", "target"))}
    files = [
        pairs_file(tmp_path / "x.csv", rows),
        write_csv(tmp_path / "x.tsv", ["source", "target"], [[*row] for row in rows], delimiter="\t"),
        write_jsonl(tmp_path / "x.jsonl", [{"source": s, "target": t} for s, t in rows]),
        parquet(tmp_path / "x.parquet", **columns),
    ]
    found = []
    for file in files:
        store = prepare(load_file(file, text="source", target="target"), tokenizer="train:300")
        found.append({n: (s.ids.tolist(), s.target_tokens.tolist()) for n, s in store.splits.items()})
    assert all(one == found[0] for one in found)


def test_a_source_with_several_targets_stays_on_one_side(tmp_path: Path) -> None:
    rows = [(source, f"{target} {n}") for source, target in texts(40) for n in range(4)]
    path = pairs_file(tmp_path / "x.csv", rows)
    store = prepare(load_file(path, text="source", target="target"), tokenizer="train:300")
    sides = [{rows[row][0] for row in split.ids.tolist()} for split in store.splits.values()]
    assert all(sides) and sum(map(len, sides)) == len(set.union(*sides)) == 40
    other = prepare(load_file(path, text="source", target="target", split_seed=1), tokenizer="train:300")
    assert store["test"].ids.tolist() != other["test"].ids.tolist()


def test_half_a_pair_is_dropped_and_known_sources_are_counted(tmp_path: Path) -> None:
    rows = texts(60)
    rows[3], rows[7] = ("", "something"), ("something", "  ")
    train = pairs_file(tmp_path / "x.csv", rows)
    test = pairs_file(tmp_path / "test.csv", [(rows[0][0], "another target"), ("a new source", "a target")])
    data = load_file(train, text="source", target="target", test_file=test)
    assert data.dropped == {"empty": 2}
    assert split_sizes(data) == {"train": 53, "validation": 5, "test": 2}
    assert data.duplicates["train/test"] + data.duplicates["validation/test"] == 1


def test_a_subset_of_train_is_nested(tmp_path: Path) -> None:
    path = pairs_file(tmp_path / "x.csv", texts(100))
    load = lambda n: load_file(path, text="source", target="target", train_size=n)  # noqa: E731
    small, large = ({*np.flatnonzero(load(n).parts[0].split == 0).tolist()} for n in (20, 50))
    assert len(small) == 20 and small < large
    with pytest.raises(UserError, match=r"train_size 90 does not fit x: it has 80 training rows$"):
        load(90)


def test_inspect_shows_sources_and_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pairs_file(tmp_path / "x.csv", texts())
    words = ["oelm", "data", "inspect", str(path), "--text", "source", "--target", "target"]
    for more in (["--json"], []):
        monkeypatch.setattr(sys, "argv", [*words, "--max-length", "64", "--max-target-length", "8", *more])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
        out = capsys.readouterr().out
        if more:
            for split in json.loads(out)["splits"].values():
                assert split["target_length_50"] <= split["target_length_100"]
                assert split["target_length_100"] == 8 and split["target_truncated_share"] > 0
                assert split["truncated_share"] == 0
        else:
            assert "tokens a source" in out and "tokens a target" in out and "cut at 8" in out


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    path = pairs_file(tmp_path / "x.csv", texts(20))
    for options, said in (
        ({"target": "target", "label": "target"}, "it does not go with label"),
        ({"target": "target", "text_pair": "x"}, "it does not go with text_pair"),
        ({"target": "source"}, "text and target must be different columns"),
        ({"target": "aim"}, "has no column 'aim'; it has: source, target"),
    ):
        with pytest.raises(UserError, match=said):
            load_file(path, text="source", **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="imdb is a task with fixed columns and splits; target is for files"):
        Choice("imdb", target="summary").load()
    with pytest.raises(UserError, match="max_target_length 1 leaves no room for text; use at least 2"):
        Choice(str(path), text="source", target="target", tokenizer="train:300", max_target_length=1).store()
    write_jsonl(tmp_path / "n.jsonl", [{"source": "a", "target": "b"}, {"source": "a", "target": 3}])
    with pytest.raises(UserError, match=r"row 2: column 'target' holds int '3' where text was expected"):
        load_file(tmp_path / "n.jsonl", text="source", target="target")


def test_other_kinds_have_no_targets(tmp_path: Path) -> None:
    parquet(tmp_path / "ptb-pos" / "train.parquet", tokens=[["a", "b"]] * 30, tags=[["X", "Y"]] * 30)
    parquet(tmp_path / "ptb-pos" / "test.parquet", tokens=[["a", "b"]], tags=[["X", "Y"]])
    store = prepare(load_task("ptb-pos", data_dir=tmp_path), tokenizer="train:300")
    assert store.max_target_length is None
    assert "max_target_length" not in store.meta
