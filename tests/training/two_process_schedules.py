"""Started by test_schedules with torchrun: every schedule in two processes, by DDP and by FSDP2.

Each is trained whole, then resumed from the step before its last border and from the border itself; all are
audited, and some steps later the resumed ones must have the bits of the whole one. Writes the losses, by way
and schedule.
"""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import oelm
from oelm.data import open_store
from oelm.training.parallel import process_state, total
from oelm.training.step import PlainStep
from tests.training.test_schedules import SCHEDULES, TOTAL, equal, run, start

torch.set_num_threads(1)
root, state, losses = Path(sys.argv[1]), process_state(), {}
store = open_store(root / "store")
for way in ("ddp", "fsdp"):
    for name, method in SCHEDULES.items():
        made = {"kind": PlainStep, "dropout": 0.0, "fsdp": way == "fsdp"}
        whole, before = start(store, method, **made)
        assert isinstance(whole.model, DistributedDataParallel) == (way == "ddp"), way
        assert all(isinstance(p, DTensor) for p in whole.parameters) == (way == "fsdp"), way
        border = whole.freezing.timeline.borders[-1]
        later = min(border + 4, TOTAL)
        kept = run(whole, saves={border - 1, border, later})
        oelm.audit(whole.raw, before)
        for number in (border - 1, border):
            step, before = start(store, method, **made)
            step.restore(kept[number])
            oelm.audit(step.raw, before)
            assert run(step, number, later)["losses"] == kept["losses"][number:later], (way, name, number)
            model, moments = step.capture()
            assert equal(model, kept[later].model) and equal(moments, kept[later].optimizer), (way, name)
            oelm.audit(step.raw, before)
        losses[f"{way} {name}"] = [total(loss, state) for loss in kept["losses"]]
if state.is_main_process:
    (root / "losses.json").write_text(json.dumps(losses))
state.destroy_process_group()
