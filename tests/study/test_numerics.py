"""The numerics version: twenty fixed steps whose losses may move only together with the number.

The stored losses come from another machine and are compared loosely, as instruction sets alone move them by
1e-5; bit for bit, tests/test_guard.py compares with the commit that last raised the number on this machine.
After a deliberate change: raise NUMERICS in src/oelm/version.py, then `python -m tests.study.test_numerics`.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from oelm.config import make_config
from oelm.data import Store, load_task, open_store, prepare
from oelm.system.version import NUMERICS
from oelm.training.loop import train
from tests.data.made import parquet, sentence
from tests.training.runs import make_store

KNOWN = Path(__file__).with_name("numerics.json")
# CPUs order their sums differently; twenty steps carry that to some 1e-6.
CLOSE = 1e-4
RUNS = {
    "baseline": {"method": {"name": "baseline"}, "model": {"name": "gpt-tiny"}},
    "oelm, dropout, accumulation": {
        "method": {"name": "oelm"},
        "model": {"name": "gpt-tiny", "dropout": 0.1, "attention_dropout": 0.1},
        "training": {"accumulate": 2},
    },
    "oelm-random, rotary positions": {
        "method": {"name": "oelm-random"},
        "model": {"name": "gpt-tiny", "positions": "rotary"},
    },
    "language model, oelm": {"method": {"name": "oelm"}, "model": {"name": "gpt-tiny"}},
}


def corpus(folder: Path) -> Store:
    rng = random.Random(0)
    for split, lines in (("train", 400), ("validation", 40), ("test", 40)):
        texts = [sentence(rng, 5, 20) for _ in range(lines)]
        parquet(folder / "data" / "wikitext-2-raw" / f"{split}.parquet", text=texts)
    dataset = load_task("wikitext-2", data_dir=folder / "data")
    return prepare(dataset, tokenizer="train:300", max_length=32, cache=folder / "cache")


def losses(folder: Path) -> dict[str, list[float]]:
    texts, windows = open_store(make_store(folder)), corpus(folder)
    found = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number, (name, values) in enumerate(RUNS.items()):
            store = windows if name.startswith("language") else texts
            training = {"lr": 1e-3, "steps": 20, "batch_size": 8, "log_every": 1, "seed": 3, "test": False}
            config = make_config(
                {
                    "task": {"data": str(store.folder), "max_length": 32},
                    **values,
                    "training": training | values.get("training", {}),
                }
            )
            out = folder / str(number)
            train(config, store, out, show=False)
            lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
            found[name] = [round(line["loss"], 7) for line in lines if line["kind"] == "train"]
    finally:
        torch.set_num_threads(threads)
    return found


def test_losses_move_only_with_the_numerics_version(tmp_path):
    known = json.loads(KNOWN.read_text())
    assert known["numerics"] == NUMERICS, "store this version's losses: see the head of this file"
    assert losses(tmp_path) == {
        name: pytest.approx(values, rel=CLOSE) for name, values in known["losses"].items()
    }, "the losses moved: if that is meant, raise NUMERICS; see the head of this file"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        KNOWN.write_text(json.dumps({"numerics": NUMERICS, "losses": losses(Path(folder))}, indent=1) + "\n")
    sys.exit(0)
