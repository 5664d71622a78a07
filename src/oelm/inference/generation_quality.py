"""How a language model writes: its continuations of held-out texts beside what really came next.

All measures but `tokens` are of words (runs of letters and digits, and single punctuation marks, in lower
case), so that models with different tokenizers compare:

    distinct_n   different n-grams / all n-grams, over all continuations together. It falls with the amount
                 of text, so each side is counted up to as many n-grams as the other has.
    repetition   the share of a continuation's 4-grams that it has written before; the mean over those that
                 have any
    words        mean length; `tokens` is the same in tokens, at most as many as were asked for
    ended        the share of continuations after which the text ends

At temperature 1 without top-k a perfect model has the held-out texts' own values.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from oelm.data.store import Split
from oelm.data.tasks.language_modeling import check_language_model
from oelm.data.tokenizer import Encoder, boundary_id, pad_id
from oelm.errors import UserError
from oelm.orthogonal import generator

Array = np.ndarray
WORD = re.compile(r"\w+|[^\w\s]")
REPEATED = 4  # words of an n-gram that counts as repeated
TOGETHER = 16  # prompts in a batch: a part of what a seed means


@dataclass(frozen=True)
class Writing:
    """What is written: `prompts` continuations of `prompt_tokens` given tokens, at most `tokens` long."""

    prompts: int = 64
    prompt_tokens: int = 32
    tokens: int = 64
    temperature: float = 1.0  # 0: the likeliest token every time
    top_k: int = 0  # choose among so many tokens; 0: among all
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1")
        if self.temperature < 0 or self.top_k < 0:
            raise UserError("--temperature and --top-k must not be negative")


@dataclass(frozen=True)
class Continuation:
    """What follows a prompt, and whether the text ends after it."""

    ids: list[int]
    ended: bool


def generation_quality(
    model: Any, tokenizer: Any, split: Split, window: int, writing: Writing
) -> dict[str, Any]:
    """The measures above, `generated` by the model and of the `held_out` text of a corpus.

    Prompts are beginnings of documents, drawn with the seed; where the split has fewer documents than
    prompts are asked for, pieces of its stream are continued instead.
    """
    check_language_model(model, "--generation")
    end = boundary_id(tokenizer)
    opening = Encoder(tokenizer, 1 << 30).single[0]
    needed = max(1, len(opening)) + writing.prompt_tokens + writing.tokens
    if needed > window:
        raise UserError(
            f"--prompt-tokens {writing.prompt_tokens} and --tokens {writing.tokens} need {needed} positions, "
            f"but this model reads {window}; ask for fewer"
        )
    tokens = np.asarray(split.tokens, dtype=np.int64)
    starts, ends = _documents(tokens, end, writing.prompt_tokens)
    whole = len(starts) >= writing.prompts
    if not whole:
        starts, ends = _pieces(tokens, end, writing)
    if not len(starts):
        raise UserError(f"the {split.name} split has no text longer than --prompt-tokens; ask for fewer")
    chosen = np.sort(generator(writing.seed, "prompts").permutation(len(starts))[: writing.prompts])
    # What a model reads before a text: the tokenizer's own opening, else the end of the text before.
    before = opening or ([end] if whole else [])
    prompts = [[*before, *tokens[start : start + writing.prompt_tokens].tolist()] for start in starts[chosen]]
    written = [*_write(model, prompts, end, pad_id(tokenizer), writing)]
    real = [
        _real(tokens, int(starts[i]) + writing.prompt_tokens, int(ends[i]), writing.tokens) for i in chosen
    ]
    return {
        **asdict(writing),
        "prompts": len(prompts),
        "prompts_are": "documents" if whole else "pieces",
        "measures": _beside(tokenizer, written, real),
    }


def _documents(tokens: Array, end: int, prompt: int) -> tuple[Array, Array]:
    """Where each document that is longer than a prompt starts and ends."""
    bounds = np.flatnonzero(tokens == end)
    starts, ends = bounds[:-1] + 1, bounds[1:]
    long = ends - starts > prompt
    return starts[long], ends[long]


def _pieces(tokens: Array, end: int, writing: Writing) -> tuple[Array, Array]:
    """The same for consecutive pieces of a stream. A piece ends where a document does."""
    size = writing.prompt_tokens + writing.tokens
    starts = np.arange(1, len(tokens) - size, size)
    bounds = np.append(np.flatnonzero(tokens == end), len(tokens))
    ends = bounds[np.searchsorted(bounds, starts)]
    long = ends - starts > writing.prompt_tokens
    return starts[long], ends[long]


def _real(tokens: Array, first: int, end: int, most: int) -> Continuation:
    return Continuation(tokens[first : min(first + most, end)].tolist(), end - first < most)


@torch.no_grad()
def _write(
    model: Any, prompts: list[list[int]], end: int, pad: int, writing: Writing
) -> Iterator[Continuation]:
    """The model's continuations. All prompts are equally long, so nothing is padded."""
    sampling = {"do_sample": True, "temperature": writing.temperature, "top_k": writing.top_k}
    # Said in full: what a checkpoint's own settings add would be measured with the model.
    settings = GenerationConfig(
        **(sampling if writing.temperature else {"do_sample": False}),
        max_new_tokens=writing.tokens, eos_token_id=end, pad_token_id=pad, use_cache=True,
        num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0,
    )  # fmt: skip
    if writing.temperature:
        settings.top_p = 1.0
    torch.manual_seed(writing.seed)
    for first in range(0, len(prompts), TOGETHER):
        ids = torch.tensor(prompts[first : first + TOGETHER], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        for row in out[:, ids.shape[1] :].tolist():
            ended = end in row
            yield Continuation(row[: row.index(end)] if ended else row, ended)


def _beside(tokenizer: Any, written: list[Continuation], real: list[Continuation]) -> dict[str, Any]:
    words = [[words_of(tokenizer.decode(part.ids)) for part in side] for side in (written, real)]
    pairs: dict[str, list[float | None]] = {}
    for n in (1, 2, 3):
        pairs[f"distinct_{n}"] = distinct(words[0], words[1], n)
    pairs["repetition"] = [repetition(side) for side in words]
    pairs["words"] = [float(np.mean([len(text) for text in side])) for side in words]
    pairs["tokens"] = [float(np.mean([len(part.ids) for part in side])) for side in (written, real)]
    pairs["ended"] = [float(np.mean([part.ended for part in side])) for side in (written, real)]
    return {name: dict(zip(("generated", "held_out"), pair, strict=True)) for name, pair in pairs.items()}


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, and single punctuation marks, in lower case."""
    return WORD.findall(text.lower())


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def distinct(one: list[list[str]], other: list[list[str]], n: int) -> list[float | None]:
    """Different n-grams / all n-grams of each of two sets of texts, as many n-grams of either.

    Texts count in their order; without any n-gram there is no answer.
    """
    sides = [[gram for words in texts for gram in ngrams(words, n)] for texts in (one, other)]
    most = min(map(len, sides))
    return [len(set(grams[:most])) / most if most else None for grams in sides]


def repetition(texts: list[list[str]]) -> float | None:
    """The mean share of a text's 4-grams that stand in it before; None where no text has one."""
    shares = [1 - len(set(grams)) / len(grams) for words in texts if (grams := ngrams(words, REPEATED))]
    return float(np.mean(shares)) if shares else None
