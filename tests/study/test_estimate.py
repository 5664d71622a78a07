"""How long a study will take: the arithmetic, and a measurement on this machine."""

import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.config import make_config
from oelm.data import load_file, prepare
from oelm.study import estimate
from oelm.study.design import make_study
from oelm.study.estimate import Pace, evaluations, makespan, measure_pace
from oelm.study.folder import Setting
from oelm.training.parallel import process_state
from oelm.training.resolve import objective_of, resolve_run
from tests.study.studies import make_file


def test_runs_fill_the_places_phase_after_phase():
    assert makespan([[(5, 10.0)]], 2) == 30  # three waves
    assert makespan([[(6, 10.0), (4, 20.0)]], 4) == 20 + 20  # the measured runs wait for all trials
    assert makespan([[(0, 10.0), (3, 7.0)]], 8) == 7  # one learning rate: no trials
    # A second task's runs fill the place that a phase of the first leaves free.
    assert makespan([[(1, 10.0), (1, 10.0)], [(0, 1.0), (2, 10.0)]], 2) == 20
    assert makespan([], 3) == 0


phases = st.lists(st.tuples(st.integers(0, 9), st.floats(0.1, 50)), min_size=1, max_size=3)


@given(st.lists(phases, min_size=1, max_size=3), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_no_plan_beats_its_work_or_its_longest_chain(tasks, places):
    work = sum(runs * seconds for of_task in tasks for runs, seconds in of_task)
    chain = max(sum(seconds for runs, seconds in of_task if runs) for of_task in tasks)
    took = makespan(tasks, places)
    assert took >= max(work / places, chain) - 1e-6
    assert took <= work + 1e-6
    assert makespan(tasks, 1) == pytest.approx(work)


def test_a_run_is_its_parts():
    pace = Pace(start=9.0, setup=1.0, warming=0.5, step=0.1, evaluation=2.0, test=5.0)
    assert pace.run(steps=100, evaluations=3, tested=True) == pytest.approx(2 + 0.5 + 10 + 6 + 5)
    assert pace.run(steps=100, evaluations=3, tested=False) == pytest.approx(2 + 0.5 + 10 + 6)


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path / "cache"))
    store = prepare(load_file(make_file(tmp_path), text="body", label="topic"), tokenizer="train:300")
    study = make_study({"task": {"data": "made.csv"}, "model": {"name": "gpt-tiny"}, "study": {"tasks": []}})
    config = make_config(study.base)
    return Setting(study, config, store, "fp32")


@pytest.mark.parametrize(
    ("training", "expected"),
    [({"epochs": 2}, 2), ({"epochs": 1.5}, 2), ({"steps": 10, "eval_every": 4}, 3), ({"steps": 2}, 1)],
)
def test_evaluations_are_counted_as_the_loop_makes_them(setting, training, expected):
    values = setting.config.to_dict()
    values["training"] = {"batch_size": 8, **training}
    config = make_config(values)
    run = resolve_run(config, objective_of(config, setting.store), process_state().device)
    assert evaluations(run) == expected


@pytest.mark.slow
def test_two_processes_measure_together_and_once_a_day(setting, monkeypatch):
    monkeypatch.setattr(estimate, "CACHED", 3600.0)
    places = [os.environ | {"OMP_NUM_THREADS": "1"}] * 2
    pace = measure_pace(setting, places)
    assert pace is not None
    assert all(seconds > 0 for name, seconds in vars(pace).items() if name != "warming")
    assert pace.step < 2 and pace.warming >= 0
    tokens = {name: setting.store[name].lengths.sum() for name in ("validation", "test")}
    assert pace.test / pace.evaluation == pytest.approx(tokens["test"] / tokens["validation"])
    began = time.monotonic()
    assert measure_pace(setting, places) == pace
    assert time.monotonic() - began < 4  # it was kept: a measurement takes longer
    (kept,) = (estimate.cache_dir() / "timings").iterdir()
    assert json.loads(kept.read_text())["step"] == pace.step


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_measurement_that_fails_is_none(setting, monkeypatch, tmp_path, fault):
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\n" + ("exit 3" if fault == "dies" else "exec sleep 60"))
    stand_in.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stand_in))
    monkeypatch.setattr(estimate, "TIMEOUT", 1.0 if fault == "hangs" else 60.0)
    began = time.monotonic()
    assert measure_pace(setting, [dict(os.environ)]) is None
    assert time.monotonic() - began < 20
    assert not (estimate.cache_dir() / "timings").exists()


def test_steps_of_minutes_are_not_measured(setting, monkeypatch, tmp_path):
    from oelm.study import conduct

    monkeypatch.setattr(conduct, "measure_pace", lambda *given: pytest.fail("it was measured"))
    config = setting.run_config(setting.any_cell)
    steps = resolve_run(config, objective_of(config, setting.store), process_state().device).total_steps
    estimates = [{"memory_bytes": 1e9, "time_s": 1.1 * conduct.SLOWEST_STEP * steps}]
    launcher = conduct.make_launcher(setting.study, estimates, tmp_path)
    (seconds,), whole, tried = conduct.study_time([setting], estimates, launcher, (2, 4))
    assert not tried and seconds == estimates[0]["time_s"] and whole >= 2 * seconds
