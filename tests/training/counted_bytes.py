"""Started by test_communication with torchrun: takes steps of every way, and counts bytes at each of them.

Counted per process: `reduced`, what goes into a reduction of gradients (DDP: its buckets; FSDP2: what is
reduced and scattered); `gathered`, the weights that FSDP2 gathers; `gradients` and `moments` that the process
holds. `trains` is the number of parameters that train, `all` that of all.
"""

import functools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from oelm.config import rebuild_config
from oelm.data import open_store
from oelm.models.build import build_model
from oelm.training import parallel
from oelm.training.resolve import objective_of, resolve_run
from oelm.training.step import make_step

torch.set_num_threads(1)
root = Path(sys.argv[1])
state, store, wrap = parallel.process_state(), open_store(root / "store"), parallel.wrap
counted = {"reduced": 0, "gathered": 0}
# FSDP2's collectives, by their newer and older names.
COLLECTIVES = {
    "reduced": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "gathered": ("all_gather_single", "all_gather_into_tensor"),
}


def counting_hook(group, bucket):  # type: ignore[no-untyped-def]
    counted["reduced"] += bucket.buffer().nbytes
    return allreduce_hook(group, bucket)


def counting_wrap(model, state, fsdp):  # type: ignore[no-untyped-def]
    wrapped = wrap(model, state, fsdp)
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(None, counting_hook)
    return wrapped


def counting(collective, quantity):  # type: ignore[no-untyped-def]
    """The collective, whose larger tensor is counted: that of all processes."""

    def count(*given, **named):  # type: ignore[no-untyped-def]
        tensors = [value for value in (*given, *named.values()) if isinstance(value, torch.Tensor)]
        counted[quantity] += max(tensor.nbytes for tensor in tensors)
        return collective(*given, **named)

    return count


def held(tensors) -> int:  # type: ignore[no-untyped-def]
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


def count_gradients(seen, optimizer, *_):  # type: ignore[no-untyped-def]
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    seen.append(held(p.grad for p in trained))


parallel.wrap = counting_wrap
for quantity, names in COLLECTIVES.items():
    for name in names:
        if hasattr(dist, name):
            setattr(dist, name, counting(getattr(dist, name), quantity))
steps = {}
for path in sorted(root.glob("*.json")):
    config = rebuild_config(json.loads(path.read_text()))
    objective = objective_of(config, store)
    resolved = resolve_run(config, objective, state.device, state.num_processes)
    raw, _ = build_model(resolved.config, store)
    step = make_step(resolved, objective, raw, state)
    step.model.train()
    gradients: list[int] = []
    step.optimizer.register_step_pre_hook(functools.partial(count_gradients, gradients))
    lines = []
    for number, (_, k, batches) in zip(range(resolved.total_steps), resolved.plan.schedule(0), strict=False):
        counted |= {"reduced": 0, "gathered": 0}
        step.take(number, batches, k)
        moments = [t for s in step.optimizer.state.values() for t in s.values() if t.dim()]
        sizes = {"all": raw.parameters(), "trains": [p for p in raw.parameters() if p.requires_grad]}
        numbers = {name: sum(p.numel() for p in part) for name, part in sizes.items()}
        lines.append(counted | numbers | {"gradients": gradients[-1], "moments": held(moments)})
    steps[path.stem] = lines
    step.close()
(root / f"counted-{state.process_index}").write_text(json.dumps(steps))
