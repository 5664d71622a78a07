"""Tokenising and batching the 25,000 IMDB training texts: ours beside Hugging Face's usual way.

    OELM_DATA_DIR=... OELM_TOKENIZER_DIR=... python benchmarks/data.py [--repeats 3]

Each arm runs in fresh processes, in turn: once for the times, and once more while this process watches its
memory every 10 ms (its resident set and its children's private pages, above the level after its imports).
GPT-2's tokenizer, at most 512
tokens, batches of 16 texts of similar length, padded to their own longest, as tensors. The peer is batched
`datasets.map` with the fast tokenizer, `LengthGroupedSampler` with the lengths given, and
`DataCollatorWithPadding`, with one and with two processes; we compare with whichever of them is better at
each thing measured. Writes benchmarks/data.json.

    OELM_DATA_DIR=... OELM_TOKENIZER_DIR=... python benchmarks/data.py --checksums [--repeats 3]

measures what it costs to open the prepared dataset for the first time in a process, which reads every file
and compares it with its checksum, and to open it again. Adds `checksums` to benchmarks/data.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, LENGTH = 16, 512
ARMS = ("oelm", "peer-1", "peer-2")


def run_oelm(folder: str) -> dict[str, Any]:
    import pyarrow.parquet  # noqa: F401  what preparing needs is part of the imports, not of the work
    import tokenizers  # noqa: F401
    from transformers import GPT2Tokenizer  # noqa: F401

    from oelm.data import Plan, load_file, padded_batch, prepare

    _ready()
    started = time.perf_counter()
    data = load_file(Path(os.environ["OELM_DATA_DIR"]) / "imdb" / "train.parquet")
    store = prepare(data, tokenizer="gpt2", max_length=LENGTH, cache=folder)
    tokenised = time.perf_counter() - started
    started, batches = time.perf_counter(), 0
    for epoch in range(20):
        for split in store.splits.values():  # together the 25,000 texts
            plan = Plan(split.lengths, batch_size=BATCH, seed=0).epoch(epoch)
            for step in range(len(plan)):
                padded_batch(split, plan.batch(step), store.pad_id)
            batches += len(plan)
    seconds = time.perf_counter() - started
    texts = sum(len(split) for split in store.splits.values())
    return {"texts": texts, "tokenise_s": tokenised, "batches_per_s": batches / seconds}


def run_peer(folder: str, processes: int) -> dict[str, Any]:
    import datasets
    from torch.utils.data import DataLoader
    from transformers import DataCollatorWithPadding, GPT2Tokenizer
    from transformers.trainer_pt_utils import LengthGroupedSampler

    datasets.disable_progress_bars()
    _ready()
    started = time.perf_counter()
    vocabulary = Path(os.environ["OELM_TOKENIZER_DIR"]) / "gpt2"
    tokenizer = GPT2Tokenizer(vocab=str(vocabulary / "vocab.json"), merges=str(vocabulary / "merges.txt"))
    tokenizer.pad_token = tokenizer.eos_token
    path = str(Path(os.environ["OELM_DATA_DIR"]) / "imdb" / "train.parquet")
    data = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=folder)

    def encode(rows: dict[str, list[Any]]) -> dict[str, Any]:
        found = tokenizer(rows["text"], truncation=True, max_length=LENGTH)
        found["length"] = [len(ids) for ids in found["input_ids"]]
        return found

    data = data.map(
        encode, batched=True, remove_columns=["text"], num_proc=processes if processes > 1 else None
    )
    lengths = list(data["length"])
    data = data.remove_columns("length")
    tokenised = time.perf_counter() - started
    loader = DataLoader(
        data,
        batch_size=BATCH,
        sampler=LengthGroupedSampler(BATCH, lengths=lengths),
        collate_fn=DataCollatorWithPadding(tokenizer),
        num_workers=processes if processes > 1 else 0,
    )
    started = time.perf_counter()
    batches = sum(1 for _ in loader)
    seconds = time.perf_counter() - started
    return {"texts": len(data), "tokenise_s": tokenised, "batches_per_s": batches / seconds}


def run_checksums(repeats: int) -> dict[str, Any]:
    """Each first opening is of a new copy, whose files are in memory already: the disk is not measured."""
    from oelm.data import load_file, open_store, prepare

    first, again = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = load_file(Path(os.environ["OELM_DATA_DIR"]) / "imdb" / "train.parquet")
        started = time.perf_counter()
        store = prepare(data, tokenizer="gpt2", max_length=LENGTH, cache=folder)
        tokenised = time.perf_counter() - started
        size = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
        for number in range(repeats):
            copy = shutil.copytree(store.folder, Path(folder) / str(number))
            for times in (first, again):
                started = time.perf_counter()
                open_store(copy)
                times.append(time.perf_counter() - started)
    middle = statistics.median(first)
    return {
        "what": "opening the prepared dataset: SHA-256 of every file, once in a process",
        "command": f"python benchmarks/data.py --checksums --repeats {repeats}",
        "hardware": _hardware(),
        "n": repeats,
        "bytes": size,
        "first_s": middle,
        "again_s": statistics.median(again),
        "gigabytes_per_s": size / middle / 1e9,
        "share_of_preparing": middle / tokenised,
        "runs": {"first_s": first, "again_s": again},
    }


def _write(record: dict[str, Any]) -> None:
    path = Path(__file__).with_suffix(".json")
    beside = path.with_suffix(".json.part")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def _ready() -> None:
    """Tell the watcher that the imports are done, and give it time to note the level."""
    print("ready", flush=True)
    time.sleep(0.5)


def _children(pid: int) -> list[int]:
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [process for child in found for process in (child, *_children(child))]


def _kilobytes(path: Path, *names: str) -> int:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:  # it has just ended
        return 0
    return sum(int(words[1]) for words in lines if words and words[0] in names)


def _memory(pid: int) -> int:
    """Bytes in memory: all of the process, and what its children do not share with anybody."""
    own = _kilobytes(Path(f"/proc/{pid}/status"), "VmRSS:")
    private = ("Private_Clean:", "Private_Dirty:")
    others = sum(_kilobytes(Path(f"/proc/{child}/smaps_rollup"), *private) for child in _children(pid))
    return 1024 * (own + others)


def measure(arm: str) -> dict[str, Any]:
    """Times from one process, the memory peak from another."""
    return run(arm, watched=False) | {"peak_bytes": run(arm, watched=True)["peak_bytes"]}


def run(arm: str, watched: bool) -> dict[str, Any]:
    """One arm in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, __file__, "--arm", arm, "--folder", folder], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            if process.poll() is not None:
                raise SystemExit(f"{arm} ended before it was ready")
        level = peak = _memory(process.pid)
        while watched and process.poll() is None:
            peak = max(peak, _memory(process.pid))
            time.sleep(0.01)
        answer = process.stdout.read()
        if process.wait():
            raise SystemExit(f"{arm} failed")
        return json.loads(answer) | {"peak_bytes": peak - level}


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    keys = ("tokenise_s", "batches_per_s", "peak_bytes")
    medians = {arm: {k: statistics.median(r[k] for r in found) for k in keys} for arm, found in runs.items()}
    ours, peers = medians["oelm"], [medians[arm] for arm in ARMS[1:]]
    ratios = {
        "batches_per_s": ours["batches_per_s"] / max(peer["batches_per_s"] for peer in peers),
        "peak_bytes": ours["peak_bytes"] / min(peer["peak_bytes"] for peer in peers),
        "tokenise_s": ours["tokenise_s"] / min(peer["tokenise_s"] for peer in peers),
    }
    return {
        "medians": medians,
        "ratios_to_the_better_peer": ratios,
        "wanted": {"batches_per_s": "at least 5", "peak_bytes": "at most 0.5"},
        "reached": {"batches_per_s": ratios["batches_per_s"] >= 5, "peak_bytes": ratios["peak_bytes"] <= 0.5},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--checksums", action="store_true", help="measure opening a prepared dataset")
    options = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    known = json.loads(path.read_text()) if path.exists() else {}
    if options.checksums:
        found = run_checksums(options.repeats)
        _write(known | {"checksums": found})
        print(json.dumps(found, indent=1))
        return
    if options.arm:
        found = (
            run_oelm(options.folder)
            if options.arm == "oelm"
            else run_peer(options.folder, int(options.arm[-1]))
        )
        print(json.dumps(found))
        return
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for _ in range(options.repeats):
        for arm in ARMS:
            runs[arm].append(measure(arm))
            print(arm, runs[arm][-1], file=sys.stderr)
    record = {
        "what": "25,000 IMDB training texts, GPT-2 tokenizer, max_length 512, batches of 16",
        "command": f"python benchmarks/data.py --repeats {options.repeats}",
        "hardware": _hardware(),
        "versions": _versions(),
        "n": options.repeats,
        **summary(runs),
        "runs": runs,
    }
    _write(record | {key: known[key] for key in ("checksums",) if key in known})
    print(
        json.dumps(
            {key: record[key] for key in ("medians", "ratios_to_the_better_peer", "reached")}, indent=1
        )
    )


def _hardware() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"cpu": names[0].split(":")[1].strip() if names else platform.machine(), "cores": os.cpu_count()}


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        name: version(name)
        for name in ("datasets", "tokenizers", "transformers", "torch", "numpy", "pyarrow")
    }


if __name__ == "__main__":
    main()
