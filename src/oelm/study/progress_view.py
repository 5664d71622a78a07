"""The progress of a running study: a line per run, and in a terminal what is running now, below them."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
            if progress.done:
                progress.news.insert(0, f"{progress.done} runs are done already")
        for line in progress.news:
            if self._live is None:
                say(f"{line}; {self._summary(progress)}", err=True)
            else:
                self._live.console.print(line, highlight=False, markup=False)
        progress.news.clear()
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text("\n".join(self._now(progress))))

    def _summary(self, progress: StudyProgress) -> str:
        # A run may have written its results before its end is reported: it is done, not running.
        running = [run for run in progress.running if run.cell not in run.setting.scores]
        later = [  # measured runs that follow once learning rates are chosen
            len(setting.study.arms) * len(setting.study.seeds)
            for setting, matrix in zip(progress.settings, progress.matrices, strict=True)
            if not matrix.decided
        ]
        expected = progress.done + len(running) + len(progress.waiting) + sum(later)
        text = f"{progress.done} of {expected} runs"
        made = progress.done - self.first_done
        if made > 0:
            half = len(running) / 2  # on average a running run is half done
            left = (expected - progress.done - half) / (made + half) * (time.monotonic() - self.began)
            text += f", about {duration(left)} left"
        return text

    def _now(self, progress: StudyProgress) -> Iterator[str]:
        for run in progress.running:
            state = run_status(run.folder) if (run.folder / "config.toml").exists() else None
            step = f"step {state.step}/{state.of}" if state and state.of else "starting"
            left = f", {duration(state.left_s)} left" if state and state.left_s is not None else ""
            yield f"{run.name}: {step}{left}"
        yield from (f"FAILED {name}" for name in progress.failed)
        yield self._summary(progress)


def kept_models(progress: StudyProgress, root: Path) -> list[tuple[str, Path]]:
    """The trained models that were kept: a description and the folder."""
    models = [
        (f"{cell.method} on {setting.task}", setting.folder(root, cell) / "model")
        for setting, matrix in zip(progress.settings, progress.matrices, strict=True)
        for cell in matrix.needed
    ]
    return [(name, folder) for name, folder in models if folder.is_dir()]
