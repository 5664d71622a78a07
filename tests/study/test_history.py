"""How training went, in a report's tables and its JSON: against numbers computed here or published."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from oelm.study.analysis import analyse
from oelm.study.history import ArmHistory, arm_histories
from oelm.study.report import as_plain, write_report
from oelm.training.results import timing
from tests.study.report_folders import copy_run, make_study

PUBLISHED = {1000: 3.7234, 2000: 2.8164, 5000: 2.0468, 10000: 1.8044}  # of M512-GPT


def language_run(
    folder: Path, losses: dict[int, float], training: float = 1.0, seed: int = 1, split: str = "validation",
    lr: float = 5e-4, method: str = "baseline", **results: Any,
) -> Path:  # fmt: skip
    """A run with these losses at these steps, and a training log of a line every 100 steps."""
    best = min(losses.values())
    copy_run(folder, method, "tinystories", lr, seed, math.exp(best), metric="perplexity", results=results)
    lines: list[dict[str, Any]] = []
    for step in range(100, max(losses) + 1, 100):
        lines.append({"kind": "train", "step": step, "loss": training, "lr": 1e-3 / step})
        if step in losses:
            metrics = {"loss": losses[step], "perplexity": math.exp(losses[step])}
            lines.append({"kind": "eval", "step": step, "epoch": 1.0, "split": split, "metrics": metrics})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def course_of(folder: Path) -> ArmHistory:
    (group,) = analyse(folder).groups
    (course,) = arm_histories(group)
    return course


def falling(*steps: int) -> dict[int, float]:
    return {step: 1 + 1000 / step for step in steps}


def test_the_history_is_the_mean_of_the_seeds_where_all_have_an_evaluation(tmp_path):
    language_run(tmp_path / "a", {1000: 4.0, 2000: 3.0, 3000: 2.0})
    language_run(tmp_path / "b", {1000: 2.0, 2000: 2.0}, seed=2)
    course = course_of(tmp_path)
    assert [row["step"] for row in course.history] == [1000, 2000]
    assert [row["loss"] for row in course.history] == [3.0, 2.5]
    assert "improvement" not in course.history[0]
    assert course.history[1]["improvement"] == pytest.approx(1 / 6)
    assert course.history[0]["perplexity"] == pytest.approx((math.exp(4) + math.exp(2)) / 2)
    assert course.to_plain()["seeds"] == [1, 2]


def test_runs_at_several_learning_rates_are_not_averaged(tmp_path):
    language_run(tmp_path / "a", {1000: 4.0})
    language_run(tmp_path / "b", {1000: 2.0}, lr=1e-3)
    (group,) = analyse(tmp_path).groups
    assert [(course.lr, course.history[0]["loss"]) for course in arm_histories(group)] == [
        (5e-4, 4.0),
        (1e-3, 2.0),
    ]
    assert "baseline @ 0.001" in write_report(tmp_path).markdown.read_text()


@pytest.mark.parametrize(
    ("every", "last", "expected"),
    [
        (1000, 12_000, {1000: 1000, 10_000: 10_000, 12_000: 12_000}),
        (3000, 12_000, {10_000: 9000, 12_000: 12_000}),  # nothing was evaluated before step 3,000
        (700, 70_000, {1000: 700, 10_000: 9800, 50_000: 49_700, 70_000: 70_000}),
        (1000, 10_000, {1000: 1000, 10_000: 10_000}),
        (100, 900, {900: 900}),
    ],
)
def test_given_steps_have_the_newest_evaluation_before_them(tmp_path, every, last, expected):
    language_run(tmp_path / "a", falling(*range(every, last + 1, every)))
    assert {row["at"]: row["step"] for row in course_of(tmp_path).at_steps} == expected


def test_the_last_phase_is_the_last_ten_logged_points_with_their_learning_rates(tmp_path):
    language_run(tmp_path / "a", falling(1000, 2000), training=1.5)
    points = course_of(tmp_path).last_phase
    assert [point["step"] for point in points] == list(range(1100, 2001, 100))
    assert {point["loss"] for point in points} == {1.5} and points[-1]["lr"] == 1e-3 / 2000
    text = write_report(tmp_path).markdown.read_text()
    assert "| 2,000 | 1.5000 | 5e-7 |" in text


@pytest.mark.parametrize(
    ("losses", "training", "word", "rise"),
    [
        ([3.0, 2.0, 1.5], 1.0, "none", 0.0),
        ([3.0, 2.0, 2.02], 1.0, "slight", 0.01),
        ([3.0, 2.0, 2.5], 1.0, "clear", 0.25),
        ([3.0, 2.0, 2.5], 3.0, "unstable", 0.25),
        ([2.0], 1.0, "unknown", 0.0),
    ],
)
def test_overfitting_in_a_word(tmp_path, losses, training, word, rise):
    language_run(tmp_path / "a", {1000 * (i + 1): loss for i, loss in enumerate(losses)}, training)
    fit = course_of(tmp_path).fit
    assert fit["overfitting"] == word and fit["rise"] == pytest.approx(rise)
    assert fit["best_step"] == 1000 * (losses.index(min(losses)) + 1)
    assert fit["training_perplexity"] == pytest.approx(math.exp(training))
    assert fit["validation_perplexity"] == pytest.approx(math.exp(losses[-1]))


def test_the_reports_own_ratios_come_out_of_the_reports_own_figures(tmp_path):
    counts = {"total": 44_896_768, "trainable": 44_896_768, "frozen": 0}
    best = {"step": 99_000, "split": "validation", "metrics": {"perplexity": 4.14, "loss": 1.4215}}
    language_run(
        tmp_path / "a",
        falling(1000),
        parameters=counts,
        total_time_s=23_400,
        best=best,
        experiment="M512-GPT",
    )
    course = course_of(tmp_path)
    published = course.published["efficiency"]
    assert course.efficiency["per_parameter"] == pytest.approx(published["per_parameter"], rel=1e-3)
    assert course.efficiency["per_hour"] == pytest.approx(published["per_hour"], rel=1e-3)
    assert "perplexity per parameter rewards larger models" in write_report(tmp_path).markdown.read_text()


def test_published_figures_stand_beside_those_of_the_same_step(tmp_path):
    losses = falling(*range(1000, 12_001, 1000))
    language_run(tmp_path / "a", losses, experiment="M512-GPT")
    written = write_report(tmp_path)
    text = written.markdown.read_text()
    for step, theirs in PUBLISHED.items():
        (row,) = re.findall(rf"^\| {step:,} \|.*$", text, flags=re.MULTILINE)[:1]
        assert f"{losses[step]:.4f}" in row and row.endswith(f"| {theirs:.4f} |"), row
    (setting,) = as_plain(written.analysis)["settings"]
    (plain,) = setting["training"]
    assert plain["published"]["history"]["5000"] == {"loss": 2.0468}
    assert plain["published"]["time"]["total_s"] == 23_400
    assert len(plain["history"]) == 12 and plain["published"]["last_training_loss"] == 1.46
    assert "training.weight_decay" in plain["published"]["differs_in"]
    here = math.exp(min(losses.values()))
    assert plain["published"]["beside"]["perplexity"] == {"published": 4.14, "here": pytest.approx(here)}
    assert f"| perplexity | 4.14 | {here:.4g} |" in text
    assert re.search(r"M512-GPT: differs from the published recipe in .*training\.weight_decay", text)


def test_a_history_on_another_split_has_no_published_one_beside_it(tmp_path):
    language_run(tmp_path / "a", falling(1000, 2000), split="test", experiment="M512-GPT")
    assert "history" not in course_of(tmp_path).published


def test_an_experiment_that_is_not_in_the_catalogue_has_nothing_beside_it(tmp_path):
    language_run(tmp_path / "a", falling(1000), experiment="X-99")
    assert course_of(tmp_path).published == {}


def test_a_long_history_is_shown_in_part_with_its_best_and_last(tmp_path):
    losses = {step: 2 + abs(step - 33_000) / 1e5 for step in range(1000, 100_001, 1000)}
    language_run(tmp_path / "a", losses)
    text = write_report(tmp_path).markdown.read_text()
    history = text.split("### Validation history")[1].split("###")[0]
    steps = [
        int(step.replace(",", "")) for step in re.findall(r"^\| ([\d,]+) \|", history, flags=re.MULTILINE)
    ]
    assert len(steps) <= 14 and {1000, 33_000, 100_000} <= set(steps) and steps == sorted(steps)


def test_the_tables_are_folded_and_come_after_the_verdict(tmp_path):
    out = make_study(tmp_path / "s")
    for lang, title in (("en", "Training in detail"), ("zh", "训练细节")):
        page = write_report(out, lang).html.read_text(encoding="utf-8")
        assert page.count("<details>") == page.count("</details>") == 1 and title in page
        assert page.index('class="answer"') < page.index('id="results"') < page.index("<details>")


def test_a_run_without_a_log_has_times_and_parameters_only(tmp_path):
    language_run(tmp_path / "a", falling(1000))
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (tmp_path / "a" / "timing_stats.json").unlink()
    course = course_of(tmp_path)
    assert course.history == course.at_steps == course.last_phase == []
    assert course.fit == {"training_loss": None, "overfitting": "unknown"}
    assert course.time["step_median_s"] is None and course.time["total_s"] > 0
    assert "Parameters and efficiency" in write_report(tmp_path).markdown.read_text()


def test_the_median_time_of_a_step_is_the_same_in_every_table(tmp_path):
    for seed, seconds in enumerate((0.01, 0.02, 0.09), 1):
        run = language_run(tmp_path / str(seed), {1000: 4.0}, seed=seed)
        (run / "timing_stats.json").write_text(json.dumps({"mean_s": seconds, "median_s": seconds}))
    (group,) = analyse(tmp_path).groups
    (course,) = arm_histories(group)
    assert course.time["step_median_s"] == group.arms["baseline"].step_time() == 0.02
    assert course.time["step_mean_s"] == pytest.approx(0.04)


def test_the_median_is_that_of_single_steps():
    steps = [0.1] * 7 + [5.0] * 3
    found = timing(steps, 2.0, 1.0)
    assert found["median_s"] == 0.1 and found["mean_s"] == pytest.approx(sum(steps) / 10)
    assert found["steps_measured"] == 10 and found["every_step"] and found["validation_time_s"] == 2.0
    assert "median_s" not in timing([], 0.0, 0.0)
