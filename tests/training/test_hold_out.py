"""`task.hold_out = false`: rows that chose on test trained on every training row. What is prepared, trained,
evaluated and reported without a validation split, and what is refused."""

import json
import math
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oelm.config import RunConfig, TaskConfig, TrainingConfig
from oelm.data import Store, load_file, load_task, open_store, prepare
from oelm.data.tasks.language_modeling import documents
from oelm.data.trivial_baselines import trivial_baselines
from oelm.errors import UserError
from oelm.study.catalogue import experiment_config, get_experiment
from oelm.study.design import make_study
from oelm.training.predictions import read_predictions
from oelm.training.resolve import choice_of, objective_of, prepare_data, resolve_run
from tests.command_line import caller
from tests.data.made import parquet, sentence, split_sizes, wordpiece, write_csv
from tests.training.language_models import corpus
from tests.training.runs import Strike, outcome

ROWS, TESTED = 83, 24  # of every made task; 83: the last batch of an epoch is a short one
SMALL = ("--model", "gpt-tiny", "--tokenizer", "train:300", "--max-length", "16", "--batch-size", "8")
AS_PUBLISHED = ("--set", "task.hold_out=false", "--set", "training.choose_on=test")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data/`: tasks of several kinds, with duplicates within train and between train and test."""
    root, rng = tmp_path_factory.mktemp("hold-out"), random.Random(0)
    wordpiece().save_pretrained(root / "bert")
    for split, rows in (("train", ROWS), ("test", TESTED)):
        texts = [f"{sentence(rng, 2, 8)} {('dull', 'great')[i % 2]} {split} {i}" for i in range(rows)]
        texts[3], texts[4] = texts[2], "the same in train and test"
        parquet(root / "data/imdb" / f"{split}.parquet", text=texts, label=[i % 2 for i in range(rows)])
        words = [text.split() for text in texts]
        tags = [["NUM" if word.isdigit() else "NN" for word in row] for row in words]
        parquet(root / "data/ptb-pos" / f"{split}.parquet", tokens=words, tags=tags)
    for split, rows in (("train", ROWS), ("validation_matched", TESTED)):
        pairs = {
            "premise": [f"{split} {i // 3}" for i in range(rows)],
            "hypothesis": [f"{sentence(rng)} {i}" for i in range(rows)],
        }
        parquet(root / "data/mnli" / f"{split}.parquet", label=[i % 3 for i in range(rows)], **pairs)
    phrases = [sentence(rng, 1, 9) for _ in range(ROWS)]
    for split, texts in (("train", phrases), ("validation", [f"{text} !" for text in phrases[:TESTED]])):
        labels = [i % 2 for i in range(len(texts))]
        parquet(root / "data/sst2" / f"{split}.parquet", sentence=texts, label=labels)
    stories = [f"{sentence(rng)} {i}" for i in range(9_000)]
    parquet(root / "data/openwebtext/train.parquet", text=stories)
    corpus(root / "data")
    return root


@pytest.fixture
def here(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(world)
    monkeypatch.setenv("OELM_CACHE_DIR", str(world / "cache"))
    monkeypatch.setenv("OELM_DATA_DIR", str(world / "data"))
    return world


@pytest.fixture
def oelm_cli(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return caller(monkeypatch, capsys)


def items(store: Store, *splits: str) -> list[tuple[int, tuple[int, ...]]]:
    """(row, tokens) of the items of these splits, by row."""
    found = [
        (int(row), tuple(store[split].tokens[start:end].tolist()))
        for split in splits
        for row, start, end in zip(
            store[split].ids, store[split].offsets, store[split].offsets[1:], strict=False
        )
    ]
    return sorted(found)


def check_pair(default: Store, whole: Store) -> None:
    """Train of `whole` is train and validation of `default`, row by row in the order of the source."""
    assert default.fingerprint != whole.fingerprint and default.folder != whole.folder
    assert [*default.splits] == ["train", "validation", "test"] and [*whole.splits] == ["train", "test"]
    assert len(default["validation"]) > 0
    rows = whole["train"].ids
    assert (np.diff(rows) > 0).all()
    assert items(whole, "train") == items(default, "train", "validation")
    assert items(whole, "test") == items(default, "test")
    assert not list(whole.folder.glob("validation*"))


@pytest.mark.parametrize("name", ["imdb", "ptb-pos", "mnli"])
def test_train_is_what_train_and_validation_were(name: str, here: Path) -> None:
    stores = [prepare(load_task(name, hold_out=held), tokenizer=str(here / "bert")) for held in (True, False)]
    check_pair(*stores)
    assert [*stores[1].meta["duplicates"]] == ["train/test"]
    assert {split for of in trivial_baselines(stores[1]).values() for split in of} == {"test"}
    if name != "mnli":  # counted as before
        assert stores[1].meta["duplicates"]["train/test"] == 1
        assert any(warning.code == "data.duplicates" for warning in stores[1].warnings)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("with_test", [False, True], ids=["one file", "with a test file"])
def test_so_it_is_for_a_file(seed: int, with_test: bool, here: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    rows = [[sentence(rng, 1, 4), rng.choice("abc")] for _ in range(rng.randint(40, 120))]
    path = write_csv(tmp_path / "x.csv", ["text", "label"], [*rows, ["rare", "a"], ["rare", "b"], ["", "c"]])
    test = write_csv(tmp_path / "t.csv", ["text", "label"], rows[:9]) if with_test else None
    stores = [
        prepare(load_file(path, split_seed=seed, hold_out=held, test_file=test), tokenizer=str(here / "bert"))
        for held in (True, False)
    ]
    check_pair(*stores)
    assert stores[0].meta["dropped"] == stores[1].meta["dropped"] == {"empty": 1}


def test_phrases_of_both_sides_are_dropped_only_where_there_are_two(here: Path) -> None:
    default, whole = (load_task("sst2", hold_out=held) for held in (True, False))
    assert default.dropped["mixed_phrases"] > 0 and not whole.dropped
    assert prepare(whole, tokenizer=str(here / "bert"))["train"].ids.tolist() == [*range(ROWS)]


@pytest.mark.parametrize("name", ["tinystories", "openwebtext"])
def test_so_it_is_for_a_corpus(name: str, here: Path) -> None:
    """Of openwebtext test is held out too, and stays so."""
    default, whole = ([*documents(load_task(name, hold_out=held))] for held in (True, False))
    assert {split for split, _ in default} == {"train", "validation", "test"}
    assert [("test" if split == "test" else "train", text) for split, text in default] == whole


def test_data_with_a_validation_split_of_its_own_stay_as_they_are(here: Path) -> None:
    for split in ("train", "validation", "test"):
        rows = [sentence(random.Random(i)) for i in range(20)]
        parquet(here / "data/wikitext-2-raw" / f"{split}.parquet", text=rows)
    default, whole = (load_task("wikitext-2", hold_out=held).fingerprint() for held in (True, False))
    assert default == whole
    task = TaskConfig(name="wikitext-2", tokenizer="train:300", hold_out=False)
    _, store = prepare_data(RunConfig(task=task), CPU, show=False)
    assert "validation" in store.splits


@pytest.mark.parametrize("id", ["IMDB-oelm", "SST2-01"])
def test_the_real_train_split_is_as_large_as_published(id: str, data_dir: Path) -> None:
    task = TaskConfig(name=experiment_config(id).task.name, data_dir=str(data_dir), hold_out=False)
    data = choice_of(task, None).load()
    assert split_sizes(data)["train"] == get_experiment(id).published["train_items"]
    assert split_sizes(data)["validation"] == 0


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", ["imdb", "ptb-pos", "tinystories"])
def test_a_run_trains_on_every_row_and_all_commands_read_it(name: str, oelm_cli: Any, here: Path) -> None:
    out = here / "runs" / name
    command = ("train", "--task", name, *SMALL, "--epochs", 2, *AS_PUBLISHED, "--out", out)
    code, _, err = oelm_cli(*command)
    assert code == 0, err
    results = results_of(out)
    config = RunConfig(
        task=TaskConfig(name=name, tokenizer="train:300", max_length=16, hold_out=False),
        training=TrainingConfig(epochs=2, batch_size=8, choose_on="test"),
    )
    config, store = prepare_data(config, CPU, show=False)
    assert store.fingerprint == results["data_fingerprint"]
    plan = resolve_run(config, objective_of(config, store), CPU).plan
    rows = len(plan.lengths)
    if name != "tinystories":
        assert rows == ROWS
        epoch = plan.epoch(0)
        trained = np.concatenate([epoch.batch(k) for k in range(len(epoch))])
        assert sorted(store["train"].ids[trained].tolist()) == [*range(ROWS)]
    assert (results["samples"], results["steps"]) == (2 * rows, 2 * math.ceil(rows / 8))
    assert results["best"]["split"] == results["final"]["split"] == "test"
    assert {split for of in results["references"].values() for split in of} == {"test"}
    arrays = read_predictions(out)
    assert arrays is not None and len(arrays["ids"]) == len(np.unique(arrays["ids"]))
    assert "validation" not in (out / "model" / "README.md").read_text().partition("## Results")[0]

    code, said, err = oelm_cli("evaluate", out, "--json")
    assert code == 0, err
    metric = results["metric"]
    assert json.loads(said)["metrics"][metric] == pytest.approx(results["test"]["metrics"][metric], rel=1e-4)
    code, _, err = oelm_cli("evaluate", out, "--split", "validation")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "no split 'validation'" in err
    assert oelm_cli("audit", out)[0] == 0
    if name != "tinystories":
        (here / "lines.txt").write_text("a great film\na dull film\n")
        code, said, err = oelm_cli("predict", out, here / "lines.txt")
        assert code == 0 and len(said.splitlines()) == 2, err
    else:
        assert oelm_cli("generate", out, "the dog", "--tokens", 3)[0] == 0
    published = here / f"published-{name}"
    assert oelm_cli("report", out, "--publish", published)[0] == 0
    tables = []
    for folder in (out, published):
        code, said, err = oelm_cli("report", folder, "--json")
        assert code == 0, err
        tables.append(json.loads(said)["settings"])
        assert "is chosen on the test split" in (folder / "report.md").read_text()
    assert tables[0] == tables[1]


def test_other_data_are_evaluated_with_their_validation_part(oelm_cli: Any, here: Path) -> None:
    """The run's hold_out is of its own data."""
    out = here / "other"
    code, _, err = oelm_cli("train", "--task", "imdb", *SMALL, "--steps", 2, *AS_PUBLISHED, "--out", out)
    assert code == 0, err
    rows = [[sentence(random.Random(i)), ("neg", "pos")[i % 2]] for i in range(60)]
    write_csv(here / "o.csv", ["text", "label"], rows)
    code, said, err = oelm_cli("evaluate", out, "--data", "o.csv", "--split", "validation", "--json")
    assert code == 0 and json.loads(said)["items"] == 6, err


def test_killed_and_resumed_it_ends_as_if_nothing_had_happened(machine: Any, tmp_path: Path) -> None:
    """The dataset is one that was prepared without a validation split."""
    rng = random.Random(1)
    rows = [[f"{sentence(rng, 2, 8)} {('dull', 'great')[i % 2]} {i}", i % 2] for i in range(ROWS)]
    data = load_file(write_csv(tmp_path / "x.csv", ["text", "label"], rows), hold_out=False)
    store = prepare(data, tokenizer="train:300", max_length=32, cache=tmp_path / "cache").folder
    config = machine.config(choose_on="test", steps=20)
    ended = machine.run(config, tmp_path / "unbroken", store=store)
    assert ended.code == 0, ended.text
    strike, out = Strike(signal.SIGKILL, below="Checkpoints.save", n=30), tmp_path / "run"
    assert machine.run(config, out, store=store, strike=strike).code == -signal.SIGKILL
    ended = machine.run(config, out, store=store)
    assert ended.code == 0, ended.text
    assert outcome(out) == outcome(tmp_path / "unbroken")


def test_a_published_row_as_it_was_and_fair(oelm_cli: Any, here: Path) -> None:
    for words, folder, split in (([], "IMDB-oelm", "test"), (["--fair"], "IMDB-oelm-fair", "validation")):
        code, said, err = oelm_cli("train", "IMDB-oelm", *words, *SMALL, "--epochs", 1)
        assert code == 0, err
        results = results_of(here / "runs" / folder)
        assert (results["best"]["split"], results["chosen_on"]) == (split, split)
        assert results["samples"] == (ROWS if split == "test" else ROWS - 8)
        (line,) = [line for line in said.splitlines() if "differs from the published recipe in: " in line]
        keys = {"task.hold_out", "training.choose_on"}
        assert keys & {*line.partition("in: ")[2].split(", ")} == (keys if words else set())
    _, said, _ = oelm_cli("train", "IMDB-oelm", *SMALL, "--epochs", 1, "--overwrite", "--json")
    theirs = json.loads(said)["published"]
    assert theirs["experiment"] == "IMDB-oelm" and "training.epochs" in theirs["differs_in"]
    assert theirs["beside"]["best_accuracy"]["published"] == 0.857
    code, _, err = oelm_cli("train", "IMDB-oelm", *SMALL, "--epochs", 1, *AS_PUBLISHED[:2], "--fair")
    assert code == 2 and "task.hold_out" in err  # a contradiction


REFUSED = "no validation split"


@pytest.mark.parametrize("choose_on", ["validation", "last"])
@pytest.mark.parametrize("source", ["imdb", "x.csv", "prepared"])
def test_without_validation_only_test_can_be_chosen_on(
    source: str, choose_on: str, oelm_cli: Any, here: Path, tmp_path: Path
) -> None:
    rows = [[sentence(random.Random(i)), i % 2] for i in range(50)]
    path = write_csv(tmp_path / "x.csv", ["text", "label"], rows)
    words: tuple[Any, ...] = ("--task", "imdb") if source == "imdb" else ("--data", path)
    more = ("--set", "task.hold_out=false")
    if source == "prepared":
        made = oelm_cli("data", "prepare", path, "--no-hold-out", "--out", tmp_path / "p")
        assert made[0] == 0 and [*open_store(tmp_path / "p").splits] == ["train", "test"]
        words, more = ("--data", tmp_path / "p"), ()
    stores = {*(here / "cache" / "stores").glob("*")}
    tried = ("train", *words, *more, "--model", "gpt-tiny", "--steps", 1, "--out", tmp_path / "run")
    code, out, err = oelm_cli(*tried, "--set", f"training.choose_on={choose_on}")
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert REFUSED in err and "training.choose_on = 'test'" in err
    assert {*(here / "cache" / "stores").glob("*")} == stores, "refused before anything is prepared"
    assert not (tmp_path / "run").exists()


def test_a_prepared_dataset_with_validation_is_not_made_whole(oelm_cli: Any, here: Path) -> None:
    made = oelm_cli("data", "prepare", "imdb", "--tokenizer", "train:300", "--out", here / "with")
    assert made[0] == 0
    code, _, err = oelm_cli("train", "--data", here / "with", *AS_PUBLISHED, "--steps", 1)
    assert code == 2 and "hold_out comes too late" in err


@pytest.mark.parametrize("place", ["task", "per_task"])
def test_a_study_needs_validation(place: str, oelm_cli: Any, here: Path) -> None:
    values: dict[str, Any] = {"study": {"tasks": ["imdb"], "lrs": [1e-3]}, "training": {"choose_on": "test"}}
    held = {"task": {"hold_out": False}}
    values |= held if place == "task" else {"per_task": {"imdb": held}}
    with pytest.raises(UserError, match=r"task\.hold_out = false is for `oelm train` only"):
        make_study(values)
    code, _, err = oelm_cli("study", "--task", "imdb", "--set", "task.hold_out=false", "--out", here / "s")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "task.hold_out" in err


def test_identities_of_all_other_runs_stay_as_they_are() -> None:
    held, whole = (RunConfig(task=TaskConfig(name="imdb", hold_out=held)) for held in (True, False))
    assert "hold_out" not in held.identity()["task"]
    assert whole.identity()["task"]["hold_out"] is False
