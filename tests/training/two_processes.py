"""Started by test_parallel with torchrun: trains the same run in several ways, in two processes.

Prints, for each, what kind of tensors the parameters are while it trains. A run whose name ends in -again is
the one without that, resumed from the checkpoint of its middle.
"""

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
(root / "kinds" / f"{parallel.process_state().process_index}").write_text(json.dumps(kinds))
