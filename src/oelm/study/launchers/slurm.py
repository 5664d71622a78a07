"""Runs on a Slurm cluster: an array of workers (`oelm work`), which take the study's runs from its folder.

Later edits of the code do not reach queued runs: workers start from a copy of it in the study's folder, and
every run's config is there as JSON. A worker gets a signal before its time limit, has its runs save, and asks
Slurm to queue it again.
"""

import contextlib
import hashlib
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

from oelm.errors import RunError, UserError
from oelm.study.design import SlurmConfig, StudyConfig
from oelm.study.launchers.interface import EndedRun, RunJob
from oelm.study.launchers.workers import WorkersLauncher
from oelm.study.slurm_jobs import command, error_line, job_name, tasks
from oelm.system.files import folder_beside, write_text
from oelm.system.messages import notice
from oelm.training.folder import source_commit

POLL_INTERVAL = 5.0  # seconds between two queries of Slurm's queue
MOST_FRUITLESS = 3  # submissions in a row whose workers all ended without a run
NOT_CODE = shutil.ignore_patterns("__pycache__", "*.pyc")


class SlurmLauncher(WorkersLauncher):
    """Keeps enough workers queued in Slurm as long as there are runs for them."""

    def __init__(self, table: StudyConfig, memory_bytes: float, logs: Path) -> None:
        super().__init__(table, memory_bytes, logs)
        if shutil.which("sbatch") is None:
            raise UserError("there is no Slurm on this machine (no sbatch); leave --slurm out")
        self.plugins: dict[str, None] = {}
        self.looked = float("-inf")
        self.submitted = self.fruitless = 0

    @property
    def places(self) -> int:
        return self.table.slurm.workers * max(1, self.table.jobs)

    def start(self, job: RunJob) -> bool:
        self.plugins |= dict.fromkeys(job.config.plugins)
        return super().start(job)

    def poll(self, seconds: float) -> EndedRun | None:
        if self.outstanding and time.monotonic() - self.looked > POLL_INTERVAL:
            self._submit_missing()
            self.looked = time.monotonic()
        ended = super().poll(seconds)
        self.fruitless = 0 if ended is not None else self.fruitless
        return ended

    def _submit_missing(self) -> None:
        """Submit the workers that are missing."""
        known = tasks(self.root)
        if known is None:  # Slurm does not answer; workers that are queued go on
            return
        live = sum(task.live for task in known)
        missing = min(self.table.slurm.workers, len(self.outstanding)) - live
        if missing <= 0:
            return
        if live == 0 and self.fruitless >= MOST_FRUITLESS:
            last = max(known, key=lambda task: [int(n) for n in re.findall(r"\d+", task.name)], default="")
            reason = notice("slurm.no_workers", n=self.fruitless, last=str(last), log=self.root / "log")
            raise RunError(reason, "process", notice("advice.study_process"))
        submission = command("sbatch", *self._options(missing), str(self._script().absolute()))
        if submission.returncode == 0:
            self.submitted += missing
            self.fruitless += live == 0
        elif not self.submitted and not live:
            raise UserError(f"Slurm refused the workers: {error_line(submission)}")

    def _options(self, workers: int) -> list[str]:
        log = str((self.root / "log").absolute()).replace("%", "%%")
        Path(self.root / "log").mkdir(exist_ok=True)
        options = [f"--job-name={job_name(self.root)}", f"--array=0-{workers - 1}", "--requeue"]
        return [*options, "--open-mode=append", f"--output={log}/slurm-%A_%a.log"]

    def _script(self) -> Path:
        """The job script, and the code it starts from."""
        root, slurm = self.root.absolute(), self.table.slurm
        start = [sys.executable, "-m", "oelm", "work", str(root), "--idle", f"{slurm.idle}s"]
        # Most of the lead is for the runs to save, the rest for the worker to end.
        start += ["--patience", f"{max(1, slurm.lead * 4 // 5)}s"]
        start += [word for name in self.plugins for word in ("--plugin", name)]
        code = shlex.quote(str(snapshot(root / "slurm", list(self.plugins))))
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in sbatch_options(slurm)),
            f"export PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}} OELM_COMMIT={source_commit() or ''}",
            "export PYTHONSAFEPATH=1  # a package of that name in the current folder must not come first",
            *slurm.setup,
            f"exec {shlex.join(start)}",  # the signal before the time limit goes to this process
        ]
        path = root / "slurm" / "worker.sh"
        write_text(path, "\n".join(lines) + "\n")
        return path


def sbatch_options(slurm: SlurmConfig) -> list[str]:
    named = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time}
    named |= {"gpus": slurm.gpus, "cpus-per-task": slurm.cpus, "mem": slurm.memory}
    options = [f"--{name}={value}" for name, value in named.items() if value]
    return ["--nodes=1", "--ntasks=1", f"--signal=B:USR1@{slurm.lead}", *options, *slurm.extra]


def snapshot(folder: Path, plugins: list[str]) -> Path:
    """A copy of this package and of the plugins that are not installed; one folder for each state of them."""
    sources = [Path(__file__).parents[2]]
    for name in plugins:
        file = Path(str(sys.modules[name.partition(".")[0]].__file__))
        source = file.parent if file.name == "__init__.py" else file
        sources += [] if "site-packages" in source.parts else [source]
    digest = hashlib.sha256()
    for source in sources:
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(source.parent)}\0".encode() + path.read_bytes())
    code = folder / f"code-{digest.hexdigest()[:12]}"
    if not code.exists():
        with folder_beside(code) as beside:
            for source in sources:
                to = beside / source.name
                shutil.copytree(source, to, ignore=NOT_CODE) if source.is_dir() else shutil.copy(source, to)
            with contextlib.suppress(FileExistsError, OSError):  # another process was faster
                beside.rename(code)
    return code
