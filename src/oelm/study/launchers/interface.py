"""What a launcher does: start runs, report those that have ended, ask all of them to stop."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from oelm.config import RunConfig
from oelm.study.design import StudyConfig
from oelm.system.messages import Notice, notice


@dataclass(frozen=True)
class RunJob:
    """One run to train: its config, the folder of its prepared dataset, and the folder for its record."""

    config: RunConfig
    dataset: Path
    folder: Path


@dataclass(frozen=True)
class EndedRun:
    """A run that is no longer running, by its folder, which holds all its results.

    `kind` is the kind of failure (`oelm.errors`), None for a run that was completed. `crowded`: memory was
    short because other runs share it; the launcher now runs fewer, so the run can start again at once.
    """

    folder: Path
    kind: str | None = None
    reason: Notice | None = None
    log: Path | None = None
    crowded: bool = False

    @property
    def full_reason(self) -> Notice:
        """The reason, with the path of the log where that holds more."""
        reason = self.reason or notice("study.no_reason")
        if self.log is not None and self.kind in ("process", "software", "device"):
            return notice("run.see_log", reason=reason, log=self.log)
        return reason


class Launcher(ABC):
    """Trains runs somewhere. Results are read from the runs' folders, never passed back by a launcher."""

    @abstractmethod
    def __init__(self, table: StudyConfig, memory_bytes: float, logs: Path) -> None: ...

    @property
    @abstractmethod
    def places(self) -> int:
        """How many runs it trains side by side."""

    @property
    def detached(self) -> bool:
        """Whether its runs go on when this process leaves."""
        return False

    def environments(self) -> list[dict[str, str]]:
        """The environment of the process in each place, if places are on this machine and each run is one
        process: then an estimate can time real runs here. Otherwise empty."""
        return []

    def prepare(self, runs: int) -> None:  # noqa: B027
        """Get ready to start so many runs soon; must not wait, as the study checks its methods meanwhile."""

    @abstractmethod
    def start(self, job: RunJob) -> bool:
        """Start a run; False if there is no place for it now. OSError if it could not be started."""

    @abstractmethod
    def poll(self, seconds: float) -> EndedRun | None:
        """The next run that has ended, waiting up to so many seconds; None if there is none."""

    @abstractmethod
    def stop(self) -> None:
        """Ask every run to save a checkpoint and stop; `poll` then reports them."""

    @abstractmethod
    def close(self) -> None:
        """End whatever still runs, unless it is `detached`."""

    def finish(self) -> None:  # noqa: B027
        """The study is complete: end what waits for further runs, such as idle workers."""
