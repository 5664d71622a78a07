"""Predicting the labels of many reviews: `oelm predict` beside `transformers.pipeline` in its best setting.

    OELM_TOKENIZER_DIR=... python benchmarks/predict.py --texts reviews.jsonl --json benchmarks/predict.json

`--texts` has one JSON string per line; without it, texts are made. Weights are random. Two models: the
reference GPT (ours) beside a GPT-2 classifier of the same size (pipeline), and one BERT checkpoint for both.
The pipeline gets the texts sorted by length, in bf16 on a GPU, with SDPA; its batch size and its number of
workers are those of `--batch-sizes` and `--workers` that are fastest on some of the texts. Then all arms in
turn, every other round in reverse order: all texts in a process that has loaded both models and warmed them
up (tokenising included, answers in the order of the texts), and all texts by a command, from its start to
its last line of JSON: `oelm predict`, and a script of the pipeline (`--peer`). Tokenising and computing are
timed alone as well. Ratios are of medians over rounds. Where OELM_TOKENIZER_DIR has no gpt2 or
bert-base-uncased, tokenizers are learned from the texts.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LEARNED = "learned from the texts"
NAMES = {"gpt": "gpt2", "bert": "bert-base-uncased"}
BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
TINY_BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
PARALLELISM = "TOKENIZERS_PARALLELISM"
LABELS = {0: "negative", 1: "positive"}


def made_texts(count: int) -> list[str]:
    """Texts of words, as long as film reviews are."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er", "ing")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(8_000)]
    weights = [1 / (rank + 2.7) for rank in range(len(words))]
    lengths = [max(1, int(rng.lognormvariate(5.2, 0.6))) for _ in range(count)]
    return [" ".join(rng.choices(words, weights, k=length)) for length in lengths]


def read_texts(path: Path | None, count: int) -> list[str]:
    """One line each: what `oelm predict` reads."""
    if path is None:
        return made_texts(count)
    with path.open() as file:
        texts = [" ".join(json.loads(line).split()) for line in file if line.strip()]
    return [text for text in texts if text][:count]


def make_tokenizer(kind: str, texts: list[str]) -> tuple[str, Any]:
    """Its name, and the tokenizer."""
    from oelm.data.tokenizer import load_tokenizer, train_tokenizer

    given = os.environ.get("OELM_TOKENIZER_DIR")
    if given and Path(given, NAMES[kind]).is_dir():
        tokenizer = load_tokenizer(NAMES[kind])
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return NAMES[kind], tokenizer
    if kind == "gpt":
        return LEARNED, train_tokenizer(texts, 8192)
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    learned = BertWordPieceTokenizer(lowercase=True)
    learned.train_from_iterator(texts, 8192, show_progress=False)
    return LEARNED, BertTokenizer(vocab=learned.get_vocab())


def make_models(kind: str, tokenizer: Any, tiny: bool, folder: Path) -> tuple[Path, Path]:
    """Saved models of random weights: ours, and the pipeline's."""
    import transformers

    from oelm.models.gpt import OelmGPTForSequenceClassification
    from oelm.models.gpt_config import gpt_config

    torch.manual_seed(0)
    shared = {"vocab_size": len(tokenizer), "id2label": LABELS, "pad_token_id": tokenizer.pad_token_id}
    models: dict[str, Any] = {}
    if kind == "bert":
        config = transformers.BertConfig(**(TINY_BERT if tiny else BERT), **shared)
        models["both"] = transformers.BertForSequenceClassification(config)
    else:
        size = gpt_config("gpt-tiny" if tiny else "gpt-medium-512", **shared)
        models["ours"] = OelmGPTForSequenceClassification(size)
        sizes = {"n_embd": size.d_model, "n_layer": size.num_layers, "n_head": size.num_heads}
        sizes |= {"n_inner": size.d_ff, "n_positions": size.max_position_embeddings}
        config = transformers.GPT2Config(**sizes, **shared)
        models["pipeline"] = transformers.GPT2ForSequenceClassification(config)
    for name, model in models.items():
        model.save_pretrained(folder / kind / name)
        tokenizer.save_pretrained(folder / kind / name)
    folders = [folder / kind / name for name in models]
    return folders[0], folders[-1]


