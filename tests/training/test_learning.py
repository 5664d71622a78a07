"""Every kind of task really learns, on real data, on a CPU, in moments."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oelm.config import make_config
from oelm.data import Choice, load_task
from oelm.data.preparation import split_chunks
from oelm.data.tasks import task_kind
from oelm.data.tasks.question_answering import answer_scores, means
from oelm.errors import UserError
from oelm.inference.trained import Trained
from oelm.models.build import _load
from oelm.training.loop import train
from tests import tiny
from tests.data.made import byte_pairs, unigram_pieces


def run(task, out, data_dir, cache, *, train_size=None, max_length=64, tokenizer="train:4096", **training):
    choice = Choice(
        task, data_dir=data_dir, train_size=train_size, tokenizer=tokenizer, max_length=max_length
    )
    store = choice.store(cache=cache)
    values = {
        "task": {"name": task, "data_dir": str(data_dir), "train_size": train_size, "max_length": max_length},
        "model": {"name": "gpt-tiny"},
        "method": {"name": "oelm"},
        "training": {"lr": 2e-3, "batch_size": 32, "eval_every": training["steps"]} | training,
    }
    config = make_config({k: {a: b for a, b in v.items() if b is not None} for k, v in values.items()})
    return train(config, store, out, show=False)


@pytest.mark.parametrize(
    ("task", "train_size", "steps", "lr", "least"),
    [
        ("sst2", 20_000, 400, 2e-3, 0.65),
        pytest.param("ag_news", 8_000, 250, 2e-3, 0.70, marks=pytest.mark.slow),
        pytest.param("snli", 30_000, 700, 1e-3, 0.46, marks=pytest.mark.slow),
    ],
)
def test_classification_beats_the_majority_class_by_far(
    task, train_size, steps, lr, least, data_dir, tmp_path
):
    results = run(
        task, tmp_path / "run", data_dir, tmp_path / "cache", train_size=train_size, steps=steps, lr=lr
    )
    majority = results["references"]["majority"]["test"]["accuracy"]
    assert results["test"]["metrics"]["accuracy"] > least > majority + 0.1
    assert not results["at_chance"]
    assert results["references"]["tfidf_logreg"]["test"]["accuracy"] > majority
    saved = np.load(tmp_path / "run" / "predictions.npz")
    assert (saved["predictions"] == saved["labels"]).mean() == results["test"]["metrics"]["accuracy"]
    assert len(set(saved["ids"].tolist())) == len(saved["ids"])
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results


@pytest.mark.slow
def test_what_was_recorded_is_what_the_saved_model_does(data_dir, tmp_path):
    """The run's own numbers, found again by a fresh load of its model: the oracle for everything between."""
    results = run(
        "sst2", tmp_path / "run", data_dir, tmp_path / "cache", train_size=3_000, steps=30, eval_every=10
    )
    trained = Trained(tmp_path / "run")
    for split, recorded in (("validation", results["best"]), ("test", results["test"])):
        again = trained.evaluate(split)["metrics"]
        assert again["accuracy"] == recorded["metrics"]["accuracy"]
        assert again["loss"] == pytest.approx(recorded["metrics"]["loss"], rel=1e-5)
    checked = trained.audit()
    assert checked.frozen_parameters == results["parameters"]["frozen"] == 65_536


@pytest.mark.slow
def test_a_language_model_beats_unigrams(data_dir, tmp_path):
    sizes = {"tokenizer": "train:1024", "steps": 150, "batch_size": 16, "lr": 4e-3}
    results = run("wikitext-2", tmp_path / "run", data_dir, tmp_path / "cache", **sizes)
    unigram = results["references"]["unigram"]
    assert results["best"]["metrics"]["perplexity"] < 0.8 * unigram["validation"]["perplexity"]
    assert results["test"]["metrics"]["bits_per_byte"] < unigram["test"]["bits_per_byte"]
    text = Trained(tmp_path / "run").generate("The film", 20, temperature=0.8, top_k=20, seed=1)
    assert text == Trained(tmp_path / "run").generate("The film", 20, temperature=0.8, top_k=20, seed=1)
    assert len(text.split()) > 3


@pytest.mark.slow
def test_tagging_beats_the_most_frequent_tag_of_each_word(data_dir, tmp_path):
    results = run(
        "ptb-pos", tmp_path / "run", data_dir, tmp_path / "cache", max_length=96, steps=300, lr=4e-3
    )
    reference = results["references"]["most_frequent_tag"]["test"]["token_accuracy"]
    assert results["test"]["metrics"]["token_accuracy"] > 0.75
    assert reference > 0.8, "and the reference it has to beat is no straw man"
    dataset, rows = load_task("ptb-pos", data_dir=data_dir), []
    for _, split, _, _, chunk in split_chunks(dataset, False):
        rows += zip(chunk["tokens"], chunk["tags"], strict=True) if split == "test" else ()
    right = []
    answers = Trained(tmp_path / "run").predict(" ".join(words) for words, _ in rows)
    for (words, tags), answer in zip(rows, answers, strict=True):
        assert answer["words"] == words and len(answer["tags"]) == len(words)
        names = [tag if isinstance(tag, str) else dataset.label_names[tag] for tag in tags]
        right += [a == b for a, b in zip(names, answer["tags"], strict=True) if b is not None]
    assert np.mean(right) == pytest.approx(results["test"]["metrics"]["token_accuracy"])


