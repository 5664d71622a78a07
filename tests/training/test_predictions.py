"""predictions.npz: a score of every test item for every kind of task, small on disk, whole when published."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oelm.config import make_config
from oelm.data import Choice
from oelm.training.loop import train
from oelm.training.predictions import (
    compact,
    item_scores,
    publish_predictions,
    read_predictions,
    write_predictions,
)
from tests.data.made import parquet, sentence

SPLITS = ("train", "validation", "test")


def _make(task: str, folder: Path) -> None:
    """Data of a task in its own columns: short to train on, with items that belong together."""
    for split in SPLITS:
        rng = random.Random(split)
        texts = [f"{sentence(rng, 5, 60)} {i // 2}" for i in range(80)]
        words = [text.split() for text in texts]
        columns: dict[str, list[Any]] = {"text": texts}
        if task == "sst2":
            columns = {"sentence": texts, "label": [i % 2 for i in range(80)]}
        elif task == "mrpc":
            columns = {"sentence1": texts, "sentence2": texts[::-1], "label": [i % 2 for i in range(80)]}
        elif task == "ptb-pos":
            columns = {
                "tokens": words,
                "tags": [["LONG" if len(w) > 4 else "SHORT" for w in r] for r in words],
            }
        elif task == "conll2003":
            columns = {"tokens": words, "ner_tags": [[rng.randrange(3) for _ in row] for row in words]}
        elif task == "squad":
            columns = {
                "id": [str(i) for i in range(80)],
                "question": [f"what {i}?" for i in range(80)],
                "context": texts,
                "answers": [{"text": [r[1]], "answer_start": [len(r[0]) + 1]} for r in words],
            }
        parquet(folder / task / f"{split}.parquet", **columns)


def _run(task: str, folder: Path) -> dict[str, Any]:
    _make(task, folder / "data")
    choice = Choice(task, data_dir=folder / "data", tokenizer="train:300", max_length=40)
    values = {
        "task": {"name": task, "max_length": 40},
        "model": {"name": "gpt-tiny"},
        "training": {"steps": 4, "batch_size": 8, "lr": 1e-3},
    }
    return train(make_config(values), choice.store(cache=folder / "cache"), folder / "run", show=False)


@pytest.mark.parametrize("task", ["sst2", "ptb-pos", "conll2003", "squad", "tinystories"])
def test_the_scores_of_the_items_make_the_metric(task: str, tmp_path: Path) -> None:
    results = _run(task, tmp_path)
    local = read_predictions(tmp_path / "run")
    assert local is not None
    (tmp_path / "published" / "run").mkdir(parents=True)
    publish_predictions(tmp_path / "published" / "run", local, tmp_path / "published", results["task"])
    for folder in (tmp_path / "run", tmp_path / "published" / "run"):
        found = item_scores(results["metric"], read_predictions(folder) or {})
        assert found is not None and found.groups is not None
        total = found.scores.sum() / found.weights.sum()
        value = math.exp(total) if results["metric"] == "perplexity" else total
        assert value == pytest.approx(results["test"]["metrics"][results["metric"]], rel=1e-6)
        assert len(set(found.ids.tolist())) == len(found.ids) == len(found.scores)
        assert sorted(set(found.groups.tolist())) == [*range(found.groups.max() + 1)]
        assert 1 < found.groups.max() < len(found.ids)
    if task == "tinystories":
        loss = item_scores("loss", local)
        assert loss is not None and loss.scores.sum() / loss.weights.sum() == pytest.approx(
            results["test"]["metrics"]["loss"], rel=1e-6
        )
    if task == "squad":  # items of one text are questions on it, whatever the number of windows
        assert len(local["ids"]) == 80 and len(set(local["groups"].tolist())) == 80
        assert {"items", "starts", "ends", "scores", "exact_match", "f1"} <= local.keys()


def test_macro_f1_is_no_sum_over_items_but_can_be_computed_again(tmp_path: Path) -> None:
    results = _run("mrpc", tmp_path)
    arrays = read_predictions(tmp_path / "run") or {}
    assert results["metric"] == "f1_macro" and item_scores("f1_macro", arrays) is None
    found = item_scores("accuracy", arrays)
    assert found is not None and found.scores.mean() == results["test"]["metrics"]["accuracy"]
    assert {name: array.dtype.str for name, array in arrays.items()} == {
        "ids": "|u1", "groups": "|u1", "labels": "|u1", "predictions": "|u1", "scores": "<f2",
    }  # fmt: skip


def _classified(items: int, classes: int, share: float, seed: int) -> dict[str, np.ndarray]:
    """What a classifier that is right so often would have recorded."""
    rng = np.random.default_rng(seed)
    labels = np.random.default_rng(0).integers(classes, size=items)
    predictions = np.where(rng.random(items) < share, labels, rng.integers(classes, size=items))
    scores = rng.dirichlet(np.ones(classes), size=items).astype(np.float32)
    ids = np.random.default_rng(1).permutation(items)
    return {"ids": ids, "groups": ids // 2, "labels": labels, "predictions": predictions, "scores": scores}


@pytest.mark.parametrize(("classes", "share", "most"), [(2, 0.0, 4_700), (2, 0.72, 3_600), (4, 0.8, 5_000)])
def test_a_published_run_of_25000_items_takes_few_kilobytes(
    classes: int, share: float, most: int, tmp_path: Path
) -> None:
    arrays = _classified(25_000, classes, share, seed=2)
    others = _classified(25_000, classes, share, seed=3)
    for name, made in (("a", arrays), ("b", others)):
        (tmp_path / name).mkdir()
        publish_predictions(tmp_path / name, made, tmp_path, "imdb")
        assert (tmp_path / name / "predictions.npz").stat().st_size < most < 8_000
        again = read_predictions(tmp_path / name)
        assert again is not None and again.keys() == {"ids", "groups", "labels", "predictions"}
        for key in again:
            assert again[key].tolist() == made[key].tolist()
    assert len([*tmp_path.glob("items-imdb-*.npz")]) == 1  # what both share lies there once


def test_what_is_shared_is_found_wherever_the_folder_is_moved_and_never_mistaken(tmp_path: Path) -> None:
    run = tmp_path / "here" / "runs" / "imdb" / "run"
    run.mkdir(parents=True)
    publish_predictions(run, _classified(50, 2, 0.8, seed=2), tmp_path / "here", "a/b")
    (tmp_path / "here").rename(tmp_path / "there")
    run = tmp_path / "there" / "runs" / "imdb" / "run"
    assert read_predictions(run) is not None
    (shared,) = (tmp_path / "there").glob("items-a-b-*.npz")
    write_predictions(tmp_path, _classified(50, 2, 0.8, seed=2) | {"labels": np.zeros(50, dtype=np.int64)})
    (tmp_path / "predictions.npz").replace(shared)
    assert read_predictions(run) is None
    shared.unlink()
    assert read_predictions(run) is None


def test_numbers_keep_their_values_in_smaller_types() -> None:
    made = {
        "small": np.array([0, 255]), "more": np.array([0, 256]), "many": np.array([70_000]),
        "tags": np.array([[-100, 44]]), "low": np.array([-129]), "right": np.array([0.0, 1.0]),
        "nats": np.array([1534.25, 2.0]), "texts": np.array(["a", "bc"]), "shares": np.array([[0.25, 0.75]]),
        "none": np.zeros(0, dtype=np.int64),
    }  # fmt: skip
    found = compact(made)
    assert {name: values.dtype.str for name, values in found.items()} == {
        "small": "|u1", "more": "<u2", "many": "<u4", "tags": "|i1", "low": "<i2", "right": "|u1",
        "nats": "<f4", "texts": "<U2", "shares": "<f2", "none": "<i8",
    }  # fmt: skip
    for name, values in made.items():
        assert found[name].tolist() == values.tolist()
