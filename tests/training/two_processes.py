"""Started by test_parallel with torchrun: trains the same run in several ways, in two processes.

Writes, for each, what kind of tensors the parameters are while it trains, and the names of the threads that
are left when Python ends. A run whose name ends in -again is the one without that, resumed from the
checkpoint of its middle.
"""

import atexit
import json
import shutil
import sys
from pathlib import Path

import torch

from oelm.config import rebuild_config
from oelm.data import open_store
from oelm.training import parallel
from oelm.training.loop import train

torch.set_num_threads(1)
root = Path(sys.argv[1])
wrap = parallel.wrap


def threads() -> list[str]:
    """The names of this process's threads, gloo's among them (Linux)."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]


def at_the_end() -> None:
    (root / "kinds" / f"threads-{rank}").write_text(json.dumps({"before": before, "at the end": threads()}))


atexit.register(at_the_end)  # first, so that it is called last
kinds: dict[str, list[str]] = {}


def watched(model, state, fsdp):  # type: ignore[no-untyped-def]
    wrapped = wrap(model, state, fsdp)
    kinds[current] = sorted({type(p).__name__ for p in model.parameters()} | {type(wrapped).__name__})
    return wrapped


parallel.wrap = watched
store = open_store(root / "store")
for path in sorted(root.glob("*.json"), key=lambda path: path.stem):
    current = path.stem
    if current.endswith("-again") and parallel.process_state().is_main_process:
        shutil.copytree(root / current.removesuffix("-again"), root / current)
        (root / current / "results.json").unlink()
        shutil.rmtree(root / current / "checkpoints" / "step-00000012")
    parallel.process_state().wait_for_everyone()
    train(rebuild_config(json.loads(path.read_text())), store, root / current, show=False)
(root / "kinds").mkdir(exist_ok=True)
rank, before = parallel.process_state().process_index, threads()
(root / "kinds" / f"{rank}").write_text(json.dumps(kinds))
