"""Two runs are a pair only if they were computed in the same way; arms may differ in more than a method."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from oelm.config import ArmConfig, make_config, read_toml, rebuild_config
from oelm.errors import UserError
from oelm.study.analysis import analyse, analyse_records
from oelm.study.design import make_study
from oelm.study.publish import publish
from oelm.study.records import identify
from oelm.study.report import as_plain
from tests.claims.claim_records import pairs, rates_study, run, trials
from tests.study.studies import environment, make_file
from tests.study.studies import run as study

SAME = {"numerics": 3, "path": "fast", "plain_from": None, "deterministic": True, "device": "cpu"}


def with_arithmetic(**change):
    """Five pairs, of which one run was computed otherwise."""
    records = pairs(7, results={"arithmetic": SAME})
    records[0].results["arithmetic"] = SAME | change
    return records


@pytest.mark.parametrize(
    "change",
    [
        {"numerics": 2},
        {"path": "plain"},
        {"deterministic": False},
        {"device": "NVIDIA H200"},
        {"precision": "bf16"},
    ],
    ids=str,
)
def test_runs_of_one_seed_that_were_computed_differently_are_no_pair(change):
    (found,) = analyse_records(with_arithmetic(**change), None).comparisons
    assert found.seeds == (2, 3, 4, 5) and "other_arithmetic" in found.problems and found.verdict == "void"
    (found,) = analyse_records(with_arithmetic(), None).comparisons
    assert found.seeds == (1, 2, 3, 4, 5) and found.verdict == "better"


def test_old_records_that_do_not_say_how_they_were_computed_still_pair():
    (found,) = analyse_records(pairs(7), None).comparisons
    assert len(found.seeds) == 5 and not found.problems


def test_a_seed_whose_fast_path_gave_out_is_compared_on_the_plain_path():
    """Its runs by the fast path are left out in every arm, those by the plain path are the pair."""
    records = with_arithmetic(plain_from=7)
    (found,) = analyse_records(records, None).comparisons
    assert found.seeds == (2, 3, 4, 5) and "few_seeds" in found.problems  # until it is made again
    plain = {"arithmetic": SAME | {"path": "plain"}}
    again = [run(m, 1, v, results=plain, fast=False) for m, v in (("oelm", 0.875), ("baseline", 0.8))]
    (found,) = analyse_records([*records, *again], None).comparisons
    assert found.seeds == (1, 2, 3, 4, 5) and not found.problems
    assert found.differences[0] == pytest.approx(7.5)


def test_a_trial_that_diverged_by_both_paths_is_a_result_like_any_other():
    """It rules its rate out for its method, and does not touch the other trials of its seed."""
    tried = trials({"baseline": {1: 3e-4}, "oelm": {1: 3e-4}})
    bad = next(r for r in tried if r.method == "oelm" and r.lr == 3e-3)
    bad.results.update(status="failed", failure={"kind": "diverged"}, best=None)
    bad.results["arithmetic"] = SAME | {"plain_from": 2}
    (found,) = analyse_records([*pairs(7), *tried], rates_study(1)).comparisons
    assert not found.problems and found.verdict == "better"
    assert found.arm.lr_scores[3e-3] is None
    assert not found.arm.unevaluated and not found.reference_arm.unevaluated


def test_arms_that_compute_the_same_stay_apart():
    """A study of a method against itself shows how much noise there is."""
    one, other = pairs(0.1), pairs(0.1)
    other = [replace(r, config=replace(r.config, arm=ArmConfig(name=f"{r.method} again"))) for r in other]
    analysis = analyse_records([*one, *other], None)
    assert sorted(analysis.groups[0].arms) == ["baseline", "baseline again", "oelm", "oelm again"]
    assert analysis.copies == 0


@pytest.mark.slow
def test_an_arm_that_is_added_later_reuses_what_is_done(tmp_path):
    data, out = make_file(tmp_path), tmp_path / "s"
    text = f"""
