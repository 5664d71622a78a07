"""The status of runs: how far they are and the time left, read from their folders without changing them."""

import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.config import read_toml
from oelm.errors import UserError
from oelm.system.files import lock_file, read_object
from oelm.system.messages import read_notice
from oelm.training.folder import read_entry

TAIL = 1 << 16  # bytes from the end of metrics.jsonl: many lines more than are needed


@dataclass(frozen=True)
class RunStatus:
    """One run: running, completed, interrupted, failed, unfinished (killed: start it again) or unreadable."""

    folder: str
    status: str
    task: str
    method: str
    seed: int
    step: int
    of: int
    loss: float | None
    metric: str | None
    best: float | None
    left_s: float | None
    reason: str | None


def find_runs(roots: list[Path]) -> list[Path]:
    """Every run at or below these folders, sorted; a lock marks one of this machine, results any other."""
    runs = []
    for root in roots:
        if not root.exists():
            raise UserError(f"{root}: no such folder")
        one = root / "config.toml"
        for path in [one] if one.is_file() else sorted(root.rglob("config.toml")):
            folder = path.parent
            is_run = (folder / "lock").exists() or (folder / "results.json").exists()
            half_copied = any(part.startswith(".") for part in folder.relative_to(root).parts)
            if is_run and not half_copied:
                runs.append(folder)
    return runs


def run_status(folder: Path) -> RunStatus:
    """The state of one run; one damaged record must not hide the other runs."""
    try:
        return _run_status(folder)
    except UserError as error:
        why = str(error)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:  # of another kind
        why = f"a record in {folder} is damaged ({type(error).__name__}: {error})"
    return RunStatus(str(folder), "unreadable", "?", "?", 0, 0, 0, None, None, None, None, why)


def _run_status(folder: Path) -> RunStatus:
    config = read_toml(folder / "config.toml")
    task = config.get("task", {})
    results = read_object(folder / "results.json") if (folder / "results.json").exists() else {}
    lines = tail(folder / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "train" and {"step", "of", "loss"} <= line.keys()]
    evals = [line for line in lines if line["kind"] == "eval" and isinstance(line.get("metrics"), dict)]
    last: dict[str, Any] = steps[-1] if steps else {"step": 0, "of": 0, "loss": None, "train_time_s": 0.0}
    running = is_locked(folder)
    status = "running" if running else str(results.get("status", "unfinished"))
    left = None
    if running and len(steps) > 1 and last["step"] > steps[0]["step"]:
        rate = (last["train_time_s"] - steps[0]["train_time_s"]) / (last["step"] - steps[0]["step"])
        left = max(0.0, rate) * (last["of"] - last["step"])
    best = (results.get("best") or (evals[-1] if evals else {})).get("metrics", {})
    metric = results.get("metric") or next((m for m in ("accuracy", "perplexity", "f1") if m in best), None)
    score, loss = best.get(metric), last["loss"]
    return RunStatus(
        folder=str(folder),
        status=status,
        task=str(results.get("task") or Path(str(task.get("name") or task.get("data"))).stem),
        method=str(config.get("method", {}).get("name", "?")),
        seed=int(config.get("training", {}).get("seed", 0)),
        step=int(results.get("steps", last["step"]) if not running else last["step"]),
        of=int(results.get("steps_planned", last["of"]) if not running else last["of"]),
        loss=None if loss is None else float(loss),
        metric=metric,
        best=None if score is None else float(score),
        left_s=left,
        reason=str(read_notice(results["reason"])) if "reason" in results else None,
    )


def tail(path: Path) -> list[dict[str, Any]]:
    """The last lines of a metrics file; one that is being written is left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        raw = file.read().decode("utf-8", "replace").splitlines()
    # The first may be cut by the seek, the last by the writer.
    return [entry for line in raw if (entry := read_entry(line)) is not None]


def is_locked(folder: Path) -> bool:
    try:
        if (folder / "lock").exists():  # to ask for it would make it
            lock_file(folder / "lock").close()
    except BlockingIOError:
        return True
    except (OSError, UserError):
        pass
    return False


def gpu_use() -> list[str]:
    """A line for every GPU: how busy it is, and its memory; nothing without nvidia-smi."""
    program, lines = shutil.which("nvidia-smi"), []
    if program is None:
        return []
    query = ["--query-gpu=index,name,utilization.gpu,memory.used,memory.total"]
    with suppress(OSError, subprocess.SubprocessError):
        command = [program, *query, "--format=csv,noheader,nounits"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10)
        for line in asked.stdout.splitlines():
            with suppress(ValueError):  # "[N/A]", or an error message
                index, name, busy, used, total = (part.strip() for part in line.split(","))
                memory = f"{int(used) / 1024:.1f} of {int(total) / 1024:.1f} GiB"
                lines.append(f"GPU {index} ({name}): {int(busy)} % busy, {memory}")
    return lines
