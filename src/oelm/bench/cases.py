"""The benchmark's cases for each kind of work, and the arms of each case, on the same texts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from oelm.bench import load
from oelm.bench.arms import HuggingFaceTrainer, Ours, language_loop, original
from oelm.bench.load import Case
from oelm.bench.measure import Arm
from oelm.data import Store, open_store
from oelm.errors import UserError
from oelm.models.gpt_sizes import PRESETS, size_name

WORKS = ("classification", "lm", "freezing")  # of the reference GPT: what "all" stands for
OTHERS = ("freezing", "pretrained")  # of other models
KNOWN = (*WORKS, "large", "pretrained")
SAVINGS = ("freezing", "large")  # works in which methods are compared with one another
DOUBLINGS = 4  # lengths of the work "large", from `max_length` on
METHODS = ("baseline", "oelm", "oelm-value-only")
ARMS = (
    "ours", "hf-trainer", "hf-trainer-compiled", "original", "hf-lm", "hf-lm-compiled",
    "nanogpt", *METHODS,
)  # fmt: skip
FEWER = 5  # how many times fewer steps are timed if they are large, or all cost the same


@dataclass(frozen=True)
class Settings:
    """The settings from the command line."""

    work: tuple[str, ...]
    size: str
    data: tuple[str, ...]
    batch_size: int
    tokens_per_step: int
    steps: int
    rounds: int
    max_length: int
    vocab_size: int
    leave_out: tuple[str, ...]
    compile: bool
    stop_after: float | None

    def __post_init__(self) -> None:
        gpt = size_name(self.size) in PRESETS
        if not self.work or not set(self.work) <= set(KNOWN):
            raise UserError(
                f"--work {','.join(self.work)}: no such work; there are {', '.join(KNOWN)} and all"
            )
        if gpt and "pretrained" in self.work:
            raise UserError("--work pretrained needs a model's folder: --size my-bert")
        if not gpt and not set(self.work) <= set(OTHERS):
            raise UserError(
                f"--size {self.size}: peers are of the reference GPT's sizes ({', '.join(PRESETS)}); "
                f"other models take --work {' or '.join(OTHERS)}"
            )
        if not gpt and not Path(self.size, "config.json").is_file():
            raise UserError(f"--size {self.size} is neither a size of the reference GPT nor a model's folder")
        for name in self.leave_out:
            if name not in ARMS:
                raise UserError(f"--leave-out {name}: no such arm; there are {', '.join(ARMS)}")
        if self.tokens_per_step < self.max_length and self.work != ("classification",):
            raise UserError(
                f"--tokens-per-step {self.tokens_per_step} is less than one text of --max-length "
                f"{self.max_length}; ask for more tokens, or for shorter texts"
            )


Maker = Callable[[], Arm]


def make_cases(settings: Settings, device: torch.device) -> Iterator[Case]:
    """The requested cases, in order; the data of each is made or read when it is due."""
    stores = [open_store(folder) for folder in settings.data]
    for folder, store in zip(settings.data, stores, strict=True):
        if store.kind not in ("classification", "lm"):
            raise UserError(f"{folder} is for {store.kind}; the benchmark knows classification and lm")
    for work in settings.work:
        for name, store, batch, length in _DATA[work](settings, stores):
            case = Case(work, name, store, settings.size, batch, length, device)
            yield case
            if work == "large":
                yield replace(case, name=f"{name}, checkpointed", checkpointing=True)


# The name, the texts, the batch size and the longest text of each case.
Data = Iterator[tuple[str, Store, int, int]]


def _classification(settings: Settings, stores: list[Store]) -> Data:
    texts, longest = settings.steps * settings.batch_size, settings.max_length
    samples = [load.sample_texts(store, texts) for store in stores if store.kind == "classification"]
    if not stores:
        other = load.other_model(settings.size)
        words = other.vocab_size if other else settings.vocab_size
        lengths = {kind: load.made_lengths(kind, texts, longest) for kind in load.MADE_LENGTHS}
        samples = [load.made_texts(f"made-{kind}", n, words, longest) for kind, n in lengths.items()]
    for sample in samples:
        yield sample.task, sample, settings.batch_size, sample.max_length


def _language(settings: Settings, stores: list[Store]) -> Data:
    length = settings.max_length
    batch = settings.tokens_per_step // length
    tokens = max(1, settings.steps // FEWER) * batch * length
    samples = [load.sample_stream(store, tokens) for store in stores if store.kind == "lm"]
    if not stores:
        samples = [load.made_stream(tokens, settings.vocab_size, length)]
    for sample in samples:
        yield sample.task, sample, batch, length


def _freezing(settings: Settings, stores: list[Store]) -> Data:
    """Classifiers on texts of full length, and of four times that; for a GPT also a language model."""
    other = load.other_model(settings.size)
    vocab_size = stores[0].vocab_size if stores else other.vocab_size if other else settings.vocab_size
    for length in (settings.max_length, 4 * settings.max_length):
        if batch := settings.tokens_per_step // length:
            lengths = [length] * (max(1, settings.steps // FEWER) * batch)
            store = load.made_texts("made-full", lengths, vocab_size, length)
            yield f"classifier, T={length}", store, batch, length
    if other is None:
        for _, stream, batch, length in _language(replace(settings, vocab_size=vocab_size), []):
            yield f"language model, T={length}", stream, batch, length


def _large(settings: Settings, stores: list[Store]) -> Data:
    """Language models whose windows double in length, with the same tokens per step, while a window fits."""
    for doubling in range(DOUBLINGS):
        length = settings.max_length << doubling
        if settings.tokens_per_step >= length:
            for _, stream, batch, _ in _language(replace(settings, max_length=length), stores):
                yield f"language model, T={length}", stream, batch, length


_DATA: dict[str, Callable[[Settings, list[Store]], Data]] = {
    "classification": _classification,
    "lm": _language,
    "freezing": _freezing,
    "large": _large,
    "pretrained": _classification,
}


def arms_of(case: Case, settings: Settings) -> dict[str, Maker]:
    """Arms that do the same work on the same texts. The first one is compared with each of the others."""
    arms: dict[str, Maker] = {"ours": partial(Ours, case, "baseline")}
    trainers = {
        "hf-trainer": partial(HuggingFaceTrainer, case, compiled=False),
        "hf-trainer-compiled": partial(HuggingFaceTrainer, case, compiled=True),
    }
    if case.work in SAVINGS:
        # The third method is for the reference GPT only, and only two large models fit into memory.
        every = case.model["architecture"] == "gpt" and case.work != "large"
        methods = METHODS if every else METHODS[:2]
        arms = {method: partial(Ours, case, method) for method in methods}
    elif case.work == "pretrained":
        arms |= {"oelm": partial(Ours, case, "oelm"), **trainers}
    elif case.work == "classification":
        # Padded to the maximum length, every step costs the same, so a part of them is enough.
        steps = max(1, len(case.store["train"]) // FEWER // case.batch_size)
        some = replace(case, store=load.sample_texts(case.store, steps * case.batch_size))
        arms |= {**trainers, "original": partial(original, some)}
    else:
        arms |= {
            "hf-lm": partial(language_loop, case, "hf", False),
            "hf-lm-compiled": partial(language_loop, case, "hf", True),
            "nanogpt": partial(language_loop, case, "nanogpt", settings.compile),
        }
    left_out = {*settings.leave_out, *(() if settings.compile else ("hf-trainer-compiled", "hf-lm-compiled"))}
    return {name: make for name, make in arms.items() if name not in left_out}