def make_pipeline(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    gpu = torch.cuda.is_available()
    options = {"dtype": torch.bfloat16 if gpu else torch.float32, "attn_implementation": "sdpa"}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return pipeline("text-classification", model=model, tokenizer=tokenizer, device=0 if gpu else "cpu")


def classify(pipe: Any, texts: list[str], batch: int, workers: int, length: int) -> list[dict[str, Any]]:
    """The pipeline's answers in the order of the texts, which it gets sorted."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    options = {"batch_size": batch, "num_workers": workers, "truncation": True, "max_length": length}
    before = os.environ.get(PARALLELISM)
    with torch.inference_mode():
        found = pipe([texts[i] for i in order], **options)
    if before is None:  # with workers it turns the tokenizers' threads off, for all arms and their commands
        os.environ.pop(PARALLELISM, None)
    answers: list[Any] = [None] * len(texts)
    for i, answer in zip(order, found, strict=True):
        answers[i] = answer
    return answers


def run_peer(folder: str, lines: str, batch: int, workers: int, length: int) -> None:
    """What a user of the pipeline would write: lines in, JSON out."""
    texts = Path(lines).read_text().splitlines()
    answers = classify(make_pipeline(Path(folder)), texts, batch, workers, length)
    for text, answer in zip(texts, answers, strict=True):
        print(json.dumps({"text": text, **answer}, ensure_ascii=False))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def best_setting(pipe: Any, texts: list[str], settings: list[tuple[int, int]], length: int) -> list[Any]:
    """Every setting with its texts/s, the fastest first; one that fails says why."""
    found = []
    for batch, workers in settings:
        entry: dict[str, Any] = {"batch_size": batch, "workers": workers}
        try:
            classify(pipe, texts[: 2 * batch], batch, workers, length)  # not counted
            seconds, _ = timed(lambda b=batch, w=workers: classify(pipe, texts, b, w, length))
            found.append(entry | {"texts_per_s": len(texts) / seconds})
        except RuntimeError as error:  # memory
            found.append(entry | {"texts_per_s": 0.0, "failed": str(error).splitlines()[0]})
            torch.cuda.empty_cache()
    return sorted(found, key=lambda entry: -entry["texts_per_s"])


def command(*words: Any) -> Any:
    """Run a command to its end; RuntimeError where it fails."""
    with open(os.devnull, "w") as nowhere:
        line = [sys.executable, *map(str, words)]
        done = subprocess.run(line, stdout=nowhere, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-500:]}")


def parts(trained: Any, texts: list[str]) -> dict[str, float]:
    """Tokenising alone, and computing alone what is tokenised, in texts/s."""
    from oelm.inference.prediction import outputs_of
    from oelm.inference.trained import reader_of

    reader = reader_of(trained.model)(trained.model, trained.tokenizer, trained.max_length)
    encoding, items = timed(lambda: reader.encode(texts))
    computing, _ = timed(lambda: outputs_of(reader, items, trained.precision))
    rates = {"tokenise": len(texts) / encoding, "compute": len(texts) / computing}
    return rates | {"tokens_per_text": float(items.lengths.mean())}


def in_turn(
    arms: dict[str, Callable[[], Any]], rounds: int, after: Callable[[], None]
) -> tuple[dict[str, list[float]], dict[str, Any], dict[str, str]]:
    """The arms' seconds, what they returned last, and why those failed that did."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    last: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for arm in list(arms)[:: 1 if number % 2 == 0 else -1]:
            if arm not in failed:
                try:
                    spent, last[arm] = timed(arms[arm])
                    seconds[arm].append(spent)
                    tell(f"round {number + 1}, {arm}: {spent:.2f} s")
                except RuntimeError as error:
                    failed[arm] = str(error)
                    tell(f"{arm} failed: {error}")
        after()
    return seconds, last, failed


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(kind: str, texts: list[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from oelm.inference.trained import Trained

    name, tokenizer = make_tokenizer(kind, texts)
    ours, theirs = make_models(kind, tokenizer, options.tiny, folder)
    lines = folder / "lines.txt"
    lines.write_text("".join(text + "\n" for text in texts))
    trained, pipe = Trained(ours), make_pipeline(theirs)
    length, some = trained.max_length, random.Random(1).sample(texts, min(options.some, len(texts)))
    list(trained.predict(some))  # kernels are compiled
    settings = [(batch, workers) for batch in options.batch_sizes for workers in options.workers]
    tried = best_setting(pipe, some, settings, length)
    chosen = (tried[0]["batch_size"], tried[0]["workers"], length)
    tell(f"{kind}: the pipeline is fastest with {tried[0]}")
    arms: dict[str, Callable[[], Any]] = {
        "ours": lambda: list(trained.predict(texts)),
        "pipeline": lambda: classify(pipe, texts, *chosen),
        "oelm predict": lambda: command("-m", "oelm", "predict", ours, lines),
        "pipeline script": lambda: command(__file__, "--peer", theirs, lines, *chosen),
    }
    alone: list[dict[str, float]] = []
    seconds, said, failed = in_turn(arms, options.rounds, lambda: alone.append(parts(trained, texts)))
    median = {arm: statistics.median(values) for arm, values in seconds.items() if values}
    ratios = {"warm": ("pipeline", "ours"), "command": ("pipeline script", "oelm predict")}
    case = {
        "model": kind, "tokenizer": name, "precision": trained.precision, "max_length": length,
        "pipeline_settings": tried, "seconds": seconds, "failed": failed,
        "texts_per_s": {arm: len(texts) / value for arm, value in median.items()},
        "alone": {name: statistics.median(one[name] for one in alone) for name in alone[0]},
        "ratio": {name: median[a] / median[b] for name, (a, b) in ratios.items() if {a, b} <= set(median)},
    }  # fmt: skip
    if kind == "bert" and {"ours", "pipeline"} <= set(said):  # the same weights
        pairs = zip(said["ours"], said["pipeline"], strict=True)
        same = [abs(a["score"] - b["score"]) for a, b in pairs if a["label"] == b["label"]]
        case |= {"same_label": len(same) / len(texts), "largest_difference": max(same, default=None)}
    return case


def table(record: dict[str, Any]) -> str:
    """Markdown: one row per model."""
    arms = ["ours", "pipeline", "oelm predict", "pipeline script"]
    head = ["model", *arms, "warm", "command", "tokenise alone", "compute alone"]
    rows = [head, ["---"] * len(head)]
    for case in record["cases"]:
        rates = [case["texts_per_s"].get(arm) for arm in arms]
        rates += [case["ratio"].get(name) for name in ("warm", "command")]
        rates += [case["alone"][name] for name in ("tokenise", "compute")]
        cells = ["failed" if rate is None else f"{rate:,.{2 if rate < 100 else 0}f}" for rate in rates]
        rows.append([case["model"], *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--count", type=int, default=25_000)
    parser.add_argument("--models", default="gpt,bert")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", default="32,64,128,256,512")
    parser.add_argument("--workers", default=f"0,{min(8, os.cpu_count() or 1)}")
    parser.add_argument("--some", type=int, default=4_000, help="texts for choosing the pipeline's setting")
    parser.add_argument("--tiny", action="store_true", help="models for a test")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", nargs=5, metavar="...", help="the script of the pipeline")
    options = parser.parse_args()
    if options.peer:
        folder, lines, *numbers = options.peer
        run_peer(folder, lines, *map(int, numbers))
        return
    from oelm.training.folder import environment

    options.batch_sizes = [int(size) for size in options.batch_sizes.split(",")]
    options.workers = list(dict.fromkeys(int(number) for number in options.workers.split(",")))
    texts = read_texts(options.texts, options.count)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]), "environment": environment(device, 1),
        "texts": {"source": "made" if options.texts is None else options.texts.name, "count": len(texts),
                  "characters": sum(map(len, texts))},
        "unit": "texts per second, medians over rounds", "rounds": options.rounds, "cases": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.models.split(","):
            record["cases"].append(measure(kind, texts, options, Path(folder)))
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
