"""The runs that benchmarks/guard.py compares: made by whichever `oelm` is on PYTHONPATH, digested as JSON.

    PYTHONPATH=TREE/src python -P benchmarks/guard_runs.py TREE OUT.json [--runs cpu] [--only NAME ...]

Only surfaces that older trees have as well are used: `oelm train`, prepared data, and a run's folder. Data
and pretrained models are made here, from fixed seeds.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

WORDS = 600  # of the vocabulary; the first four are special
END, FIRST, SECOND, MARK = 0, 1, 2, 3

# For `oelm train`: "data" and "model" name what is made below, all other keys are those of --set. Sizes and
# learning rates are such that a model learns and rounding grows.
COMMON = {"training.lr": 1e-3, "training.seed": 3, "training.batch_size": 8, "method.name": "baseline"}
COMMON |= {"training.log_every": 1, "training.save_every": 0, "training.choose_on": "last"}
COMMON |= {"training.eval_every": 0}  # whatever a tree's default on the command line is
CPU: dict[str, dict[str, Any]] = {
    "baseline": {},
    "baseline, fast paths off": {"training.fast": False},
    "oelm, dropout, accumulation": {
        "method.name": "oelm",
        "model.dropout": 0.1,
        "model.attention_dropout": 0.1,
        "training.accumulate": 2,
    },
    "rotary positions, mean pooling, batches by tokens": {
        "method.name": "oelm-random",
        "model.positions": "rotary",
        "model.pooling": "mean",
        "training.batch_tokens": 256,
    },
    "value-only scores": {"method.name": "oelm-value-only"},
    "label smoothing, class weights": {
        "training.label_smoothing": 0.1,
        "training.class_weights": "balanced",
    },
    "layer decay, linear schedule": {"training.layer_decay": 0.7, "training.schedule": "linear"},
    "language model": {"data": "corpus", "method.name": "oelm"},
    "language model, value-only scores": {"data": "corpus", "method.name": "oelm-value-only"},
    "pairs from a CSV file": {"data": "pairs.csv", "task.text_pair": "other", "task.tokenizer": "train:300"},
    "BERT, pairs, oelm": {"data": "pairs", "model": "bert", "method.name": "oelm"},
    "GPT-2, language model, oelm": {"data": "corpus", "model": "gpt2", "method.name": "oelm"},
}
BF16, FP32 = {"training.precision": "bf16"}, {"training.precision": "fp32"}
GPU: dict[str, dict[str, Any]] = {
    "packed": BF16,
    "packed, oelm, dropout, accumulation": BF16
    | {"method.name": "oelm", "model.dropout": 0.1, "training.accumulate": 2},
    "packed, value-only scores": BF16 | {"method.name": "oelm-value-only"},
    "packed, fp32": FP32,
    "padded": BF16 | {"model.attention_dropout": 0.1},
    "fast paths off": BF16 | {"training.fast": False},
    "fast paths off, fp32": FP32 | {"training.fast": False},
    "language model": BF16 | {"data": "corpus"},
    "language model, rotary positions": BF16 | {"data": "corpus", "model.positions": "rotary"},
    "language model, value-only scores": BF16 | {"data": "corpus", "method.name": "oelm-value-only"},
    "language model, fp32": FP32 | {"data": "corpus"},
    "language model, fast paths off": BF16 | {"data": "corpus", "training.fast": False},
    "BERT, pairs, oelm": BF16 | {"data": "pairs", "model": "bert", "method.name": "oelm"},
}
RUNS = {"cpu": CPU, "gpu": GPU}
STEPS = {"cpu": 40, "gpu": 200}
MODEL = {"cpu": "gpt-tiny", "gpu": "gpt-medium-512"}
TEXTS = {"cpu": (4, 32), "gpu": (16, 128)}  # lengths
COUNTS = {"train": 320, "validation": 64, "test": 64}


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token=f"w{END}"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict.fromkeys(("eos_token", "bos_token", "unk_token", "pad_token"), f"w{END}")
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def write_store(folder: Path, kind: str, longest: int, splits: dict[str, dict[str, Any]]) -> None:
    """A prepared dataset, as `oelm.data.store` describes it, in the format of whichever tree reads it."""
    from oelm.data.manifest import FORMAT, seal

    folder.mkdir()
    word_tokenizer().save_pretrained(folder / "tokenizer")
    about = {}
    for split, columns in splits.items():
        for name, values in columns.items():
            np.save(folder / f"{split}.{name}.npy", values)
        lengths = np.diff(columns.get("offsets", np.zeros(2, np.int64)).astype(np.int64))
        about[split] = {
            "items": len(lengths), "tokens": len(columns["tokens"]), "bytes": 4 * len(columns["tokens"]),
            "truncated": 0, "longest": int(lengths.max()), "columns": sorted(columns),
        }  # fmt: skip
        if "labels" in columns:
            about[split]["class_counts"] = np.bincount(columns["labels"], minlength=3).tolist()
    store = {
        "format": FORMAT, "fingerprint": f"guard-{folder.name}", "task": folder.name, "kind": kind,
        "metric": "perplexity" if kind == "lm" else "accuracy", "max_length": longest, "warnings": [],
        "label_names": [] if kind == "lm" else ["a", "b", "c"], "pairs": False, "splits": about,
        "dropped": {}, "duplicates": {},
        "tokenizer": {"name": "made", "vocab_size": WORDS, "pad_id": END},
    }  # fmt: skip
    (folder / "store.json").write_text(json.dumps(seal(store, folder)))


def texts(rng: np.random.Generator, count: int, lengths: tuple[int, int], pairs: bool) -> dict[str, Any]:
    """Texts of frequent and rare words whose class is how often one word occurs in them."""
    sizes = rng.integers(*lengths, count, endpoint=True)
    labels = rng.choice(3, count, p=(0.5, 0.3, 0.2))
    rows, second = [], []
    for size, label in zip(sizes, labels, strict=True):
        row = np.minimum(4 + rng.zipf(1.3, size), WORDS - 1)
        row[rng.choice(size, label, replace=False)] = MARK
        row[0] = FIRST
        if pairs:
            row[size // 2] = SECOND
        rows.append(row)
        second.append(size // 2)
    columns = {
        "tokens": np.concatenate(rows).astype(np.uint16),
        "offsets": np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64),
        "labels": labels.astype(np.uint8),
        "ids": np.arange(count, dtype=np.uint32),
        "groups": np.arange(count, dtype=np.uint32),
    }
    return columns | ({"second": np.array(second, dtype=np.uint32)} if pairs else {})


def stream(rng: np.random.Generator, count: int) -> dict[str, Any]:
    """A stream in which a word often decides the next."""
    fresh = np.minimum(4 + rng.zipf(1.3, count), WORDS - 1)
    copied = rng.random(count) < 0.5
    tokens = fresh.copy()
    for i in range(1, count):
        if copied[i]:
            tokens[i] = 4 + tokens[i - 1] * 7 % (WORDS - 4)
    tokens[0] = END
    return {"tokens": tokens.astype(np.uint16), "documents": np.array([1], dtype=np.uint64)}


def make_inputs(folder: Path, lengths: tuple[int, int]) -> None:
    """Datasets, a CSV file, and checkpoints with random weights."""
    import torch
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    rng = np.random.default_rng(0)
    for name in ("texts", "pairs"):
        splits = {split: texts(rng, count, lengths, name == "pairs") for split, count in COUNTS.items()}
        write_store(folder / name, "classification", lengths[1], splits)
    write_store(
        folder / "corpus", "lm", lengths[1], {split: stream(rng, 40 * n) for split, n in COUNTS.items()}
    )
    with (folder / "pairs.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "other", "label"])
        for i in range(300):
            words = [" ".join(f"w{word}" for word in rng.integers(4, 80, rng.integers(2, 12))) for _ in "ab"]
            table.writerow([f"{words[0]} {('good', 'bad')[i % 2]}", words[1], ("yes", "no")[i % 2]])
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    bert = BertConfig(vocab_size=WORDS + 60, **sizes, pad_token_id=END)
    BertModel(bert).save_pretrained(folder / "bert")
    ids = {"bos_token_id": END, "eos_token_id": END, "vocab_size": WORDS}
    gpt2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **ids)
    GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    for name in ("bert", "gpt2"):
        word_tokenizer().save_pretrained(folder / name)


def one_run(values: dict[str, Any], inputs: Path, out: Path, length: int) -> dict[str, Any]:
    """The digest of `oelm train` with these values, or why it could not be made."""
    try:
        from oelm.cli.main import app
    except ImportError:  # an older tree
        from oelm.cli import app

    values = dict(values)
    data = values.pop("data", "texts")
    model = values.pop("model")
    model = str(inputs / model) if (inputs / model).exists() else model
    if "training.batch_tokens" in values:
        del values["training.batch_size"]
    words = ["train", "--data", str(inputs / data), "--model", model, "--out", str(out)]
    for key, value in ({"task.max_length": length} | values).items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            app(words, standalone_mode=False)
    except Exception as error:  # an older tree may not know a setting
        return {"failed": f"{type(error).__name__}: {error}"}
    return digest(out)


def digest(run: Path) -> dict[str, Any]:
    """All that a run computed: numbers as they are, tensors and predictions as hashes."""
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = load_file(run / "model" / "model.safetensors")
    with np.load(run / "predictions.npz") as arrays:
        predictions = {name: _hash(_narrow(arrays[name])) for name in arrays.files}
    return {
        "steps": {
            str(line["step"]): {key: line[key] for key in ("loss", "grad_norm", "lr")}
            for line in lines
            if line["kind"] == "train"
        },
        "evaluations": {str(line["step"]): line["metrics"] for line in lines if line["kind"] == "eval"},
        "weights": {name: _hash(_bytes(value)) + str(value.dtype) for name, value in sorted(weights.items())},
        "predictions": predictions,
        "paths": json.loads((run / "results.json").read_text()).get("paths"),
    }


def _bytes(tensor: Any) -> np.ndarray:
    """The same memory as an array: numpy has no bfloat16."""
    import torch

    return tensor.contiguous().view(torch.uint8).numpy()


def _narrow(values: np.ndarray) -> np.ndarray:
    """In one type, whichever a version stores: the smallest that any did, for numbers that are not whole."""
    return values.astype(np.float16 if values.dtype.kind == "f" else np.int64)


def _hash(array: np.ndarray) -> str:
    about = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(about + np.ascontiguousarray(array).tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="the source tree whose src is on PYTHONPATH")
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", choices=RUNS, default="cpu")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--model")
    options = parser.parse_args()

    import torch

    import oelm

    if not Path(oelm.__file__).is_relative_to(options.tree.resolve()):
        raise SystemExit(
            f"oelm comes from {oelm.__file__}, not from {options.tree}: put its src first on PYTHONPATH"
        )
    kind, steps = options.runs, options.steps or STEPS[options.runs]
    if kind == "cpu":
        torch.set_num_threads(1)  # how many share a sum decides its order
    base = COMMON | {"model": options.model or MODEL[kind], "training.steps": steps}
    base |= {"training.eval_every": max(1, steps // 2)}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OELM_CACHE_DIR"] = str(Path(folder) / "cache")
        inputs = Path(folder) / "inputs"
        inputs.mkdir()
        make_inputs(inputs, TEXTS[kind])
        for number, (name, values) in enumerate(RUNS[kind].items()):
            if not options.only or name in options.only:
                out = Path(folder) / str(number)
                found[name] = one_run(base | values, inputs, out, TEXTS[kind][1])
                shutil.rmtree(out, ignore_errors=True)
                beside = options.out.with_suffix(".part")
                beside.write_text(json.dumps(found))
                beside.replace(options.out)  # whoever runs out of patience finds what there is


if __name__ == "__main__":
    main()
