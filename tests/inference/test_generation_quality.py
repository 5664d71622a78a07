"""How a language model writes: the measures by hand, the texts against one `generate` for each prompt."""

import json
import re
from collections import Counter

import pyarrow.parquet
import pytest
import torch

from oelm.inference.generation_quality import Writing, distinct, repetition, words_of
from oelm.inference.trained import Trained
from tests.command_line import caller
from tests.training.language_models import FAMILIES, WINDOW, corpus, random_model


def test_the_measures_by_hand():
    assert words_of("It's  Good, very GOOD!") == ["it", "'", "s", "good", ",", "very", "good", "!"]
    one = [["a", "b", "a", "b"], ["a"]]
    other = [["c", "d"]]
    # Two words of either: a, b and c, d. One pair of either: (a, b) and (c, d), none across texts.
    assert distinct(one, other, 1) == [1.0, 1.0]
    assert distinct(one, [["c", "c", "c", "d", "e"]], 1) == [2 / 5, 3 / 5]
    assert distinct(one, [["c", "c", "c", "c"]], 2) == [2 / 3, 1 / 3]
    assert distinct(one, other, 3) == [None, None]
    # a b c d e a b c d: 6 of four words, one of them twice; the short text has none and does not count.
    assert repetition([list("abcdeabcd"), list("abc")]) == pytest.approx(1 / 6)
    assert repetition([list("aaaaaaa"), list("abcde")]) == pytest.approx((3 / 4 + 0) / 2)
    assert repetition([list("abc")]) is None


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: random_model(family, root / family) for family in FAMILIES}


@pytest.fixture
def oelm_cli(monkeypatch, capsys, tmp_path_factory):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "language-cache"))
    return caller(monkeypatch, capsys)


SMALL = Writing(prompts=20, prompt_tokens=4, tokens=30, temperature=0.0)


def measure(folder, data, writing=SMALL, **settings):
    trained = Trained(folder)
    for name, value in settings.items():
        setattr(trained.model.generation_config, name, value)
    return trained.generation("test", writing, name="tinystories", data_dir=str(data))


def plain_measures(texts):
    """The definitions once more, in the words of another."""
    words = [re.findall(r"\w+|[^\w\s]", text.lower()) for text in texts]
    fours = [Counter(zip(w, w[1:], w[2:], w[3:], strict=False)) for w in words]
    shares = [sum(n - 1 for n in c.values()) / c.total() for c in fours if c]
    return {"words": sum(map(len, words)) / len(words), "repetition": sum(shares) / len(shares)}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_single_calls(family, data, models, monkeypatch, tmp_path):
    """All held-out documents that are long enough, one after another, without batches and without us."""
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path))
    texts = pyarrow.parquet.read_table(data / "tinystories" / "validation.parquet")["text"].to_pylist()
    trained = Trained(models[family])
    encode = lambda text: trained.tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    long = [ids for text in texts if len(ids := encode(text)) > SMALL.prompt_tokens]
    writing = Writing(len(long), SMALL.prompt_tokens, SMALL.tokens, 0.0)
    found = measure(models[family], data, writing)
    assert (found["prompts"], found["prompts_are"]) == (len(long), "documents")
    end = trained.tokenizer.eos_token_id
    written, ended = [], 0
    for ids in long:
        given = torch.tensor([[end, *ids[: SMALL.prompt_tokens]]])
        options = {"do_sample": False, "max_new_tokens": SMALL.tokens, "eos_token_id": end}
        mask = torch.ones_like(given)
        out = trained.model.generate(given, attention_mask=mask, pad_token_id=end, **options)
        new = out[0, given.shape[1] :].tolist()
        ended += end in new
        written.append(new[: new.index(end)] if end in new else new)
    real = [ids[SMALL.prompt_tokens :][: SMALL.tokens] for ids in long]
    for side, rows in (("generated", written), ("held_out", real)):
        expected = plain_measures([trained.tokenizer.decode(row) for row in rows])
        expected["tokens"] = sum(map(len, rows)) / len(rows)
        for name, value in expected.items():
            assert found["measures"][name][side] == pytest.approx(value), (side, name)
    assert found["measures"]["ended"]["generated"] == ended / len(long)
    whole = sum(len(ids) - SMALL.prompt_tokens < SMALL.tokens for ids in long)
    assert found["measures"]["ended"]["held_out"] == whole / len(long)


