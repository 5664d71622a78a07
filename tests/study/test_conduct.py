"""What a study refuses before any run, and what it says of its progress."""

import pytest

from oelm.errors import UserError
from oelm.study.conduct import ProgressView, check_methods, prepare_settings
from oelm.study.design import make_study
from oelm.study.scheduler import StudyProgress
from tests.study.studies import make_file


def settings(folder, *methods, **training):
    task = {"data": str(make_file(folder)), "text": "body", "label": "topic", "max_length": 32}
    table = {"methods": ["baseline", *methods], "lrs": [1e-3], "seeds": 1}
    values = {"study": table, "task": task, "model": {"name": "gpt-tiny"}, "training": training}
    return prepare_settings(make_study(values))


@pytest.mark.parametrize(
    ("method", "steps", "says"),
    [
        ("oelm-unfreeze", 2, r"^oelm-unfreeze: .*unfreeze_at = 0.8 is step 2, but the run ends after 2$"),
        ({"name": "oelm", "freeze_schedule": {"unfreeze_at": 50}}, 20, "step 50, but the run ends after 20$"),
    ],
)
def test_a_schedule_that_its_runs_cannot_keep_is_refused(tmp_path, monkeypatch, method, steps, says):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path / "cache"))
    check_methods(settings(tmp_path, method, steps=60))
    with pytest.raises(UserError, match=says):
        check_methods(settings(tmp_path, method, steps=60) + settings(tmp_path, method, steps=steps))


def test_what_is_left_is_told_while_something_is(capsys):
    view, progress = ProgressView(), StudyProgress([], done=1)
    view.show(progress)
    progress.done, progress.news = 1_200, ["the last run"]
    view.show(progress)
    assert capsys.readouterr().err.splitlines() == [
        "1 run is done already; 1 of 1 runs", "the last run; 1,200 of 1,200 runs",
    ]  # fmt: skip