def test_answers_are_learned(tmp_path):
    """SQuAD's schema: the answer is the word after a marker, at a place that varies."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    names = ["red", "blue", "green", "white", "black", "brown"]

    def rows(n):
        found = {"id": [], "question": [], "context": [], "answers": []}
        for i in range(n):
            answer = str(draw.choice(names))
            before = " ".join(["so"] * int(draw.integers(0, 8)))
            context = f"{before} the colour is {answer} and that is {i}".strip()
            found["id"].append(str(i))
            found["question"].append("which colour ?")
            found["context"].append(context)
            found["answers"].append({"text": [answer], "answer_start": [context.index(answer)]})
        return pa.table(found)

    (tmp_path / "data" / "squad").mkdir(parents=True)
    pq.write_table(rows(600), tmp_path / "data" / "squad" / "train.parquet")
    pq.write_table(rows(80), tmp_path / "data" / "squad" / "validation.parquet")
    results = run(
        "squad",
        tmp_path / "run",
        tmp_path / "data",
        tmp_path / "cache",
        max_length=48,
        steps=250,
        batch_size=16,
        lr=2e-3,
    )
    assert results["metric"] == "f1"
    assert results["test"]["metrics"]["f1"] > 0.8
    trained = Trained(tmp_path / "run")
    known = [*trained.store({})["test"].right_texts().values()]
    answers = [*trained.predict(f"which colour ?\t{record['context']}" for record in known)]
    found = means(answer_scores([record["answers"] for record in known], [a["answer"] for a in answers]))
    assert found == pytest.approx({name: results["test"]["metrics"][name] for name in found})
    assert all(0 < a["score"] <= 1 for a in answers)
    long = "the colour is red and " + "so it goes " * 2000  # many windows, more than a batch of them
    (answer,) = trained.predict([f"which colour ?\t{long}"])
    assert answer["answer"] in long
    tabs = "it was\tso and the colour is red"  # a document may have some
    said = trained.predict([f"which colour ?\t{tabs}", "which colour ?"])
    assert next(said)["answer"] in tabs  # though the next line is refused
    with pytest.raises(UserError, match=r"line 2 is no question: .* here is no tab"):
        next(said)
    options = {"max_length": 48, "steps": 2, "label_smoothing": 0.1}
    with pytest.raises(UserError, match="label smoothing is not for question-answering"):
        run("squad", tmp_path / "smooth", tmp_path / "data", tmp_path / "cache", **options)


def test_few_items_are_not_called_chance(tmp_path):
    """With so few validation texts that even a perfect score could be luck, nothing is flagged."""
    rows = [f"{'good' if i % 2 else 'bad'} {i},{'yes' if i % 2 else 'no'}" for i in range(12)]
    (tmp_path / "few.csv").write_text("\n".join(["text,label", *rows]))
    store = Choice(str(tmp_path / "few.csv"), tokenizer="train:300", max_length=16).store(
        cache=tmp_path / "cache"
    )
    values = {"task": {"data": "few.csv", "max_length": 16}, "model": {"name": "gpt-tiny"}}
    config = make_config(values | {"training": {"steps": 4, "batch_size": 4, "stop_at_chance": True}})
    assert not train(config, store, tmp_path / "run", show=False)["at_chance"]


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_dropout_of_any_architecture_is_a_function_of_the_step(dropout, tmp_path):
    """Llama keeps its rate as a plain number: it is set all the same, and two runs draw the same."""
    import transformers

    rows = [f"{'good' if i % 2 else 'bad'} {i},{'yes' if i % 2 else 'no'}" for i in range(60)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]))
    choice = Choice(str(tmp_path / "texts.csv"), tokenizer="train:300", max_length=16)
    store = choice.store(cache=tmp_path / "cache")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "vocab_size": store.vocab_size}
    llama = transformers.LlamaConfig(**sizes, **tokens, attention_dropout=0.5)
    transformers.LlamaModel(llama).save_pretrained(tmp_path / "llama")

    def losses(name):
        model = {"name": str(tmp_path / "llama")} | ({} if dropout is None else {"dropout": dropout})
        training = {"steps": 3, "batch_size": 4, "log_every": 1}
        config = make_config({"task": {"max_length": 16}, "model": model, "training": training})
        train(config, store, tmp_path / name, show=False)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if '"train"' in line]

    assert losses("one") == losses("two")
    saved = json.loads((tmp_path / "one" / "model" / "config.json").read_text())
    assert saved["attention_dropout"] == (0.5 if dropout is None else 0.0)


@pytest.mark.parametrize("family", [name for name in tiny.BUILDERS if name != "bert-decoder"])
@pytest.mark.parametrize("kind", ["classification", "token-classification", "question-answering"])
def test_dropout_is_set_wherever_a_model_has_it(family, kind, tmp_path):
    """In the body and in every task's head, whatever the family calls it."""
    import transformers

    known = tiny.build(family)
    task = task_kind(kind)
    named_otherwise = kind == "question-answering" and family in ("llama", "qwen2", "qwen3")
    if named_otherwise or type(known.config) not in getattr(transformers, task.auto_class)._model_mapping:
        pytest.skip(f"{family} does not do this task")
    known.save_pretrained(tmp_path)
    names = [] if kind == "question-answering" else ["a", "b", "c"]
    words = byte_pairs() if family == "bart" else unigram_pieces()
    store = SimpleNamespace(kind=kind, label_names=names, tokenizer=lambda: words)
    model, _ = _load(make_config({"model": {"dropout": 0.25}}), store, task, str(tmp_path))
    rates = {name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)}
    numbers = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "dropout" in key and isinstance(value, float)
    }
    assert set(rates.values()) | set(numbers.values()) == {0.25}, rates | numbers
