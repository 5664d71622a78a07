"""Whatever happens to a file on disk: no traceback, no waiting, nothing lost, and the file is named.

Every kind of file that we write is damaged in every way of `damage`, and then read by what a user would call.
"""

import json
import shutil
from pathlib import Path

import pytest

from oelm.claims.verdicts import judge
from oelm.config import merge
from oelm.data import Plan, load_file, open_store, padded_batch, prepare
from oelm.data.checks import describe, render
from oelm.errors import UserError
from oelm.inference.trained import Trained
from oelm.study.analysis import analyse
from oelm.study.conduct import prepare_settings
from oelm.study.design import make_study
from oelm.study.folder import Setting, StudyFolder
from oelm.study.launchers import LAUNCHERS
from oelm.study.matrix import Cell
from oelm.study.records import find_records
from oelm.study.report import as_plain, summary, write_report
from oelm.study.scheduler import Scheduler
from oelm.training.checkpoint import Checkpoints
from oelm.training.loop import train
from oelm.training.status import find_runs, run_status
from tests.data.made import labelled
from tests.study import report_folders
from tests.study.damage import (
    FILES,
    GONE,
    TEXTS,
    VALUES,
    change_value,
    contents,
    keys,
    linked,
    survives,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
STORE_FILES = (
    "store.json",
    "train.labels.npy",
    "train.tokens.npy",
    "test.offsets.npy",
    "tokenizer/tokenizer.json",
)
CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "checksums.json")
RUN_FILES = (
    "config.toml", "results.json", "environment.json", "metrics.jsonl", "timing_stats.json",
    "freeze_audit.json", "predictions.npz",
)  # fmt: skip
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
RUN = {
    "model": {"name": "gpt-tiny"},
    "training": {"steps": 4, "batch_size": 8, "eval_every": 2, "save_every": 1, "log_every": 1},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a study's setting on it, a finished run of the setting, and one killed after step 3."""
    root = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OELM_CACHE_DIR", str(root / "cache"))
        labelled(root / "x.csv", 120)
        data = load_file(root / "x.csv", text="body", label="topic")
        shutil.copytree(prepare(data, tokenizer="train:300", max_length=16).folder, root / "store")
        setting = _setting(root)
        config = setting.run_config(setting.any_cell)
        train(config, setting.store, root / "done", show=False)
    shutil.copytree(root / "done", root / "torn")
    for name in ("results.json", "predictions.npz", "freeze_audit.json", "timing_stats.json"):
        (root / "torn" / name).unlink()
    report_folders.make_study(root / "study", lrs=(1e-4, 3e-4, 1e-3), seeds=5, items=40)
    return root


def _setting(root: Path) -> Setting:
    values = {
        "study": {"methods": ["oelm", "baseline"], "lrs": [1e-3], "seeds": 1},
        "task": {"data": str(root / "store")},
    }
    return prepare_settings(make_study(merge(values, RUN)))[0]


def _use(folder: Path) -> None:
    """What training and `oelm data inspect` do with a dataset."""
    store = open_store(folder)
    store.used_tokens()
    render(describe(store))
    for split in store.splits.values():
        batches = Plan(split.lengths, batch_size=8, seed=0).epoch(0)
        for step in range(len(batches)):
            padded_batch(split, batches.batch(step), store.pad_id)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("file", STORE_FILES)
def test_a_dataset_with_checksums(world: Path, tmp_path: Path, file: str, kind: str) -> None:
    """Not a bit may differ."""
    folder = linked(world / "store", tmp_path / "store")
    FILES[kind](folder / file)
    before = contents(folder, but=folder / file)
    assert isinstance(survives(lambda: _use(folder), file, str(folder)), UserError)
    assert contents(folder, but=folder / file) == before


@pytest.mark.parametrize("kind", [*FILES, *TEXTS])
@pytest.mark.parametrize("file", STORE_FILES[:2])
def test_a_dataset_of_the_cache_is_made_again(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, kind: str
) -> None:
    cache = linked(world / "cache", tmp_path / "cache")
    monkeypatch.setenv("OELM_CACHE_DIR", str(cache))
    folder = next(cache.glob("stores/x-*/"))
    (FILES | TEXTS)[kind](folder / file)
    rest = contents(folder, but=folder / file)
    store = prepare(
        load_file(world / "x.csv", text="body", label="topic"), tokenizer="train:300", max_length=16
    )
    assert contents(store.folder, but=store.folder / "references.json") == contents(
        world / "store", but=world / "store" / "references.json"
    )
    aside = folder.with_name(folder.name + ".damaged")
    assert contents(aside, but=aside / file) == rest


@pytest.mark.parametrize("kind", [*FILES, *TEXTS])
@pytest.mark.parametrize("file", CHECKPOINT_FILES)
def test_a_checkpoint(world: Path, tmp_path: Path, file: str, kind: str) -> None:
    """The one before is used, the damaged one stays."""
    folder = linked(world / "torn" / "checkpoints", tmp_path / "checkpoints")
    *_, before, newest = sorted(path.name for path in folder.glob("step-*"))
    (FILES | TEXTS)[kind](folder / newest / file)
    rest = contents(folder, but=folder / newest / file)
    checkpoints = Checkpoints(folder, keep=2)
    found = checkpoints.load_last()
    assert found is not None and f"step-{found.state['step']:08d}" == before
    assert newest in (said := str(checkpoints.problems[0])) and len(said.splitlines()) == 1
    assert contents(folder, but=folder / newest / file) == rest


TORN = [
    *(("checkpoints/step-00000004/state.json", kind) for kind in ("empty", "a pipe", "a folder", "nested")),
    *(("checkpoints/index.json", kind) for kind in [*FILES, *TEXTS]),
    *(("checkpoints/step-00000004", kind) for kind in ("missing", "a pipe", "a link to nothing")),
    *((name, kind) for name in ("metrics.jsonl", "environment.json", "lock") for kind in [*FILES, *TEXTS]),
    *(("config.toml", kind) for kind in [*FILES, *TEXTS]),
]


@pytest.mark.parametrize(("file", "kind"), TORN)
def test_a_run_that_resumes(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, kind: str
) -> None:
    monkeypatch.setenv("OELM_CACHE_DIR", str(world / "cache"))
    out = linked(world / "torn", tmp_path / "run")
    (FILES | TEXTS)[kind](out / file)
    setting = _setting(world)
    config = setting.run_config(setting.any_cell)
    ended = survives(lambda: train(config, setting.store, out, show=False), str(out))
    if isinstance(ended, dict):
        assert ended["status"] == "completed"
        assert json.loads((out / "results.json").read_text())["test"] == ended["test"]
    else:
        assert [*(out / "checkpoints").glob("step-*/model.safetensors")]  # what was trained is still there


@pytest.mark.parametrize("kind", [*FILES, *TEXTS])
@pytest.mark.parametrize("file", [*RUN_FILES, "lock"])
def test_status_and_report_of_runs(world: Path, tmp_path: Path, file: str, kind: str) -> None:
    root = tmp_path / "runs"
    linked(world / "done", root / "whole")
    damaged = linked(world / "done", root / "damaged")
    (FILES | TEXTS)[kind](damaged / file)
    before = contents(root, but=damaged / file)
    found = {Path(state.folder).name: state for state in map(run_status, find_runs([root]))}
    assert found["whole"].status == "completed"
    analysis = analyse(root)
    assert [record.folder.name for group in analysis.groups for record in group.records] != []
    as_plain(analysis)
    judge([analysis])
    assert contents(root, but=damaged / file) == before


@pytest.mark.parametrize("kind", [*FILES, *TEXTS])
@pytest.mark.parametrize(
    "file", [*(f"model/{name}" for name in MODEL_FILES), "freeze_audit.json", "config.toml"]
)
def test_audit_and_predict(world: Path, tmp_path: Path, file: str, kind: str) -> None:
    run = linked(world / "done", tmp_path / "run")
    (FILES | TEXTS)[kind](run / file)
    before = contents(run, but=run / file)

    def use() -> None:
        trained = Trained(run)
        list(trained.predict(["a good film"], lambda text: None))
        trained.audit()

    survives(use, str(run), file)
    assert contents(run, but=run / file) == before


@pytest.mark.parametrize("kind", [*VALUES, GONE])
@pytest.mark.parametrize(
    "file", ["results.json", "environment.json", "freeze_audit.json", "timing_stats.json"]
)
def test_records_whose_values_are_wrong(world: Path, tmp_path: Path, file: str, kind: str) -> None:
    """Of a study, one run after another: what is read is used, what cannot be is named, none is lost."""
    study = linked(world / "study", tmp_path / "study")
    victim = next(path for path in sorted((study / "runs").rglob(file)) if "measured" in str(path))
    whole = victim.read_bytes()
    for place in keys(json.loads(whole)):
        if len(place) > 3:
            continue
        change_value(victim, place, kind)
        analysis = analyse(study)
        lost = analysis.left_out + len(analysis.damaged)
        used = {record.folder for group in analysis.groups for record in group.records}
        used |= {
            run.folder for group in analysis.groups for arm in group.arms.values() for run in arm.failures
        }
        assert len(used) + lost + analysis.unused + analysis.copies == 16, place
        assert all(str(victim) in str(problem) for problem in analysis.damaged), place
        judge([analysis])
        as_plain(analysis)
        summary(analysis)
        run_status(victim.parent)
        victim.unlink()
        victim.write_bytes(whole)


@pytest.mark.parametrize("kind", [*FILES, *TEXTS])
@pytest.mark.parametrize("file", ["study.json", "study.toml", *RUN_FILES])
def test_the_report_of_a_study(world: Path, tmp_path: Path, file: str, kind: str) -> None:
    study = linked(world / "study", tmp_path / "study")
    victim = study / file
    if file in RUN_FILES:
        victim = next(path for path in sorted((study / "runs").rglob(file)) if "measured" in str(path))
    (FILES | TEXTS)[kind](victim)
    before = contents(study, but=victim)
    survives(lambda: summary(analyse(study)), str(study))
    assert contents(study, but=victim) == before


@pytest.mark.parametrize("kind", ["a pipe", "null", "nested"])
def test_the_pages_of_a_study(world: Path, tmp_path: Path, kind: str) -> None:
    study = linked(world / "study", tmp_path / "study")
    victim = next((study / "runs").rglob("results.json"))
    (FILES | TEXTS)[kind](victim)
    written = survives(lambda: write_report(study), str(study))
    assert not isinstance(written, Exception) and str(victim.parent.name) in written.markdown.read_text()


@pytest.mark.parametrize("kind", [*FILES, *TEXTS])
@pytest.mark.parametrize("file", RUN_FILES)
def test_import(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, kind: str) -> None:
    """Only regular files come in, and a damaged record does not keep the others out."""
    monkeypatch.setenv("OELM_CACHE_DIR", str(world / "cache"))
    source = tmp_path / "source"
    damaged = linked(world / "done", source / "damaged")
    (FILES | TEXTS)[kind](damaged / file)
    linked(world / "done", source / "whole")
    setting = _setting(world)
    folder = StudyFolder(tmp_path / "study")
    with folder.lock(setting.study):
        folder.save(setting.study, [setting])
        imported, _ = folder.import_records(source, [setting])
    assert imported == 1
    assert not [path for path in folder.path.rglob("*") if path.is_symlink()]
    assert len([*find_records(folder.path / "runs")]) == 1


@pytest.mark.parametrize("kind", [*VALUES, GONE])
def test_a_study_goes_on_with_a_damaged_record(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is set aside and named, and the run is wanted again; one that can be used is not."""
    monkeypatch.setenv("OELM_CACHE_DIR", str(world / "cache"))
    setting = _setting(world)
    cell: Cell = setting.any_cell
    for number, place in enumerate(
        [("best",), ("best", "metrics"), ("test", "metrics", "accuracy"), ("status",)]
    ):
        root = tmp_path / str(number)
        folder = setting.folder(root, cell)
        folder.parent.mkdir(parents=True)
        linked(world / "done", folder)
        change_value(folder / "results.json", place, kind)
        setting.scores.clear()
        launcher = LAUNCHERS["local"](setting.study.table, 0.0, root)
        scheduler = Scheduler([setting], root, launcher, "all")
        if scheduler.read_result(setting, cell):
            assert place[-1] == "accuracy" and kind in ("NaN", "infinite", "negative")
            continue
        if not folder.exists():
            assert str(folder / "results.json") in scheduler.progress.news[0]
            assert [*(root / "damaged").rglob("predictions.npz")]
        assert cell not in setting.scores
