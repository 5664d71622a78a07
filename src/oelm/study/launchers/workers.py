"""Runs on any machines that share the study's folder: they are queued there, and `oelm work` trains them."""

import hashlib
import time
from pathlib import Path

from oelm.study.design import StudyConfig
from oelm.study.launchers.interface import EndedRun, Launcher, RunJob
from oelm.study.run_claims import Queue
from oelm.study.work import job_values
from oelm.system.messages import read_notice


class WorkersLauncher(Launcher):
    """A queue of runs in the study's folder. Workers go on without this process; it attaches again."""

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
        self.queue.add(name, job_values(job, self.table, self.memory_bytes, self.root))
        self.outstanding[name] = job
        return True

    def poll(self, seconds: float) -> EndedRun | None:
        if not self.ended:
            time.sleep(seconds)
            waiting = set(self.queue.names())
            self.ended = [name for name in self.outstanding if name not in waiting]
        if not self.ended:
            return None
        name = self.ended.pop()
        job, answer = self.outstanding.pop(name), self.queue.answer(name)
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
