"""Lines answered many at a time: in order, each as if it were the only one, and without waiting for more."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oelm
from oelm.errors import UserError
from oelm.inference import prediction
from oelm.inference.prediction import Counts, chunks, lines_of, open_lines, predict
from oelm.inference.trained import reader_of
from tests.data.made import WORDS, sentence, unigram_pieces, wordpiece
from tests.training.language_models import tokenizer as byte_level

LONGEST = 24
NOTHING = ("", "  ", "\t ", "\x07\x08")  # the last one holds no token that WordPiece knows
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GPT = {"d_model": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
LABELS = {0: "no", 1: "yes", 2: "maybe"}


def make_reader(kind: str) -> Any:
    torch.manual_seed(0)
    words = {"gpt": byte_level, "gpt-mean": byte_level, "t5": unigram_pieces}.get(kind, wordpiece)()
    model: Any
    if kind.startswith("gpt"):
        ids = {"vocab_size": len(words), "pooling": "mean" if kind == "gpt-mean" else "last"}
        model = oelm.OelmGPTForSequenceClassification(oelm.OelmGPTConfig(**GPT, **ids, id2label=LABELS))
    elif kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        config = transformers.T5Config(**sizes, vocab_size=len(words), decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config)
    else:
        config = transformers.BertConfig(**BERT, vocab_size=len(words), id2label=LABELS)
        config.text_pairs = kind == "pairs"
        if kind in ("number", "answers"):
            config.num_labels = {"number": 1, "answers": 2}[kind]
        name = {"tags": "TokenClassification", "answers": "QuestionAnswering"}
        model = getattr(transformers, f"BertFor{name.get(kind, 'SequenceClassification')}")(config)
    with torch.no_grad():  # large enough that answers differ
        for parameter in model.parameters():
            parameter.mul_(3)
    reader = reader_of(model)(model.eval(), words, LONGEST)
    if kind == "t5":
        reader.options = {"max_new_tokens": 6}
    return reader


@pytest.fixture(scope="module")
def readers() -> dict[str, Any]:
    return {
        kind: make_reader(kind)
        for kind in ("gpt", "gpt-mean", "bert", "pairs", "number", "tags", "answers", "t5")
    }


def texts() -> Any:
    """Lines of very different lengths, some past what the model reads, some without anything to read."""
    some = st.lists(st.sampled_from(WORDS), min_size=1, max_size=60).map(" ".join)
    return st.lists(st.one_of(some, st.sampled_from(NOTHING)), max_size=40)


@torch.no_grad()
def alone(reader: Any, line: str) -> list[float]:
    """The logits of one text by one plain call, without padding, batches and fast paths."""
    ids = reader.tokenizer(line, truncation=True, max_length=LONGEST, return_tensors="pt")
    return reader.model(input_ids=ids["input_ids"]).logits[0].softmax(-1).tolist()


@pytest.mark.parametrize("kind", ["gpt", "gpt-mean", "bert"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=texts(), most=st.sampled_from([1, 7, 8192]), budget=st.sampled_from([24, 64, 16_384]))
def test_every_line_is_answered_as_if_alone(readers, kind, lines, most, budget):
    reader, counts = readers[kind], Counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "LINES", most)
        patch.setattr("oelm.training.evaluate.TOKENS", budget)
        answers = list(predict(reader, lines, "fp32", counts))
    assert [answer["text"] for answer in answers] == lines
    nothing = [not line.strip() or (kind == "bert" and line == NOTHING[-1]) for line in lines]
    for line, answer, empty in zip(lines, answers, nothing, strict=True):
        if empty:
            assert answer == {"text": line, "label": None, "score": None, "scores": None}
            continue
        right = alone(reader, line)
        assert list(answer["scores"].values()) == pytest.approx(right, abs=1e-5)
        assert answer["scores"][answer["label"]] == answer["score"] == max(answer["scores"].values())
    lengths = [len(reader.encoder.ids([line])[0]) for line in lines]
    room = LONGEST - (2 if kind == "bert" else 0)
    cut = sum(length > room for length in lengths)
    assert counts == Counts(len(lines), sum(nothing), cut)


def one_line(kind: str, rng: random.Random) -> str:
    if kind in ("pairs", "answers"):
        return f"{sentence(rng, 1, 9)}\t{sentence(rng, 1, 90 if kind == 'answers' else 40)}"
    return sentence(rng, 1, 40)


@pytest.mark.parametrize("kind", ["pairs", "number", "tags", "answers", "t5"])
def test_other_kinds_answer_as_they_do_alone(readers, kind, monkeypatch):
    rng, reader = random.Random(1), readers[kind]
    lines = [one_line(kind, rng) for _ in range(60)]
    lines[7] = lines[30] = ""
    single = [next(predict(reader, [line], "fp32", Counts())) for line in lines]
    monkeypatch.setattr("oelm.training.evaluate.TOKENS", 128)
    monkeypatch.setattr(prediction, "LINES", 25)
    for mine, right in zip(predict(reader, lines, "fp32", Counts()), single, strict=True):
        assert mine.keys() == right.keys()
        for name, value in right.items():
            near = isinstance(value, float | dict)
            assert mine[name] == (
                pytest.approx(value, abs=1e-4 if kind == "number" else 1e-5) if near else value
            )
    assert len({str(answer) for answer in single}) > 10, "the answers tell the lines apart"


def test_a_line_that_cannot_be_read_comes_after_the_answers_before_it(readers):
    answers = predict(readers["pairs"], ["a dog\ta cat", "", "a dog"], "fp32", Counts())
    assert [next(answers)["text"], next(answers)["text"]] == ["a dog\ta cat", ""]
    with pytest.raises(UserError, match="line 3 is not a pair"):
        next(answers)


def test_chunks_end_with_a_pause_of_the_input_and_never_grow_beyond_their_size(monkeypatch):
    monkeypatch.setattr(prediction, "LINES", 3)
    monkeypatch.setattr(prediction, "LETTERS", 10)
    assert list(chunks(["a", "b", None, "c"])) == [(["a", "b"], True), (["c"], True)]
    assert list(chunks("abcd")) == [(["a", "b", "c"], False), (["d"], True)]
    assert list(chunks(["x" * 9, "y" * 9, "z"])) == [(["x" * 9, "y" * 9], False), (["z"], True)]
    monkeypatch.setattr(prediction, "PAUSE", 0.0)
    assert [chunk for chunk, late in chunks("abc") if late] == [["a"], ["b"], ["c"], []]


def test_lines_of_a_pipe_come_when_they_are_there():
    source, sink = os.pipe()
    with open(source, "rb") as file:
        lines = lines_of(file)
        os.write(sink, b"\xef\xbb\xbfone\r\ntw")
        assert [next(lines), next(lines)] == ["one", None]
        os.write(sink, b"o\n\n")
        threading.Timer(0.3, lambda: (os.write(sink, "drei ü".encode()), os.close(sink))).start()
        assert list(lines) == ["two", "", None, "drei ü"]


def test_a_pipe_that_nobody_writes_into_is_told_while_it_is_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prediction, "SILENCE", 0.2)
    os.mkfifo(tmp_path / "pipe")
    threading.Timer(0.6, (tmp_path / "pipe").write_text, ("one\ntwo\n",)).start()
    assert [line for line in open_lines(tmp_path / "pipe") if line] == ["one", "two"]
    assert capsys.readouterr().err == f"waiting for lines from {tmp_path / 'pipe'}; Ctrl-C ends\n"
    (tmp_path / "lines.txt").write_text("one\n")
    lines = open_lines(tmp_path / "lines.txt")
    assert next(lines) == "one"
    time.sleep(0.4)  # whoever asks for lines is slow, not the file
    assert [*lines] == [] and not capsys.readouterr().err


def test_what_never_ends_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is a device"):
        next(open_lines(Path("/dev/zero")))
    (tmp_path / "lines.txt").write_bytes(b"short\n" + b"x" * (3 << 20))
    assert len([*open_lines(tmp_path / "lines.txt")]) == 2
    monkeypatch.setattr(prediction, "LONGEST_LINE", 1 << 20)
    with pytest.raises(UserError, match="line 2 is longer than 1 MiB"):
        list(open_lines(tmp_path / "lines.txt"))


@pytest.mark.slow
def test_a_program_that_asks_line_by_line_is_answered(tmp_path: Path) -> None:
    reader = make_reader("gpt")
    reader.model.save_pretrained(tmp_path)
    reader.tokenizer.save_pretrained(tmp_path)
    words = [sys.executable, "-m", "oelm", "predict", str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in ("a dog", "", "a cat and a dog"):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())  # the next line is not written before
            assert answer["text"] == line and (answer["label"] is None) == (not line)
        process.stdin.close()
        assert process.wait(60) == 0 and process.stdout.read() == ""
