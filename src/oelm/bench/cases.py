"""What is measured against what: each kind of work as cases, each case as arms on the same texts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from oelm.bench.load import (
    MADE_LENGTHS,
    made_lengths,
    made_stream,
    made_texts,
    sample_stream,
    sample_texts,
)
from oelm.bench.measure import Arm
from oelm.data import Store, open_store
from oelm.errors import UserError
from oelm.method import PRESETS
from oelm.models.gpt_config import OelmGPTConfig, gpt_config

WORKS = ("classification", "lm", "freezing")
METHODS = ("baseline", "oelm", "oelm-value-only")
ARMS = (
    "ours", "hf-trainer", "hf-trainer-compiled", "original", "hf-lm", "hf-lm-compiled",
    "nanogpt", *METHODS,
)  # fmt: skip
FEWER = 5  # large steps, and those that cost the same whatever the texts, are timed so many times fewer


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    work: tuple[str, ...]
    size: str
    data: tuple[str, ...] = ()
    batch_size: int = 16
    tokens_per_step: int = 65536
    steps: int = 100
    rounds: int = 5
    max_length: int = 512
    vocab_size: int = 50257
    leave_out: tuple[str, ...] = ()
    compile: bool = True
    stop_after: float | None = None

    def __post_init__(self) -> None:
        if not self.work:
            raise UserError(f"--work: nothing is named; there are {', '.join(WORKS)} and all")
        for name in self.work:
            if name not in WORKS:
                raise UserError(f"--work {name}: no such work; there are {', '.join(WORKS)} and all")
        for name in self.leave_out:
            if name not in ARMS:
                raise UserError(f"--leave-out {name}: no such arm; there are {', '.join(ARMS)}")
        for name in ("batch_size", "tokens_per_step", "steps", "rounds", "max_length"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"--{name.replace('_', '-')} must be at least 1, but is {getattr(self, name)}"
                )
        if self.tokens_per_step < self.max_length and self.work != ("classification",):
            raise UserError(
                f"--tokens-per-step {self.tokens_per_step} is less than one text of --max-length "
                f"{self.max_length}; ask for more tokens, or for shorter texts"
            )


Maker = Callable[[], Arm]


@dataclass
class Case:
    """Arms that do the same work on the same texts. The first one is held against each of the others."""

    work: str
    name: str
    kind: str  # classification or lm
    config: OelmGPTConfig
    batch_size: int
    length: int
    arms: dict[str, Maker] = field(default_factory=dict)
    tokens_per_step: int | None = None  # where it is fixed
    fingerprint: str = "made"


def make_cases(settings: Settings, device: torch.device) -> Iterator[Case]:
    """The cases asked for, in order; their data is made or read as each one's turn comes."""
    stores = [open_store(folder) for folder in settings.data]
    for folder, store in zip(settings.data, stores, strict=True):
        if store.kind not in ("classification", "lm"):
            raise UserError(f"{folder} is for {store.kind}; the benchmark knows classification and lm")
    makers: dict[str, Callable[..., Iterator[Case]]] = {
        "classification": _classification,
        "lm": _language,
        "freezing": _freezing,
    }
    for work in settings.work:
        for case in makers[work](settings, stores, device):
            case.arms = {name: arm for name, arm in case.arms.items() if name not in settings.leave_out}
            yield case


def _classification(settings: Settings, stores: list[Store], device: torch.device) -> Iterator[Case]:
    texts = settings.steps * settings.batch_size
    found = [sample_texts(store, texts) for store in stores if store.kind == "classification"]
    if not stores:
        longest, vocab = settings.max_length, settings.vocab_size
        found = [
            made_texts(f"made-{kind}", made_lengths(kind, texts, longest), vocab, longest)
            for kind in MADE_LENGTHS
        ]
    for store in found:
        yield _classifier_case(
            "classification", store.task, store, settings, settings.batch_size, device, FEWER
        )


