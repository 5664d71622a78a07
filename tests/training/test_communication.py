"""What is frozen costs no reduction, no gradient and no optimizer state: bytes counted in two processes.

DDP reduces the gradients of all that trains. FSDP2 reduces and scatters the same gradients, and besides
gathers all weights, frozen ones too, in every pass: that is what freezing does not save.
"""

import json
from itertools import pairwise

import pytest

from benchmarks.cost_model import gathered_bytes, reduced_bytes
from oelm.config import make_config
from tests.training.processes import SCHEDULE, config, launch, make_store

LAYERS, WIDTH = 2, 128  # of gpt-tiny
QK = 4 * LAYERS * 2 * WIDTH * WIDTH  # bytes of the query and key weights of all layers, in float32
METHODS = {"baseline": {"method": {"name": "baseline"}}, "oelm": {}, "stages": SCHEDULE}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """By process, way and method: what was counted at every step."""
    root = tmp_path_factory.mktemp("communication")
    make_store(root)
    for way in ("ddp", "fsdp"):
        for name, values in METHODS.items():
            made = make_config(config(fsdp=way == "fsdp") | values)
            (root / f"{way}-{name}.json").write_text(json.dumps(made.to_dict()))
    launch(2, "counted_bytes.py", root)
    return [json.loads((root / f"counted-{number}").read_text()) for number in (0, 1)]


def saved(steps, quantity):
    """What `oelm` has less of than `baseline`: the same at every step."""
    differences = {b[quantity] - o[quantity] for b, o in zip(*steps, strict=True)}
    assert len(differences) == 1
    return differences.pop()


@pytest.mark.parametrize("process", [0, 1])
def test_ddp_saves_exactly_q_and_k(counted, process):
    steps = [counted[process][f"ddp-{name}"] for name in ("baseline", "oelm")]
    assert len(steps[0]) == 12
    assert saved(steps, "reduced") == saved(steps, "gradients") == QK
    assert saved(steps, "moments") == 2 * QK
    assert all(step["reduced"] == reduced_bytes(step["trains"]) for steps in steps for step in steps)
    assert all(step["all"] == step["trains"] for step in steps[0])


@pytest.mark.parametrize("process", [0, 1])
def test_fsdp2_saves_a_processs_share_of_them_and_no_gathering(counted, process):
    steps = [counted[process][f"fsdp-{name}"] for name in ("baseline", "oelm")]
    assert saved(steps, "reduced") == QK, "what a process puts into the reduction"
    assert saved(steps, "gradients") == QK // 2, "it keeps its half"
    assert saved(steps, "moments") == 2 * QK // 2
    assert saved(steps, "gathered") == 0, "frozen weights are gathered as all others are"
    blocks = LAYERS * (12 * WIDTH * WIDTH + 9 * WIDTH)
    assert all(step["gathered"] == gathered_bytes(step["all"], blocks) for step in steps[1])


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_through_the_stages_of_a_schedule(counted, way, process):
    """Only what trains at a step is reduced at it, has a gradient and moments."""
    steps, share = counted[process][f"{way}-stages"], 1 if way == "ddp" else 2
    assert [a["trains"] != b["trains"] for a, b in pairwise(steps)].count(True) == 3
    for step in steps:
        assert step["reduced"] == reduced_bytes(step["trains"])
        assert step["gradients"] == 4 * step["trains"] // share
        assert step["moments"] == 8 * step["trains"] // share
    assert len({step["gathered"] for step in steps}) == 1
