"""Regression: real numbers from a user's file, by every road a task kind takes."""

import csv
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from scipy import stats
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge
from sklearn.metrics import root_mean_squared_error

from oelm.config import make_config
from oelm.data import load_file, open_store, prepare
from oelm.data.tasks import make_objective
from oelm.data.tasks.regression import KIND, RegressionObjective, regression_metrics
from oelm.data.trivial_baselines import trivial_baselines
from oelm.errors import UserError
from oelm.inference.trained import Trained
from oelm.models.build import build_model
from oelm.study.analysis import analyse
from oelm.training.loop import train
from oelm.training.predictions import item_scores, read_predictions
from tests.command_line import caller
from tests.data.made import LEXICON, labelled, sentence, wordpiece, write_csv

MORE = ["--kind", "regression", "--tokenizer", "train:300", "--max-length", "32", "--model", "gpt-tiny"]


@pytest.fixture
def oelm_cli(monkeypatch, capsys):
    return caller(monkeypatch, capsys)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A number that the words tell, around 70 and not around 0."""
    rng = random.Random(0)
    weight = {word: rng.gauss(0, 3) for word in LEXICON.split()}
    rows = []
    for i in range(200):
        words = sentence(rng, 3, 10)
        rows.append([f"{words} {i}", 70 + sum(weight[word] for word in words.split())])
    return write_csv(tmp_path_factory.mktemp("numbers") / "scores.csv", ["body", "score"], rows)


@pytest.fixture(scope="module")
def store(data, tmp_path_factory):
    task = load_file(data, text="body", label="score", kind="regression")
    return prepare(task, tokenizer="train:300", max_length=96, cache=tmp_path_factory.mktemp("cache"))


def rows_of(path: Path) -> list[tuple[str, float]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [(row["body"], float(row["score"])) for row in csv.DictReader(file)]


def config_of(store, **training):
    values = {"steps": 6, "batch_size": 8, "lr": 1e-3, "save_every": 2, "eval_every": 3, **training}
    task = {"data": str(store.folder), "max_length": 96}
    return make_config({"task": task, "model": {"name": "gpt-tiny"}, "training": values})


def test_metrics_are_those_of_scipy_and_scikit_learn():
    rng = np.random.default_rng(0)
    for _ in range(20):
        truth, guess = rng.normal(5, 3, 40), rng.normal(2, 9, 40)
        found = regression_metrics(truth, guess)
        assert found["rmse"] == pytest.approx(root_mean_squared_error(truth, guess), rel=1e-12)
        assert found["pearson"] == pytest.approx(stats.pearsonr(truth, guess)[0], rel=1e-9)
    assert regression_metrics([1, 2], [3, 3])["pearson"] == 0
    assert KIND.metrics == {"rmse": False, "pearson": True, "loss": False}


def test_the_prepared_dataset_holds_the_numbers_of_the_file(data, store):
    rows = rows_of(data)
    for split in store.splits.values():
        assert split.column("values").tolist() == [rows[i][1] for i in split.ids]
    values = store["train"].column("values")
    meta = store["train"].meta
    assert (meta["label_mean"], meta["label_std"]) == (values.mean(), values.std())
    assert store.kind == "regression" and store.metric == "rmse" and store.label_names == []


@pytest.mark.parametrize("label", ["n/a", "", "inf", "1,5"])
def test_what_is_no_number_is_refused_by_row(tmp_path, label):
    path = write_csv(tmp_path / "x.csv", ["text", "label"], [["a", 1.5]] * 30 + [["b", label]])
    with pytest.raises(UserError, match=r"row 31: label .* is not a number"):
        load_file(path, kind="regression")


def test_one_number_for_all_is_nothing_to_learn(tmp_path):
    path = write_csv(tmp_path / "x.csv", ["text", "label"], [[f"a {i}", 1.5] for i in range(40)])
    with pytest.raises(UserError, match="same label"):
        prepare(load_file(path, kind="regression"), tokenizer="train:300", cache=tmp_path)


def test_kinds_and_metrics_are_checked(data):
    with pytest.raises(UserError, match="unknown task kind 'ordinal'; known: classification, lm"):
        load_file(data, text="body", label="score", kind="ordinal")
    with pytest.raises(UserError, match="regression has no metric 'accuracy'; it has: rmse, pearson, loss"):
        load_file(data, text="body", label="score", kind="regression", metric="accuracy")
    with pytest.raises(UserError, match="does not go with regression"):
        load_file(data, text="body", target="score", kind="regression")
    with pytest.raises(UserError, match="--kind regression"):
        load_file(data, text="body", label="score")
    task = load_file(data, text="body", label="score", kind="regression", metric="pearson")
    assert task.metric == "pearson" and task.fingerprint()["metric"] == "pearson"


def test_the_loss_is_what_the_models_compute_themselves(store, tmp_path):
    """Hugging Face's regression loss and the reference GPT's, on standardised labels."""
    words = transformers.BertConfig(
        vocab_size=store.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        intermediate_size=32,
    )  # fmt: skip
    transformers.BertForSequenceClassification(words).save_pretrained(tmp_path)
    store.tokenizer().save_pretrained(tmp_path)
    objective = make_objective(store, 32)
    batch = objective.batch("train", np.arange(8))
    meta = store["train"].meta
    labels = ((batch.targets["labels"] - meta["label_mean"]) / meta["label_std"]).float()
    for name in ("gpt-tiny", str(tmp_path)):
        config = config_of(store)
        model, _ = build_model(replace(config, model=replace(config.model, name=name)), store)
        model.eval()
        assert model.config.num_labels == 1 and model.config.problem_type == "regression"
        loss = objective.loss(model, batch)
        assert loss.item() == pytest.approx(8 * model(**batch.inputs, labels=labels).loss.item(), rel=1e-5)
        with torch.no_grad():
            _, arrays = objective.outputs(model, batch)
        errors = (arrays["predictions"] - arrays["labels"]).numpy() / meta["label_std"]
        assert loss.item() == pytest.approx((errors**2).sum(), rel=1e-5)


def test_trivial_baselines(data, store):
    found = trivial_baselines(store)
    train, test = store["train"].column("values"), store["test"].column("values")
    constant = np.full(len(test), train.mean())
    assert found["mean"]["test"]["rmse"] == pytest.approx(root_mean_squared_error(test, constant))
    assert found["mean"]["test"]["pearson"] == 0
    rows = rows_of(data)
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    features = vectorizer.fit_transform([rows[i][0] for i in store["train"].ids])
    ridge = Ridge(alpha=1.0, random_state=0).fit(features, train)
    guess = ridge.predict(vectorizer.transform([rows[i][0] for i in store["test"].ids]))
    expected = root_mean_squared_error(test, guess)
    assert found["tfidf_ridge"]["test"]["rmse"] == pytest.approx(expected, rel=1e-6)
    assert expected < found["mean"]["test"]["rmse"]


def test_refused_settings(store):
    for options, what in (
        ({"label_smoothing": 0.1}, "smoothing"),
        ({"class_weights": "balanced"}, "weights"),
    ):
        with pytest.raises(UserError, match=what):
            make_objective(store, 32, **options)


def test_train_evaluate_and_predict(oelm_cli, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--data", data, "--text", "body", "--label", "score", *MORE]
    run = ["--lr", "3e-3", "--epochs", "8", "--out", "run", "--json"]
    code, out, err = oelm_cli("train", *words, *run)
    assert code == 0, err
    results = json.loads(out)
    assert results["metric"] == "rmse"
    assert results["test"]["metrics"]["rmse"] < results["references"]["mean"]["test"]["rmse"]
    code, out, _ = oelm_cli("evaluate", "run", "--json")
    assert json.loads(out)["metrics"] == pytest.approx(results["test"]["metrics"], rel=1e-4)

    arrays = read_predictions(Path("run"))
    rows = rows_of(data)
    texts = [rows[i][0] for i in arrays["ids"]]
    said = [answer["value"] for answer in Trained("run").predict(texts)]
    assert said == pytest.approx(arrays["predictions"].tolist(), rel=1e-4)
    scores = item_scores("rmse", arrays)
    assert scores.scores.mean() ** 0.5 == pytest.approx(results["test"]["metrics"]["rmse"], rel=1e-5)
    assert item_scores("pearson", arrays) is None

    # On other data, of another mean and spread, predictions stay those of the model.
    more = write_csv(
        tmp_path / "more.csv", ["body", "score"], [[text, 1000 + i] for i, text in enumerate(texts)]
    )
    code, out, err = oelm_cli("evaluate", "run", "--data", more, "--json")
    assert code == 0 and json.loads(out)["metrics"]["rmse"] > 900, err
    classes = labelled(tmp_path / "classes.csv")
    with pytest.raises(UserError, match="gives a text a number"):
        Trained("run").evaluate("test", data=str(classes), label="topic", kind="classification")

    # From one regression to another.
    code, _, err = oelm_cli("train", *words[:-2], "--model", "run", "--steps", "1", "--out", "again")
    assert code == 0, err


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(store, tmp_path, monkeypatch):
    def metrics(out):
        results = json.loads((out / "results.json").read_text())
        return results["test"], results["best"], results["final"]

    config = config_of(store)
    train(config, store, tmp_path / "whole", show=False)
    whole_batch, calls = RegressionObjective.batch, []

    def batch(self, split, *rest):
        calls.append(split)
        if calls.count("train") == 4:
            raise KeyboardInterrupt
        return whole_batch(self, split, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RegressionObjective, "batch", batch)
        with pytest.raises(KeyboardInterrupt):
            train(config, store, tmp_path / "broken", show=False)
    train(config, store, tmp_path / "broken", show=False)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "broken")
    one, other = (read_predictions(tmp_path / name) for name in ("whole", "broken"))
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_study(oelm_cli, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--data", str(data), "--text", "body", "--label", "score", *MORE]
    grid = ["--lrs", "1e-5,3e-3", "--seeds", "2", "--steps", "12", "--set", "study.widen=0", "--jobs", "1"]
    command = [sys.executable, "-m", "oelm", "study", *words, *grid, "--out", "s"]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "RMSE" in done.stdout and "ridge" in done.stdout
    found = analyse(Path("s"))
    (group,) = found.groups
    assert group.metric == "rmse" and not group.larger_is_better
    assert {arm.lr for arm in group.arms.values()} == {3e-3}  # the smaller error, not the larger
    (comparison,) = found.comparisons
    better = [
        a.test < b.test for a, b in zip(comparison.arm.records, comparison.reference_arm.records, strict=True)
    ]
    assert [difference > 0 for difference in comparison.differences] == better

    code, _, err = oelm_cli("report", "s", "--publish", "public")
    assert code == 0, err
    for record in group.arms["oelm"].records:
        public = next(Path("public").rglob(f"{record.folder.name}/predictions.npz")).parent
        local, published = read_predictions(record.folder), read_predictions(public)
        assert np.array_equal(local["predictions"], published["predictions"])
        assert np.array_equal(local["labels"], published["labels"])


def test_pairs_have_numbers_too(tmp_path):
    rng = random.Random(1)
    rows = [[f"{sentence(rng)} {i}", sentence(rng), i / 10] for i in range(60)]
    path = write_csv(tmp_path / "pairs.csv", ["a", "b", "score"], rows)
    task = load_file(path, text="a", text_pair="b", label="score", kind="regression")
    wordpiece().save_pretrained(tmp_path / "words")
    store = prepare(task, tokenizer=str(tmp_path / "words"), max_length=64, cache=tmp_path / "cache")
    batch = make_objective(open_store(store.folder), 64).batch("train", np.arange(4))
    assert batch.inputs["token_type_ids"].max() == 1
    assert batch.targets["labels"].tolist() == [rows[i][2] for i in store["train"].ids[:4]]