def _classifier_case(
    work: str, name: str, store: Store, settings: Settings, batch: int, device: torch.device, fewer: int
) -> Case:
    """Ours, Hugging Face's Trainer and the original recipe on the texts of a store."""
    from oelm.bench.ours import Ours
    from oelm.bench.peers import Original
    from oelm.bench.trainer import HuggingFaceTrainer

    length = store.max_length
    config = shape_of(settings.size, store, length)
    # Padded to the longest allowed, every step costs the same: some of them tell as much as all.
    some = sample_texts(store, max(batch, len(store["train"]) // fewer // batch * batch))
    arms: dict[str, Maker] = {
        "ours": lambda: Ours(store, settings.size, "baseline", batch, length),
        "hf-trainer": lambda: HuggingFaceTrainer(store, config, batch, device, compiled=False),
        "hf-trainer-compiled": lambda: HuggingFaceTrainer(store, config, batch, device, compiled=True),
        "original": lambda: Original(some, config, length, batch, device),
    }
    if not settings.compile:
        del arms["hf-trainer-compiled"]
    return Case(work, name, "classification", config, batch, length, arms, fingerprint=store.fingerprint)


def _language(settings: Settings, stores: list[Store], device: torch.device) -> Iterator[Case]:
    tokens = _large_steps(settings) * _batch(settings, settings.max_length) * settings.max_length
    found = [sample_stream(store, tokens) for store in stores if store.kind == "lm"]
    if not stores:
        found = [made_stream(tokens, settings.vocab_size, settings.max_length)]
    for store in found:
        yield _language_case("lm", store.task, store, settings, settings.max_length, device)


def _language_case(
    work: str, name: str, store: Store, settings: Settings, length: int, device: torch.device
) -> Case:
    """Ours, Hugging Face's GPT-2 and nanoGPT's style on windows of a corpus."""
    from oelm.bench.ours import Ours
    from oelm.bench.peers import LanguageLoop

    config, batch = shape_of(settings.size, store, length), _batch(settings, length)

    def loop(style: str, compiled: bool) -> Maker:
        return lambda: LanguageLoop(store, config, length, batch, device, style, compiled)

    arms: dict[str, Maker] = {"ours": lambda: Ours(store, settings.size, "baseline", batch, length)}
    arms["hf-lm"] = loop("hf", False)
    if settings.compile:
        arms["hf-lm-compiled"] = loop("hf", True)
    arms["nanogpt"] = loop("nanogpt", settings.compile)
    case = Case(work, name, "lm", config, batch, length, arms, fingerprint=store.fingerprint)
    return replace(case, tokens_per_step=batch * length)


def _freezing(settings: Settings, stores: list[Store], device: torch.device) -> Iterator[Case]:
    """Our own methods beside each other, on texts of full length and of four times that."""
    from oelm.bench.ours import Ours

    lengths = [n for n in (settings.max_length, 4 * settings.max_length) if n <= settings.tokens_per_step]
    for length in lengths:
        batch, store = _full_texts(settings, stores, length)
        config = shape_of(settings.size, store, length)
        arms: dict[str, Maker] = {
            method: lambda method=method, store=store, batch=batch, length=length: Ours(  # type: ignore[misc]
                store, settings.size, method, batch, length
            )
            for method in METHODS
            if method in PRESETS
        }
        name = f"classifier, T={length}"
        yield Case("freezing", name, "classification", config, batch, length, arms, batch * length)


def _full_texts(settings: Settings, stores: list[Store], length: int) -> tuple[int, Store]:
    """The batch size, and texts that are all of this length."""
    batch = _batch(settings, length)
    lengths = [length] * (_large_steps(settings) * batch)
    return batch, made_texts("made-full", lengths, _vocabulary(settings, stores), length)


def _large_steps(settings: Settings) -> int:
    return max(1, settings.steps // FEWER)


def _batch(settings: Settings, length: int) -> int:
    return settings.tokens_per_step // length


def _vocabulary(settings: Settings, stores: list[Store]) -> int:
    return stores[0].vocab_size if stores else settings.vocab_size


def shape_of(size: str, store: Store, length: int) -> OelmGPTConfig:
    """The size that every arm of a case has: what `oelm train` would build for this store."""
    positions = max(gpt_config(size).max_position_embeddings, length)
    labels: dict[str, Any] = {"num_labels": len(store.label_names)} if store.label_names else {}
    return gpt_config(size, vocab_size=store.vocab_size, max_position_embeddings=positions, **labels)
