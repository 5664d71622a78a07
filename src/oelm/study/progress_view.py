"""The progress of a running study: a table that stays in place, or without a terminal a line per run."""

import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from oelm.study.folder import Setting
from oelm.study.matrix import Matrix
from oelm.study.scheduler import StudyProgress
from oelm.system.terminal import console, say
from oelm.training.display import duration
from oelm.training.status import run_status


class ProgressView:
    """Shows a study's progress on standard error; a Scheduler calls `show`."""

    def __init__(self) -> None:
        self.began, self.first_done = time.monotonic(), -1
        self._live: Any = None

    def __enter__(self) -> "ProgressView":
        if sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: StudyProgress) -> None:
        if self.first_done < 0:
            self.first_done = progress.done
            if self.first_done:
                self._say(f"{self.first_done} runs are done already")
        for line in progress.news:
            self._say(line if self._live is not None else f"{line}; {self._summary(progress)}")
        progress.news.clear()
        if self._live is not None:
            self._live.update(self._picture(progress))

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            say(text, err=True)

    def _summary(self, progress: StudyProgress) -> str:
        # A run may have written its results before its end is reported: it is done, not running.
        running = [run for run in progress.running if run.cell not in run.setting.scores]
        expected = progress.done + len(running) + len(progress.waiting) + expected_later(progress)
        text = f"{progress.done} of {expected} runs"
        made = progress.done - self.first_done
        if made > 0:
            half = len(running) / 2  # on average a running run is half done
            left = (expected - progress.done - half) / (made + half) * (time.monotonic() - self.began)
            text += f", about {duration(left)} left"
        return text

    def _picture(self, progress: StudyProgress) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for name in ("task", "method", "trials", "lr", "measured", "test mean"):
            table.add_column(name, justify="left" if name in ("task", "method") else "right", no_wrap=True)
        for setting, matrix in zip(progress.settings, progress.matrices, strict=True):
            for method in setting.study.methods:
                table.add_row(Text(setting.task), Text(method), *_cells(setting, matrix, method))
        running = Table(box=None, pad_edge=False, show_header=False)
        for run in progress.running:
            state = run_status(run.folder) if (run.folder / "config.toml").exists() else None
            step = f"{state.step}/{state.of}" if state and state.of else "starting"
            left = f"{duration(state.left_s)} left" if state and state.left_s is not None else ""
            running.add_row(Text(run.name), step, left)
        failed = [Text(f"FAILED {name}", style="red") for name in progress.failed]
        return Group(table, Text(), running, *failed, Text(self._summary(progress), style="bold"))


def expected_later(progress: StudyProgress) -> int:
    """The number of measured runs that follow once learning rates are chosen."""
    return sum(
        len(setting.study.methods) * len(setting.study.seeds)
        for setting, matrix in zip(progress.settings, progress.matrices, strict=True)
        if not matrix.decided
    )


def _cells(setting: Setting, matrix: Matrix, method: str) -> list[str]:
    cells = [cell for cell in matrix.needed if cell.method == method]
    trials = [cell in setting.scores for cell in cells if cell.choosing]
    measured = [cell for cell in cells if not cell.choosing]
    lr = matrix.chosen.get(method)
    tests = [setting.tests[cell] for cell in measured if cell in setting.tests]
    return [
        f"{sum(trials)}/{len(trials)}" if trials else "",
        f"{lr:g}" if lr is not None else "",
        f"{sum(cell in setting.scores for cell in measured)}/{len(setting.study.seeds)}",
        f"{fmean(tests):.4f}" if tests else "",
    ]


def kept_models(progress: StudyProgress, root: Path) -> list[tuple[str, Path]]:
    """The trained models that were kept: a description and the folder."""
    models = [
        (f"{cell.method} on {setting.task}", setting.folder(root, cell) / "model")
        for setting, matrix in zip(progress.settings, progress.matrices, strict=True)
        for cell in matrix.needed
    ]
    return [(name, folder) for name, folder in models if folder.is_dir()]
