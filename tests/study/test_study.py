"""Studies as a user makes them: from a CSV to records, stopped, continued, enlarged, imported."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from oelm.cli.main import app
from oelm.errors import UserError
from oelm.study.analysis import analyse, more_seeds_useless
from oelm.study.folder import StudyFolder
from oelm.study.publish import publish
from oelm.study.report import as_plain
from tests.study.studies import (
    MATRIX,
    RECIPE,
    environment,
    make_file,
    records,
    run,
    start,
    wait_for_progress,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_file(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def unbroken(data):
    """A study that nothing disturbed."""
    out = data.parent / "unbroken"
    code, text = run(data, out, "--seeds", "2")
    assert code == 0, text
    (out.parent / "printed.txt").write_text(text)
    return out


def of(out: Path, part: str) -> dict[str, dict]:
    return {name: record for name, record in records(out).items() if f"/{part}-" in name}


def test_the_rate_is_chosen_on_validation_and_fresh_seeds_are_tested_once(unbroken):
    choice, measured = of(unbroken, "choice"), of(unbroken, "measured")
    assert len(choice) == 4 and len(measured) == 4
    for record in choice.values():
        assert record["results"]["test"] is None and "predictions.npz" not in record["files"]
        assert {line["split"] for line in record["metrics"] if line["kind"] == "eval"} == {"validation"}
    for method in ("baseline", "oelm"):
        tried = [r["results"] for name, r in choice.items() if f"/{method}/" in name]
        best = max(tried, key=lambda r: (r["best"]["metrics"]["accuracy"], -r["lr"]))
        runs = [r["results"] for name, r in measured.items() if f"/{method}/" in name]
        assert {r["lr"] for r in runs} == {best["lr"]} and sorted(r["seed"] for r in runs) == [1, 2]
        assert all("accuracy" in r["test"]["metrics"] for r in runs)


def test_it_ends_with_a_table_an_answer_models_and_a_report(unbroken):
    text = (unbroken.parent / "printed.txt").read_text()
    assert "baseline" in text and "most frequent class" in text and "TF-IDF" in text
    assert "no conclusion may be drawn" in text  # two seeds are too few
    assert f"report   {unbroken / 'report.html'}" in text and (unbroken / "report.html").exists()
    for line in [line for line in text.splitlines() if line.startswith("model")]:
        assert (Path(line.split(maxsplit=1)[1]) / "model.safetensors").exists()


@pytest.mark.slow
def test_the_demo_is_a_study(tmp_path):
    words = ["study", "demo", "--lrs", "3e-4", "--seeds", "1", "--steps", "3", "--out", str(tmp_path / "s")]
    done = subprocess.run(
        [sys.executable, "-m", "oelm", *words],
        env=environment(tmp_path / "cache"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "movie-reviews.csv, gpt-tiny" in done.stdout
    found = StudyFolder(tmp_path / "s").records()[0]
    assert {record.method for record in found} == {"baseline", "oelm"}
    assert found[0].results["references"]["tfidf_logreg"]["test"]["accuracy"] > 0.7


def test_pairs_share_data_order_and_start(unbroken):
    """The same seed: the same batches for both methods, so the same samples at every step."""
    runs = of(unbroken, "choice")
    by_lr = {}
    for name, record in runs.items():
        by_lr.setdefault(name.split("lr")[1].split("-s")[0], []).append(record["metrics"][0])
    for first, second in by_lr.values():
        assert first["samples"] == second["samples"]
        assert first["loss"] == pytest.approx(second["loss"], rel=0.05)  # one step: only Q and K differ


def test_one_model_of_each_method_is_kept_and_no_checkpoints(unbroken):
    for method in ("baseline", "oelm"):
        kept = [r for name, r in of(unbroken, "measured").items() if f"/{method}/" in name and "model" in r]
        assert len(kept) == 1
    assert not list(unbroken.rglob("checkpoints"))


@pytest.mark.slow
def test_more_seeds_reuse_what_is_done(unbroken, data, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in unbroken.rglob("results.json")}
    code, text = run(data, unbroken, "--seeds", "3")
    assert code == 0, text
    after = {p: p.stat().st_mtime_ns for p in unbroken.rglob("results.json")}
    assert {p: after[p] for p in before} == before  # nothing was made again
    added = {p.parent.name for p in after if p not in before}
    assert len(added) == 2 and all("measured" in name and "-s3-" in name for name in added)


def test_another_machines_records_come_in(unbroken, data, tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_CACHE_DIR", str(data.parent / "cache"))
    out, words = tmp_path / "s", ["study", "--data", str(data), *RECIPE, *MATRIX, "--seeds", "2"]
    found = CliRunner().invoke(app, [*words, "--out", str(out), "--import", str(unbroken)])
    assert found.exit_code == 0, found.output
    expected = {name: r["results"] for name, r in records(unbroken).items()}
    assert {name: r["results"] for name, r in records(out).items()} == expected
    assert len(StudyFolder(out).records()[0]) == len(expected)
    again = CliRunner().invoke(app, [*words, "--out", str(out), "--import", str(unbroken)])
    assert "0 records imported" in again.output
    other = [*words, "--epochs", "2", "--out", str(tmp_path / "t"), "--import", str(unbroken)]
    other.remove("--steps")
    other.remove("12")
    refused = CliRunner().invoke(app, other)
    assert "0 records imported" in refused.output and "another configuration" in refused.output


@pytest.mark.parametrize(
    "options", [["--dry-run", "--json"], ["--import", "s", "--json"], ["--dry-run", "--import", "s"]]
)
def test_what_makes_no_run_is_one_thing_and_has_no_json(data, options):
    """A program would get prose for JSON; and an import that was only planned would look like one."""
    found = CliRunner().invoke(app, ["study", "--data", str(data), *options])
    assert isinstance(found.exception, UserError) and "do not go together" in str(found.exception)


def test_an_import_takes_regular_files_only(unbroken, data, tmp_path, monkeypatch):
    """Not what a link leads to, be it a file of the system or a device without an end, and no pipe."""
    monkeypatch.setenv("OELM_CACHE_DIR", str(data.parent / "cache"))
    (tmp_path / "secret").write_text("nobody's business")
    targets = (tmp_path / "secret", Path("/dev/zero"), None, None)
    files = ("timing_stats.json", "metrics.jsonl", "predictions.npz", "results.json")
    source = tmp_path / "source"
    runs = sorted(path.parent for path in unbroken.rglob("predictions.npz"))
    for number, (name, target) in enumerate(zip(files, targets, strict=True)):
        shutil.copytree(runs[number], source / str(number))
        (source / str(number) / name).unlink()
        if target is None:
            os.mkfifo(source / str(number) / name)
        else:
            (source / str(number) / name).symlink_to(target)
    (source / "linked").symlink_to(runs[0])
    words = ["study", "--data", str(data), *RECIPE, *MATRIX, "--seeds", "2", "--out", str(tmp_path / "s")]
    found = CliRunner().invoke(app, [*words, "--import", str(source)])
    assert found.exit_code == 0, found.output
    assert "0 records imported" in found.output and "4 left out: damaged" in found.output
    assert "is a link, which is not followed" in found.output
    assert not [*(tmp_path / "s").rglob("results.json")]


def test_published_records_give_the_same_report_and_come_in_whole(unbroken, data, tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_CACHE_DIR", str(data.parent / "cache"))
    published = tmp_path / "p" / unbroken.name  # the folder's name is the title
    published.parent.mkdir()
    publish(unbroken, published)
    assert as_plain(analyse(published)) == as_plain(analyse(unbroken))
    words = ["study", "--data", str(data), *RECIPE, *MATRIX, "--seeds", "2", "--out", str(tmp_path / "s")]
    done = CliRunner().invoke(app, [*words, "--import", str(published)])
    assert done.exit_code == 0, done.output
    shutil.rmtree(tmp_path / "p")
    whole = {record.folder.name: record.predictions() for record in StudyFolder(unbroken).records()[0]}
    for record in StudyFolder(tmp_path / "s").records()[0]:
        theirs, ours = whole[record.folder.name], record.predictions()
        assert (ours is None) == (theirs is None) == record.choosing
        for name in ("ids", "groups", "labels", "predictions") if ours and theirs else ():
            assert ours[name].tolist() == theirs[name].tolist()


@pytest.mark.slow
def test_a_dry_run_prints_the_matrix_and_trains_nothing(data, tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_CACHE_DIR", str(data.parent / "cache"))
    words = ["study", "--data", str(data), *RECIPE, *MATRIX, "--seeds", "5", "--dry-run"]
    words += ["--set", 'study.methods=["baseline", {name = "oelm", arm = "oelm, own"}]']
    found = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "s")])
    assert found.exit_code == 0, found.output
    assert 'methods   baseline, "oelm, own"\n' in found.output
    assert "4 trials + 10 measured runs" in found.output and "14 runs" in found.output
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_until_decided_a_study_looks_at_five_seeds_and_goes_on_only_where_more_would_help(data, tmp_path):
    out = tmp_path / "s"
    code, text = run(data, out, "--until-decided", "--max-seeds", "10", "--margin", "0.5")
    assert code == 0, text
    analysis = analyse(out)
    (comparison,) = analysis.comparisons
    went_on = "not decided with 5 seeds; going on" in text
    assert comparison.seeds == tuple(range(1, 11 if went_on else 6))
    assert went_on or more_seeds_useless(analysis)
    assert analysis.level == pytest.approx(0.975) and not analysis.changes and not analysis.unplanned
    code, text = run(data, out)  # the same study again has nothing to add
    assert code == 0 and analyse(out).comparisons[0].seeds == comparison.seeds


def test_other_settings_do_not_mix_in_one_folder(unbroken, data):
    code, text = run(data, unbroken, "--set", "training.clip=0.5")
    assert code == 2 and "(training.clip is 1.0 there, 0.5 here)" in text and "another folder" in text


@pytest.mark.slow
def test_a_file_may_move_but_another_file_is_another_study(unbroken, data, tmp_path, monkeypatch):
    monkeypatch.setenv("OELM_CACHE_DIR", str(data.parent / "cache"))
    out, moved = tmp_path / "s", tmp_path / data.name
    shutil.copytree(unbroken, out)
    shutil.copy(data, moved)

    def study(file, *more):
        words = ["study", "--data", str(file), *RECIPE, *MATRIX, "--seeds", "2", "--out", str(out), *more]
        return CliRunner().invoke(app, words)

    assert (
        f"done      {len(records(unbroken))} of these runs are already in" in study(moved, "--dry-run").output
    )
    found = study(moved)
    assert found.exit_code == 0 and records(out) == records(unbroken), found.output
    assert f'data = "{moved}"' in (out / "study.toml").read_text()
    lines = moved.read_text().splitlines()
    moved.with_name("other.csv").write_text("\n".join(lines[:-20]))
    found = study(moved.with_name("other.csv"))
    assert isinstance(found.exception, UserError) and "a study of other data (task.data is" in str(
        found.exception
    )


@pytest.mark.slow
def test_a_study_in_which_nothing_could_be_measured_exits_with_1_as_json_too(data, tmp_path):
    diverges = ["--lrs", "1e30", "--seeds", "1", "--set", "training.clip=0"]
    code, text = run(data, tmp_path / "s", *diverges, "--json")
    assert code == 1 and "oelm: nothing was measured: every run failed" in text, text
    (answer,) = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert answer["title"] == "s" and answer["answer"]


def test_a_method_that_the_model_cannot_have_costs_no_run(data, tmp_path):
    out = tmp_path / "s"
    methods = 'study.methods=["baseline", {name = "oelm", freeze = {q = "9"}}]'
    code, text = run(data, out, "--set", methods)
    assert code == 2 and "selects none of the model's 2 layers" in text and "oelm" in text.splitlines()[-1]
    assert not out.exists()


@pytest.mark.slow
def test_a_study_in_which_all_fails_has_failed(data, tmp_path):
    code, text = run(data, tmp_path / "s", "--seeds", "1", "--lrs", "1e30")
    assert code == 1 and text.splitlines()[-1] == (
        "oelm: nothing was measured: every run failed; the reasons are above"
    )


def test_a_folder_with_other_things_is_left_alone(data, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    code, text = run(data, tmp_path)
    assert code == 2 and "not a study" in text and [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_a_mistake_does_not_spoil_the_folder(data, tmp_path):
    code, text = run(data, tmp_path / "s", "--train-size", "100000")
    assert code == 2 and "Traceback" not in text and not (tmp_path / "s").exists()
    code, text = run(data, tmp_path / "s", "--lang", "xx")
    assert code == 2 and "xx" in text


@pytest.mark.slow
def test_a_run_whose_process_dies_is_made_again(data, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    more = ("--seeds", "1", "--set", "training.steps=60")
    assert run(data, whole, *more)[0] == 0
    process = start(data, broken, *more)
    assert wait_for_progress(process, broken, extra=0.2)
    for worker in psutil.Process(process.pid).children():
        worker.kill()
    text, _ = process.communicate(timeout=900)
    assert process.returncode == 0 and "trying again" in text and "FAILED" not in text
    assert records(broken) == records(whole)


@pytest.mark.slow
def test_a_damaged_record_is_made_again(data, tmp_path):
    out = tmp_path / "s"
    assert run(data, out, "--seeds", "1", "--lrs", "1e-3")[0] == 0
    before = records(out)
    victim = next(iter((out / "runs").rglob("results.json")))
    victim.write_text("{")
    code, text = run(data, out, "--seeds", "1", "--lrs", "1e-3")
    assert code == 0 and "made again" in text
    assert {name: r["results"] for name, r in records(out).items()} == {
        name: r["results"] for name, r in before.items()
    }


@pytest.mark.slow
def test_ten_kills_change_nothing(data, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    more = ("--seeds", "3", "--set", "training.steps=120")  # long enough to be killed ten times
    assert run(data, whole, *more)[0] == 0
    kills = 0
    for attempt in range(40):
        process = start(data, broken, *more)
        try:
            if kills < 10 and wait_for_progress(process, broken, extra=0.15 * (attempt % 4)):
                os.kill(process.pid, signal.SIGKILL)
                process.communicate()
                kills += 1
                continue
            text, _ = process.communicate(timeout=900)
        finally:
            process.kill()
        assert process.returncode == 0, text
        break
    assert kills == 10
    assert records(broken) == records(whole)


@pytest.mark.slow
def test_told_to_stop_it_saves_and_goes_on(data, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    more = ("--seeds", "1", "--set", "training.steps=60")
    assert run(data, whole, *more)[0] == 0
    process = start(data, broken, *more)
    assert wait_for_progress(process, broken, extra=0.2)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=900)
    assert process.returncode == 75 and "run the same command again to resume" in text
    code, text = run(data, broken, *more, "--stop-after", "8s")
    assert code in (0, 75), text
    if code == 75:
        assert run(data, broken, *more)[0] == 0
    assert records(broken) == records(whole)


@pytest.mark.slow
def test_a_failed_run_is_named_and_does_not_stop_the_others(data, tmp_path):
    out = tmp_path / "s"
    code, text = run(data, out, "--seeds", "1", "--lrs", "1e-3,1e30")
    assert code == 0, text
    assert text.count("FAILED") == 2 and "try a lower learning rate" in text
    found = {p: json.loads(p.read_text()) for p in out.rglob("results.json")}
    failures = [results["failure"] for results in found.values() if results["status"] == "failed"]
    assert failures == [{"kind": "diverged"}] * 2 and len(found) == 6
    before = {path: path.stat().st_mtime_ns for path in found}
    code, text = run(data, out, "--seeds", "1", "--lrs", "1e-3,1e30")
    assert code == 0 and text.count("failed   ") == 2  # still said, and not made again: it is a result
    assert {path: path.stat().st_mtime_ns for path in found} == before


@pytest.mark.slow
def test_a_run_may_take_several_processes(data, tmp_path):
    alone, two = tmp_path / "alone", tmp_path / "two"
    more = ("--seeds", "1", "--lrs", "1e-3")
    assert run(data, alone, *more)[0] == 0
    code, text = run(data, two, *more, "--set", "study.gpus_per_run=2")
    assert code == 0, text
    for name, record in records(alone).items():
        other = records(two)[name]["results"]
        assert other["test"]["metrics"]["loss"] == pytest.approx(
            record["results"]["test"]["metrics"]["loss"], 1e-4
        )
        assert json.loads((two / name / "environment.json").read_text())["processes"] == 2
    code, text = run(data, tmp_path / "bad", "--seeds", "1", "--lrs", "1e30", "--set", "study.gpus_per_run=2")
    assert code == 1 and "nothing was measured" in text and "trying again" not in text
    for path in (tmp_path / "bad").rglob("results.json"):
        assert json.loads(path.read_text())["failure"] == {"kind": "diverged"}
