"""The encoder against Hugging Face's own calls, and the promise that text is only ever text."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oelm.data.tokenizer import Encoder, load_tokenizer, share_room, train_tokenizer
from oelm.errors import UserError
from tests.data.made import WORDS, sentence

anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def bpe() -> Any:
    rng = random.Random(0)
    return train_tokenizer([sentence(rng) for _ in range(200)], 400)


@pytest.fixture(scope="session")
def gpt2(tokenizer_dir: Path) -> Any:
    return load_tokenizer(str(tokenizer_dir / "gpt2"))


@pytest.fixture(scope="session")
def gpt2_encoder(gpt2: Any) -> Encoder:
    return Encoder(gpt2, 512)


def _cut(flat: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]


@given(st.lists(anything, min_size=1, max_size=5))
def test_a_trained_tokenizer_gives_any_text_back(texts: list[str]) -> None:
    tokenizer = train_tokenizer(["a small text"] * 3, 300)
    rows = _cut(*Encoder(tokenizer, 10_000).texts(texts)[:2])
    assert [tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in rows] == texts


def test_training_twice_gives_the_same_tokenizer() -> None:
    texts = [sentence(random.Random(i)) for i in range(300)]
    one, two = (train_tokenizer(texts, 500) for _ in range(2))
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    assert len(one) <= 500


SPECIAL = ["[SEP]", "[CLS] a [PAD]", "the <|endoftext|> film", "[MASK]", "<s></s>", "[UNK]"]


@pytest.mark.parametrize("text", SPECIAL)
def test_a_text_that_looks_like_a_special_token_is_text(bert: Any, bpe: Any, text: str) -> None:
    for tokenizer in (bert, bpe):
        special = set(tokenizer.all_special_ids)
        encoder = Encoder(tokenizer, 64)
        before, after = encoder.single
        [row] = _cut(*encoder.texts([text])[:2])
        inner = row[len(before) : len(row) - len(after)]
        assert inner
        assert not special & set(inner)
        assert row == tokenizer(text, split_special_tokens=True)["input_ids"]


def test_the_real_special_tokens_as_text(gpt2: Any, tokenizer_dir: Path) -> None:
    assert 50256 not in Encoder(gpt2, 64).texts(["before <|endoftext|> after"])[0].tolist()
    wordpiece = load_tokenizer(str(tokenizer_dir / "bert-base-uncased"))
    assert Encoder(wordpiece, 64).texts(["a [SEP] b"])[0].tolist().count(102) == 1  # its own, at the end


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(anything, anything), min_size=1, max_size=5), st.integers(10, 40))
def test_bert_pairs_as_hugging_face_builds_them(
    bert: Any, pairs: list[tuple[str, str]], max_length: int
) -> None:
    encoder = Encoder(bert, max_length)
    flat, lengths, second, cut = encoder.pairs([a for a, _ in pairs], [b for _, b in pairs])
    rows = _cut(flat, lengths)
    overlong = 0
    for (a, b), row, start in zip(pairs, rows, second, strict=True):
        options = {"truncation": "longest_first", "max_length": max_length, "split_special_tokens": True}
        expected = bert([a], [b], **options)
        assert row == expected["input_ids"][0]
        assert [int(i >= start) for i in range(len(row))] == expected["token_type_ids"][0]
        overlong += len(bert([a], [b], split_special_tokens=True)["input_ids"][0]) > max_length
    assert cut == overlong


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(anything, min_size=1, max_size=5), st.integers(8, 30))
def test_single_texts_as_hugging_face_cuts_them(bert: Any, texts: list[str], max_length: int) -> None:
    flat, lengths, cut = Encoder(bert, max_length).texts(texts)
    expected = bert(texts, truncation=True, max_length=max_length, split_special_tokens=True)["input_ids"]
    assert _cut(flat, lengths) == expected
    assert cut == sum(len(bert(text, split_special_tokens=True)["input_ids"]) > max_length for text in texts)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.tuples(anything, anything))
def test_gpt2_pairs_are_the_published_joined_text(
    gpt2: Any, gpt2_encoder: Encoder, pair: tuple[str, str]
) -> None:
    flat, _, second, _ = gpt2_encoder.pairs([pair[0]], [pair[1]])
    expected = gpt2(f"{pair[0]} [SEP] {pair[1]}", split_special_tokens=True)["input_ids"]
    assert flat.tolist() == expected
    assert second.tolist() == [len(expected)]  # GPT-2 knows no segments


@given(st.integers(0, 100), st.integers(0, 100), st.integers(2, 60))
def test_the_longer_text_of_a_pair_is_cut_first(first: int, second: int, room: int) -> None:
    a, b = share_room(first, second, room)
    assert (a <= first, b <= second, a + b) == (True, True, min(first + second, room))
    if min(first, second) <= room // 2:
        assert min(first, second) == (a if first <= second else b)


def test_the_real_tokenizers_by_name(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OELM_TOKENIZER_DIR", str(tokenizer_dir))
    assert len(load_tokenizer("gpt2")) == 50257
    wordpiece = load_tokenizer("bert-base-uncased")
    assert len(wordpiece) == 30522
    assert wordpiece("Hello, World")["input_ids"] == [101, 7592, 1010, 2088, 102]


def test_tokens_take_two_bytes_where_they_fit(bpe: Any) -> None:
    assert Encoder(bpe, 8).texts(["a"])[0].dtype == np.uint16


@pytest.mark.parametrize(
    ("name", "said"),
    [("train:100", "between 257 and"), ("train:many", "between 257 and"), ("train:99999999999", "1,000,000")],
)
def test_sizes_that_cannot_be_trained(name: str, said: str) -> None:
    from oelm.data.tokenizer import trained_size

    with pytest.raises(UserError, match=said):
        trained_size(name)


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_no_room_for_text(bert: Any) -> None:
    with pytest.raises(UserError, match="max_length 4 leaves no room for text; use at least 5"):
        Encoder(bert, 4)


def test_a_million_characters_are_cut_at_max_length(bpe: Any) -> None:
    flat, lengths, cut = Encoder(bpe, 512).texts(["x" * 1_000_000, " ".join(WORDS * 5000)])
    assert lengths.tolist() == [512, 512]
    assert cut == 2
    assert len(flat) == 1024