[study]
methods = ["baseline", {{name = "baseline", arm = "cold", training = {{warmup = 0}}}}]
lrs = [1e-3]
seeds = 2
[task]
data = "{data}"
text = "body"
label = "topic"
tokenizer = "train:300"
max_length = 32
[model]
name = "gpt-tiny"
[training]
steps = 12
batch_size = 8
"""
    file = tmp_path / "s.toml"
    file.write_text(text)
    command = [sys.executable, "-m", "oelm", "study", str(file), "--out", str(out)]
    options = {"env": environment(tmp_path / "cache"), "capture_output": True, "text": True}
    first = subprocess.run(command, **options)
    assert first.returncode == 0, first.stderr
    times = {path: path.stat().st_mtime_ns for path in out.rglob("results.json")}
    assert len(times) == 4
    more = ', {name = "oelm", arm = "tight", training = {clip = 0.5, batch_tokens = 256}}]'
    file.write_text(text.replace("}}]\n", "}}" + more + "\n", 1))
    second = subprocess.run(command, **options)
    assert second.returncode == 0, second.stderr
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert len(list(out.rglob("results.json"))) == 6
    (group,) = analyse(out).groups
    assert {name: len(arm.records) for name, arm in group.arms.items()} == {
        "baseline": 2,
        "cold": 2,
        "tight": 2,
    }
    results = json.loads(next(out.rglob("tight/*/results.json")).read_text())
    assert results["arm"] == "tight" and results["differs_in"]["training.clip"] == 0.5
    publish(out, tmp_path / "p")
    assert as_plain(analyse(tmp_path / "p")) | {"title": ""} == as_plain(analyse(out)) | {"title": ""}


@pytest.mark.slow
def test_a_study_makes_all_runs_of_such_a_seed_again(tmp_path):
    data, out = make_file(tmp_path), tmp_path / "s"
    more = ("--seeds", "2", "--lrs", "1e-3")
    code, text = study(data, out, *more)
    assert code == 0, text
    before = {path.parent for path in out.rglob("results.json")}
    assert len(before) == 4
    victim = next(path for path in out.rglob("results.json") if "/oelm/" in str(path) and "-s2-" in str(path))
    results = json.loads(victim.read_text())
    results["arithmetic"]["plain_from"] = 5
    victim.write_text(json.dumps(results))
    code, text = study(data, out, *more)
    assert code == 0, text
    assert "oelm lr 0.001 seed 2: the fast path failed at step 5" in text
    new = {path.parent for path in out.rglob("results.json")} - before
    assert sorted(folder.parent.name for folder in new) == ["baseline", "oelm"]
    for folder in new:
        config = rebuild_config(read_toml(folder / "config.toml"))
        assert config.training.fast is False and config.training.seed == 2
        assert json.loads((folder / "results.json").read_text())["arithmetic"]["path"] == "plain"
    (comparison,) = analyse(out).comparisons
    used = {r.folder for arm in (comparison.arm, comparison.reference_arm) for r in arm.records}
    assert new <= used and victim.parent not in used and comparison.seeds == (1, 2)
    (trained,) = [f for f in new if f.parent.name == "oelm"]
    apart = {"step": 1001, "what": "grad_norm", "fast": 9.0, "plain": 1.0, "exact": 1.0}
    failed = {"status": "failed", "failure": {"kind": "software"}}
    failed["reason"] = {"code": "run.fast_path_wrong", "values": apart}
    for path in before - {victim.parent}:
        if path.parent.name == "oelm":
            results = json.loads((path / "results.json").read_text())
            (path / "results.json").write_text(json.dumps(results | failed))
    code, text = study(data, out, *more)
    assert code == 0, text
    assert "oelm lr 0.001 seed 1: the fast path failed at step 1001; all runs of this seed" in text
    assert len(list(out.rglob("results.json"))) == 8 and "trying again" not in text
    (comparison,) = analyse(out).comparisons
    assert not any(run.config.training.fast for run in comparison.arm.records)
    assert trained in {run.folder for run in comparison.arm.records}
    shutil.rmtree(out)


def test_the_path_is_part_of_a_runs_identity_and_not_of_its_setting():
    fast, plain = (make_config({"training": {"fast": value}}) for value in (True, False))
    one, other = (identify(config, "data", "fp32", 3) for config in (fast, plain))
    assert one.setting == other.setting and one.key != other.key
    strict, loose = (make_config({"training": {"deterministic": value}}) for value in (True, False))
    assert identify(strict, "data", "fp32", 3).setting != identify(loose, "data", "fp32", 3).setting


ARMS = {
    "study": {
        "methods": ["baseline", {"name": "baseline", "arm": "no warm-up", "training": {"warmup": 0}},
                    {"name": "oelm", "arm": "wet", "model": {"dropout": 0.1}}],
        "lrs": [1e-3],
    },
    "task": {"data": "d.csv"}, "model": {"name": "gpt-tiny"}, "training": {"warmup": 100},
}  # fmt: skip


def test_arms_may_differ_in_any_key_of_training_and_model(tmp_path):
    from oelm.data import open_store
    from oelm.study.folder import Setting
    from oelm.study.matrix import Cell
    from tests.training.runs import make_store

    made = make_study(ARMS)
    assert list(made.arms) == ["baseline", "no warm-up", "wet"] and made.reference_arm == "baseline"
    assert make_study(made.to_dict()).to_dict() == made.to_dict()
    setting = Setting(made, made.task_config(None), open_store(make_store(tmp_path)), "fp32")
    cells = [Cell(name, 1e-3, 1, False) for name in made.arms]
    configs = [setting.run_config(cell) for cell in cells]
    assert [c.training.warmup for c in configs] == [100, 0, 100]
    assert [c.model.dropout for c in configs] == [None, None, 0.1]
    assert all(c.arm.differs_in == ("model.dropout", "training.warmup") for c in configs)
    assert [c.arm.name for c in configs] == [None, "no warm-up", "wet"]
    identities = [setting.identity(cell) for cell in cells]
    assert len({i.setting for i in identities}) == 1 and len({i.key for i in identities}) == 3
    assert rebuild_config(configs[1].to_dict()) == configs[1]


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ({"name": "oelm", "training": {"warmup": 0}}, "needs a name: study.arms = "),
        ({"name": "oelm", "training": {"lr": 1e-3}}, "an arm with training.lr of its own needs a name"),
        ({"name": "oelm", "arm": "x", "training": {"lr": True}}, "training.lr must be a positive number"),
        ({"name": "oelm", "arm": "x", "training": {"lr": -1e-3}}, "training.lr must be a positive number"),
        ({"name": "oelm", "arm": "x", "model": {"name": "gpt-small"}}, "model.name of x must be the same"),
        ({"name": "oelm", "arm": "x", "training": {"precision": "bf16"}}, "training.precision of x must be"),
        ({"name": "oelm", "arm": "x", "training": 5}, "training must be a table, got 5"),
        ({"name": "oelm", "arm": ["x"]}, "arm must be a name"),
        ({"arm": "x", "training": {"warmup": 0}}, "needs the name of a method"),
        ({"name": "oelm", "arm": "x", "training": {"warm": 0}}, "unknown key 'training.warm'"),
        ({"name": "oelm", "arm": "baseline"}, "names baseline twice"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(arm, says):
    with pytest.raises(UserError, match=says):
        make_study({**ARMS, "study": {"methods": ["baseline", arm], "lrs": [1e-3]}})


def test_an_arm_with_a_rate_of_its_own_is_measured_there_and_nothing_is_concluded(tmp_path):
    arm = {"name": "oelm", "arm": "x", "training": {"lr": 1e-2, "warmup": 0}}
    values = {**ARMS, "study": {"methods": ["baseline", arm], "lrs": [1e-3], "seeds": 5}}
    made = make_study(values)
    assert made.differs_in == ("training.warmup",) and make_study(made.as_written()).arms == made.arms
    matrix = made.matrix({}, larger_is_better=True)
    assert {(cell.method, cell.lr) for cell in matrix.needed} == {("baseline", 1e-3), ("x", 1e-2)}
    assert len(matrix.needed) == 10 and not any(cell.choosing for cell in matrix.needed)
    with pytest.raises(UserError, match="the others 2 to choose from"):
        make_study({**values, "study": values["study"] | {"lrs": [1e-3, 3e-3]}})


def test_no_arm_chooses_on_test_from_several_rates():
    arm = {"name": "oelm", "arm": "x", "training": {"choose_on": "test"}}
    with pytest.raises(UserError, match=r"several study\.lrs are chosen on validation"):
        make_study({**ARMS, "study": {"methods": ["baseline", arm], "lrs": [1e-3, 3e-3]}})