def test_what_decides_the_answer_and_what_does_not(data, models, monkeypatch, tmp_path):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path))
    sampled = Writing(20, 4, 30, temperature=1.0, seed=1)
    first = measure(models["gpt2"], data, sampled)
    assert measure(models["gpt2"], data, sampled) == first
    own = {"repetition_penalty": 9.0, "top_p": 0.01, "top_k": 1, "no_repeat_ngram_size": 2}
    assert measure(models["gpt2"], data, sampled, **own) == first, "a checkpoint's settings are not measured"
    other = measure(models["gpt2"], data, Writing(20, 4, 30, temperature=1.0, seed=2))
    assert other["measures"] != first["measures"]
    greedy = measure(models["gpt2"], data, Writing(20, 4, 30, temperature=0.0, seed=1))
    one_of_one = measure(models["gpt2"], data, Writing(20, 4, 30, temperature=1.0, top_k=1, seed=1))
    assert one_of_one["measures"] == greedy["measures"]


def test_more_prompts_than_documents_are_pieces_of_the_stream(data, models, monkeypatch, tmp_path):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path))
    found = measure(models["gpt2"], data, Writing(1000, 4, 8, 0.0))
    assert found["prompts_are"] == "pieces"
    assert 20 < found["prompts"] < 1000
    assert found["measures"]["tokens"]["held_out"] <= 8


def test_on_the_command_line(oelm_cli, data, models):
    small = ("--prompts", 8, "--prompt-tokens", 4, "--tokens", 10)
    words = ("evaluate", models["gpt2"], "--task", "tinystories", "--data-dir", data, "--generation", *small)
    code, out, err = oelm_cli(*words, "--json")
    assert code == 0, err
    (line,) = out.splitlines()
    answer = json.loads(line)
    assert "metrics" not in answer  # the whole split is not measured again
    assert set(answer["generation"]["measures"]["distinct_2"]) == {"generated", "held_out"}
    table = oelm_cli(*words)[1].splitlines()
    assert table[0] == "8 documents continued" and table[1].split() == ["generated", "held-out"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", WINDOW), f"but this model reads {WINDOW}; ask for fewer"),
        (("--prompts", 0), "--prompts must be at least 1"),
        (("--temperature", -1), "must not be negative"),
        (("--prompt-tokens", 40, "--tokens", 8, "--split", "validation"), "no text longer than"),
    ],
)
def test_mistakes_are_one_line(words, message, oelm_cli, data, models):
    base = ("evaluate", models["oelm-gpt"], "--task", "tinystories", "--data-dir", data, "--generation")
    code, _, err = oelm_cli(*base, *words)
    assert code == 2
    assert message in err and err.strip().count("\n") == 0


def test_a_model_started_here_writes_no_further_than_it_was_trained(oelm_cli, data, tmp_path, monkeypatch):
    """It has 1,024 positions, of which training has seen 16."""
    run = tmp_path / "run"
    words = ("--data", "tinystories", "--data-dir", data, "--model", "gpt-tiny", "--method", "baseline")
    small = ("--set", "task.tokenizer=train:300", "--max-length", 16, "--steps", 2, "--batch-size", 2)
    code, _, err = oelm_cli("train", *words, *small, "--out", run)
    assert code == 0, err
    trained, lengths = Trained(run), []
    plain = trained.model.generate
    monkeypatch.setattr(
        trained.model, "generate", lambda *a, **k: lengths.append((out := plain(*a, **k)).shape) or out
    )
    trained.model.generation_config.eos_token_id = None
    trained.generate("Once", 100, temperature=1.0, top_k=300, seed=0)
    assert lengths == [(1, 16)]
    code, _, err = oelm_cli("generate", run, "once " * 30)
    assert code == 2 and "the model knows texts of up to 16" in err
