"""Runs on any machines that share the study's folder: they are queued there, and `oelm work` trains them."""

import hashlib
import time
from pathlib import Path

from oelm.study.design import StudyConfig
from oelm.study.launchers.interface import EndedRun, Launcher, RunJob
from oelm.study.run_claims import Queue, is_transient
from oelm.study.work import has_result, job_values
from oelm.system.messages import read_notice
from oelm.training.status import is_locked


class WorkersLauncher(Launcher):
    """A queue of runs in the study's folder. Workers go on when this process ends, and a new one attaches."""

    def __init__(self, table: StudyConfig, memory_bytes: float, logs: Path) -> None:
        self.table, self.memory_bytes, self.root = table, memory_bytes, logs.parent
        self.queue = Queue(self.root)
        self.outstanding: dict[str, RunJob] = {}
        self.ended: list[str] = []

    @property
    def places(self) -> int:
        return self.table.jobs or 1

    @property
    def detached(self) -> bool:
        return True

    def start(self, job: RunJob) -> bool:
        if not self.outstanding:
            self.queue.open()
        name = job_name(job, self.root)
        folder = job.folder
        # The queue is asked first: once a run is not in it, no worker can put a result there any more.
        unfinished = not self.queue.has(name) and folder.exists() and not has_result(folder)
        values = job_values(job, self.table, self.memory_bytes, self.root)
        self.queue.add(name, values, folder if unfinished and not is_locked(folder) else None)
        self.outstanding[name] = job
        return True

    def poll(self, seconds: float) -> EndedRun | None:
        try:
            if not self.ended:
                time.sleep(seconds)
                waiting = set(self.queue.names())
                self.ended = [name for name in self.outstanding if name not in waiting]
            if not self.ended:
                return None
            answer = self.queue.answer(self.ended[-1])
        except OSError as error:
            if not is_transient(error):
                raise
            return None  # the shared storage fails for a moment: the next call tries again
        job = self.outstanding.pop(self.ended.pop())
        if answer is None:
            return EndedRun(job.folder)
        return EndedRun(job.folder, str(answer["kind"]), read_notice(answer["reason"]))

    def stop(self) -> None:
        """Workers go on: `oelm cancel` stops them."""

    def close(self) -> None: ...

    def finish(self) -> None:
        self.queue.open()
        self.queue.finish()


def job_name(job: RunJob, root: Path) -> str:
    """A name in the queue that no other run has. Runs are taken in the order of their names, seed by
    seed."""
    path = str(job.folder.relative_to(root))
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    return f"{job.config.training.seed:06d}-{job.folder.name}-{digest}"
