"""Runs that start from a study: each from its model of the same method and seed."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from oelm.config import MethodConfig, ModelConfig
from oelm.errors import UserError
from oelm.models.build import build_model
from oelm.models.starts import any_start, start_folder, starts_of
from oelm.study.conduct import check_methods, prepare_settings
from oelm.study.design import make_study
from oelm.study.folder import StudyFolder
from oelm.study.matrix import Cell
from oelm.study.publish import publish
from oelm.study.records import read_record
from oelm.training.loop import train
from tests.study.studies import make_file, records, run


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A study with all its models: two methods, two seeds."""
    data = make_file(tmp_path_factory.mktemp("starts"))
    out = data.parent / "before"
    more = ("--lrs", "1e-3", "--steps", "2", "--seeds", "2", "--set", "study.models=all")
    code, text = run(data, out, *more)
    assert code == 0, text
    return out


def values(before, **table):
    task = {"data": str(before.parent / "made.csv"), "text": "body", "label": "topic", "max_length": 32}
    return {
        "study": {"methods": ["baseline", "oelm"], "lrs": [1e-3], "seeds": 2} | table,
        "task": task, "model": {"name": str(before)}, "training": {"steps": 2, "batch_size": 8},
    }  # fmt: skip


@pytest.fixture
def setting(before, monkeypatch):
    monkeypatch.setenv("OELM_CACHE_DIR", str(before.parent / "cache"))
    (made,) = prepare_settings(make_study(values(before)))
    check_methods([made])
    return made


@pytest.mark.parametrize("method", ["baseline", "oelm"])
@pytest.mark.parametrize(("seed", "taken"), [(1, 1), (2, 2), (1001, 1), (1002, 2), (1003, 1)])
def test_a_run_starts_from_the_model_of_its_method_and_seed(setting, method, seed, taken):
    config = setting.run_config(Cell(method, 1e-3, seed, seed > 1000))
    folder = start_folder(config)
    assert f"/{method}/measured-lr0.001-s{taken}-" in folder
    model, _ = build_model(config, setting.store)
    saved, now = load_file(f"{folder}/model.safetensors"), model.state_dict()
    shared = [name for name in saved if name in now]
    assert len(shared) == len(saved)
    for name in shared:  # a Q factor of an orthonormal block is that block, but for rounding
        torch.testing.assert_close(now[name], saved[name], rtol=0, atol=1e-5)


def test_its_runs_are_one_setting_whatever_model_each_starts_from(setting):
    cells = [Cell(method, 1e-3, seed, False) for method in ("baseline", "oelm") for seed in (1, 2)]
    identities = [setting.identity(cell) for cell in cells]
    assert len({i.setting for i in identities}) == 1 and len({i.key for i in identities}) == 4


def test_what_it_lacks_is_said(setting, before, tmp_path):
    config = setting.run_config(setting.any_cell)
    with pytest.raises(UserError, match="without a model of method oelm-random; it has baseline, oelm"):
        start_folder(replace(config, method=MethodConfig("oelm-random")))
    with pytest.raises(UserError, match="has models of this method for 2 of 3 seeds; ask for --seeds 2, or"):
        check_methods(prepare_settings(make_study(values(before, seeds=3))))
    (tmp_path / "study.toml").write_text("")
    with pytest.raises(UserError, match=r"let it finish, with --set study\.models=all"):
        any_start(str(tmp_path))


def test_seeds_without_a_model_of_their_own_are_refused(before, tmp_path, monkeypatch):
    """Where the runs of some seeds were imported, which brings no models, other seeds do not stand in."""
    monkeypatch.setenv("OELM_CACHE_DIR", str(before.parent / "cache"))
    copy = tmp_path / "copy"
    shutil.copytree(before, copy)
    wanted = values(before) | {"model": {"name": str(copy)}}
    shutil.rmtree(next((copy / "runs" / "made" / "oelm").glob("measured-*-s1-*")) / "model")
    (setting,) = prepare_settings(make_study(wanted))
    assert "-s2-" in start_folder(setting.run_config(Cell("oelm", 1e-3, 2, False)))
    for seeds in (1, 2):
        study = make_study(wanted | {"study": wanted["study"] | {"seeds": seeds}})
        why = rf"has models of this method for {seeds - 1} of {seeds} seeds; make the others in that study"
        with pytest.raises(UserError, match=why):
            check_methods(prepare_settings(study))
    for model in copy.glob("runs/*/*/measured-*/model"):
        shutil.rmtree(model)
    with pytest.raises(UserError, match="whose runs have no models, as records that were imported: delete"):
        any_start(str(copy))


def test_models_at_several_rates_are_not_chosen_from(before, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(before, copy)
    run = next((copy / "runs" / "made" / "oelm").glob("measured-*-s2-*"))
    config = run / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.001", "lr = 0.003"))
    with pytest.raises(UserError, match=r"at several learning rates; make it with --set study\.measure=best"):
        starts_of(str(copy), "oelm")
    assert [start.seed for start in starts_of(str(copy), "baseline")] == [1, 2]


def test_models_of_several_tasks_are_not_mixed(before, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(before, copy)
    shutil.copytree(copy / "runs" / "made", copy / "runs" / "other")
    with pytest.raises(
        UserError, match="several models of oelm for one seed; start from a study of one task"
    ):
        starts_of(str(copy), "oelm")


def test_published_records_come_in_under_the_folder_of_their_model(before, setting, tmp_path):
    """Publishing cuts the model's path to its name; the study that starts from that folder has them done."""
    assert str(before) != before.name
    cells = [Cell(method, 1e-3, 1, True) for method in ("baseline", "oelm")]
    for cell in cells:
        train(setting.run_config(cell), setting.store, setting.folder(tmp_path / "made", cell), show=False)
    publish(tmp_path / "made", tmp_path / "published")
    study = StudyFolder(tmp_path / "study")
    assert study.import_records(tmp_path / "published", [setting]) == (2, {})
    assert study.import_records(tmp_path / "made", [setting]) == (0, {"there already": 2})
    for cell in cells:
        record = read_record(setting.folder(study.path, cell))
        assert record.identity == setting.identity(cell)
        assert record.config.model.name == record.results["model"] == str(before)
    other = replace(setting, config=replace(setting.config, model=ModelConfig(str(before.parent))))
    left_out = {"of another configuration, data or numerics version": 2}
    assert study.import_records(tmp_path / "published", [other]) == (0, left_out)


@pytest.mark.slow
def test_a_study_goes_on_from_a_study(before):
    after = before.parent / "after"
    more = ("--lrs", "1e-3", "--steps", "2", "--seeds", "2", "--model", str(before))
    code, text = run(before.parent / "made.csv", after, *more)
    assert code == 0, text
    assert len(records(after)) == 4
    assert all(record["results"]["model"] == str(before) for record in records(after).values())


def test_a_study_is_not_converted(before, tmp_path):
    from typer.testing import CliRunner

    from oelm.cli.main import app

    done = CliRunner().invoke(app, ["convert", str(before), "--method", "oelm", "--out", str(tmp_path / "x")])
    assert isinstance(done.exception, UserError) and "is a study; name one of the models in" in str(
        done.exception
    )
