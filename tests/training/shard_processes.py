"""Started by test_shards with torchrun: trains the runs that are named, each as ROOT/NAME.json says.

Every process writes which stored tensors it read whole. With FAULT=kill the second process kills itself when
it is about to write its fourth shard, with FAULT=full its disk is full then.
"""

import errno
import json
import os
import signal
import sys
from pathlib import Path

import torch

from oelm.config import rebuild_config
from oelm.data import open_store
from oelm.training import parallel, shards
from oelm.training.loop import train

torch.set_num_threads(1)
root, names = Path(sys.argv[1]), sys.argv[2:]
state = parallel.process_state()
whole: set[str] = set()
read, save_file, written = shards.StoredTensors.__getitem__, shards.save_file, []


def watched(self, name):  # type: ignore[no-untyped-def]
    whole.add(name.rpartition("/")[2])
    return read(self, name)


def deadly(tensors, path, metadata):  # type: ignore[no-untyped-def]
    written.append(path)
    if state.process_index == 1 and len(written) == 4 and "FAULT" in os.environ:
        if os.environ["FAULT"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, "No space left on device")
    save_file(tensors, path, metadata)


shards.StoredTensors.__getitem__, shards.save_file = watched, deadly  # type: ignore[method-assign]
for name in names:
    train(
        rebuild_config(json.loads((root / f"{name}.json").read_text())),
        open_store(root / "store"),
        root / name,
        show=False,
    )
(root / f"whole-{state.num_processes}-{state.process_index}.json").write_text(json.dumps(sorted(whole)))
