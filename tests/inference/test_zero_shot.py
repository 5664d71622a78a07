"""Zero-shot classification: every likelihood against one plain call of the model, and a model that knows."""

import json
import random

import numpy as np
import pytest
import torch

from oelm.cli import show
from oelm.data import Choice
from oelm.inference.trained import Trained
from oelm.inference.zero_shot import make_question, read_items
from tests.command_line import caller
from tests.data.made import sentence, write_csv
from tests.training.language_models import FAMILIES, WINDOW, corpus, random_model

# Of different lengths in tokens, so that sum and mean differ.
LABELS = {"no": " bad", "yes": " warm and very good"}
TEMPLATE = "{text} It was"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    rng = random.Random(0)
    rows = [[f"{sentence(rng, 3, 8)} {i}", ("yes", "no")[i % 3 == 0]] for i in range(400)]
    return write_csv(tmp_path_factory.mktemp("zero") / "texts.csv", ["body", "topic"], rows)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: random_model(family, root / family) for family in FAMILIES}


@pytest.fixture
def oelm_cli(monkeypatch, capsys, tmp_path_factory):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "zero-cache"))
    return caller(monkeypatch, capsys)


def ask(folder, file, template=TEMPLATE, labels="no= bad,yes= warm and very good", **more):
    return Trained(folder).zero_shot(str(file), "test", template, labels, text="body", label="topic", **more)


@torch.no_grad()
def plain_scores(trained, prompt):
    """log P(words | prompt), token by token, and how many tokens: one call, no padding, no batch."""
    found = []
    for words in LABELS.values():
        encoded = [trained.tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, words)]
        start, rest = [trained.tokenizer.eos_token_id, *encoded[0]], encoded[1]
        logits = trained.model(torch.tensor([start + rest])).logits[0].double()
        logs = logits.log_softmax(-1)
        places = range(len(start) - 1, len(start) + len(rest) - 1)
        found.append([sum(float(logs[p, t]) for p, t in zip(places, rest, strict=True)), len(rest)])
    return np.array(found).T


@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_are_those_of_plain_likelihoods(family, models, file):
    answer = ask(models[family], file)
    trained = Trained(models[family])
    items = read_items(Choice(str(file), text="body", label="topic"), "test", None, 0)
    assert items.names == ["no", "yes"] and answer["items"] == len(items.labels) == 40
    nothing, _ = plain_scores(trained, TEMPLATE.format(text="N/A"))
    expected = {"sum": [], "mean": [], "calibrated": []}
    for texts in items.texts:
        sums, counts = plain_scores(trained, TEMPLATE.format(**texts))
        expected["sum"].append(sums.argmax())
        expected["mean"].append((sums / counts).argmax())
        expected["calibrated"].append((sums - nothing).argmax())
    for name, guesses in expected.items():
        confusion = np.zeros((2, 2), dtype=int)
        np.add.at(confusion, (items.labels, np.array(guesses)), 1)
        assert answer["metrics"][name]["confusion"] == confusion.tolist(), name
        assert answer["metrics"][name]["accuracy"] == np.mean(items.labels == guesses)
    assert len({tuple(guesses) for guesses in expected.values()}) > 1, "or nothing tells the scores apart"
    share = (items.labels == 1).mean()
    assert answer["references"]["majority"]["accuracy"] == share


def test_where_the_space_stands_does_not_matter(models, file):
    """As letters the two are the same; what is cut into tokens across the boundary must not show."""
    here = ask(models["gpt2"], file)["metrics"]
    there = ask(models["gpt2"], file, TEMPLATE + " ", "no=bad,yes=warm and very good")["metrics"]
    assert here == there


def test_a_long_text_loses_its_end_and_never_the_template(models, tmp_path):
    rng = random.Random(0)
    rows = [[f"{i} {sentence(rng, 100, 140)}", ("yes", "no")[i % 2]] for i in range(60)]
    file = write_csv(tmp_path / "long.csv", ["body", "topic"], rows)
    answer = ask(models["gpt2"], file)
    assert answer["cut"] == answer["items"]
    from oelm.inference.zero_shot import _PromptEncoder

    trained = Trained(models["gpt2"])
    asker = _PromptEncoder(trained.tokenizer, *make_question(TEMPLATE, None, ["no", "yes"], False), WINDOW)
    for ids, start in asker.encode({"text": rows[0][0]}):
        text = trained.tokenizer.decode(ids[1:])
        assert text.startswith(rows[0][0][:40]) and " It was " in text
        assert WINDOW - 8 < len(ids) - 1 <= WINDOW and 0 < start < len(ids)


