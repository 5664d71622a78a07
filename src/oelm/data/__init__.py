"""Data: from a task's name or a user's file to batches, in five lines.

    data = load_task("imdb")                    # or load_file("my.csv", text="body", label="topic")
    store = prepare(data, tokenizer="gpt2")     # tokenised once, then cached; or open_store(folder)
    train = store["train"]
    plan = Plan(train.lengths, batch_size=16, seed=1)
    for epoch, step, batches in plan.schedule(start=0):
        batch = padded_batch(train, batches.share(step, rank, world), store.pad_id)   # or packed_batch

A corpus is read in windows: `windows = Windows(train, 512)`, `Plan(windows.lengths, batch_size=8, seed=1)`,
`windows.batch(share)`. An evaluation is a plan without a seed.

`load_*` and `prepare` need the whole installation; opening a store and making batches need only torch and
numpy, so a store can be made here and trained on elsewhere.
"""

from oelm.data.assemble import Windows, packed_batch, padded_batch
from oelm.data.batches import Epoch, Plan
from oelm.data.catalogue import TASKS
from oelm.data.preparation import Choice, prepare
from oelm.data.sources import load_file, load_task
from oelm.data.store import IGNORE, Split, Store, open_store

__all__ = ["IGNORE", "TASKS", "Choice", "Epoch", "Plan", "Split", "Store", "Windows"]
__all__ += ["load_file", "load_task", "open_store", "packed_batch", "padded_batch", "prepare"]