def test_a_limit_draws_some(models, file):
    some = ask(models["gpt2"], file, limit=10, seed=1)
    assert some["items"] == 10
    assert some == ask(models["gpt2"], file, limit=10, seed=1)


def test_the_table_has_the_names_of_the_scores(models, file):
    """The mean per token is not "mean of the training labels", which a baseline of regression is."""
    table = show.evaluated({"zero_shot": ask(models["gpt2"], file, limit=10)})
    names = [line.split("  ")[0] for line in table.splitlines()]
    assert names[1:] == ["score", "sum", "mean", "calibrated", "most frequent class"]


def test_a_model_that_has_read_the_answers_gives_them(oelm_cli, tmp_path, file):
    """Trained on texts that say what they are, by the same words: then asked about others."""

    def told(rng):
        mark, verdict = rng.choice([("great", "good"), ("dull", "bad")])
        return f"{sentence(rng, 1, 3)} {mark} {sentence(rng, 1, 3)}. It was {verdict}"

    data = corpus(tmp_path / "data", 1500, told)
    rng = random.Random(7)
    texts = dict.fromkeys(
        told(rng).removesuffix(" It was good").removesuffix(" It was bad") for _ in range(200)
    )
    rows = [[text, "up" if "great" in text else "down"] for text in texts]
    unseen = write_csv(tmp_path / "unseen.csv", ["text", "label"], rows)
    train = ("--tokenizer", "train:320", "--steps", 150, "--lr", "4e-3", "--max-length", 32)
    lm = ("train", "--task", "tinystories", "--data-dir", data, "--model", "gpt-tiny", *train)
    code, _, err = oelm_cli(*lm, "--out", tmp_path / "lm")
    assert code == 0, err
    question = ("--template", "{text} It was", "--labels", "down= bad,up= good", "--json")
    code, out, err = oelm_cli("evaluate", tmp_path / "lm", "--zero-shot", unseen, *question)
    assert code == 0, err
    answer = json.loads(out)["zero_shot"]
    assert answer["metrics"]["sum"]["accuracy"] > 0.9 > answer["references"]["majority"]["accuracy"] + 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--template", "It was"), "must hold {text}, and no other field"),
        (("--template", "{text} {text_pair}"), "must hold {text}, and no other field"),
        (("--template", "{text.upper} was"), "must hold {text}, and no other field"),
        (("--template", "{text"), "{{ for a brace"),
        (("--template", "{text} x", "--labels", "no= bad"), "for each class: 'no= words,yes= words'"),
        (("--template", "{text} x", "--labels", "no=,yes= y"), "must give words for each class"),
        (("--template", "{text} x", "--split", "dev"), "has no split 'dev'"),
        (("--template", "{text} x", "--limit", 0), "--limit must be at least 1"),
        (("--template", "{text}" + " very long" * 60), "--template and --labels alone need"),
        ((), "--zero-shot needs a --template"),
    ],
)
def test_mistakes_are_one_line(words, message, oelm_cli, models, file):
    columns = ("--text", "body", "--label", "topic")
    code, _, err = oelm_cli("evaluate", models["oelm-gpt"], "--zero-shot", file, *columns, *words)
    assert code == 2
    assert message in err and err.strip().count("\n") == 0


def test_options_without_zero_shot_and_tasks_without_labels_are_refused(oelm_cli, models, tmp_path):
    code, _, err = oelm_cli("evaluate", models["gpt2"], "--template", "{text} It was")
    assert code == 2 and "belong to --zero-shot" in err
    code, _, err = oelm_cli("evaluate", models["gpt2"], "--prompts", "5")
    assert code == 2 and "belong to --generation" in err
    data = corpus(tmp_path)
    words = ("--zero-shot", "tinystories", "--template", "{text} x", "--data-dir", data)
    code, _, err = oelm_cli("evaluate", models["gpt2"], *words)
    assert code == 2 and "needs texts with one label each; tinystories is lm" in err
