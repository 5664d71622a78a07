"""Statistics of a language model's continuations of held-out texts, compared with the real continuations.

All measures but `tokens` are of words (runs of letters and digits, and single punctuation marks, in lower
case), so that models with different tokenizers can be compared:

    distinct_n   different n-grams / all n-grams, over all continuations together. It falls with the amount
                 of text, so both sides are counted up to the same number of n-grams.
    repetition   the share of a continuation's 4-grams that occur in it before; the mean over continuations
                 of at least four words
    words        mean length in words; `tokens` is the same in tokens
    ended        the share of continuations after which the text ends

At temperature 1 without top-k a perfect model has the values of the held-out texts.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig

from oelm.data.store import Array, Split
from oelm.data.tasks.language_modeling import check_language_model
from oelm.data.tokenizer import Encoder, boundary_id, pad_id
from oelm.errors import UserError
from oelm.orthogonal import generator

WORD = re.compile(r"\w+|[^\w\s]")
REPEATED = 4  # words in the n-grams of `repetition`
BATCH = 16  # prompts in a batch; with another number the same seed gives other texts


@dataclass(frozen=True)
class Writing:
    """The settings of generation: `prompts` prompts of `prompt_tokens` tokens, each continued by at most
    `tokens`."""

    prompts: int = 64
    prompt_tokens: int = 32
    tokens: int = 64
    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # sample among the k most likely tokens; 0: among all
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1")
        if self.temperature < 0 or self.top_k < 0:
            raise UserError("--temperature and --top-k must not be negative")


class Continuation(NamedTuple):
    """The tokens that follow a prompt, and whether the text ends after them."""

    ids: list[int]
    ended: bool


def generation_quality(
    model: Any, tokenizer: Any, split: Split, window: int, writing: Writing
) -> dict[str, Any]:
    """The measures above, of texts `generated` by the model and of the `held_out` texts of a corpus. Prompts
    are the beginnings of documents, drawn with the seed; of a split with fewer documents than prompts, the
    beginnings of pieces of equal length."""
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
    bounds = np.flatnonzero(tokens == end)
    whole = True
    starts, ends = _longer(bounds[:-1] + 1, bounds[1:], writing.prompt_tokens)
    if len(starts) < writing.prompts:  # consecutive pieces of the stream, which end at a document's end
        whole, size = False, writing.prompt_tokens + writing.tokens
        starts, bounds = np.arange(1, len(tokens) - size, size), np.append(bounds, len(tokens))
        starts, ends = _longer(starts, bounds[np.searchsorted(bounds, starts)], writing.prompt_tokens)
    if not len(starts):
        raise UserError(f"the {split.name} split has no text longer than --prompt-tokens; ask for fewer")
    chosen = np.sort(generator(writing.seed, "prompts").permutation(len(starts))[: writing.prompts])
    # A text is preceded by the tokenizer's own special tokens or, without any, by the end of the previous
    # text.
    before = opening or ([end] if whole else [])
    prompts = [[*before, *tokens[start : start + writing.prompt_tokens].tolist()] for start in starts[chosen]]
    generated = [*_generate(model, prompts, end, pad_id(tokenizer), writing)]
    held_out = []
    for first, last in zip(starts[chosen] + writing.prompt_tokens, ends[chosen], strict=True):
        ids = tokens[first : min(first + writing.tokens, last)].tolist()
        held_out.append(Continuation(ids, bool(last - first < writing.tokens)))
    return {
        **asdict(writing),
        "prompts": len(prompts),
        "prompts_are": "documents" if whole else "pieces",
        "measures": _measures(tokenizer, generated, held_out),
    }


def _longer(starts: Array, ends: Array, prompt: int) -> tuple[Array, Array]:
    """The starts and ends of the texts that are longer than a prompt."""
    long = ends - starts > prompt
    return starts[long], ends[long]


@torch.no_grad()
def _generate(
    model: Any, prompts: list[list[int]], end: int, pad: int, writing: Writing
) -> Iterator[Continuation]:
    """The model's continuations. All prompts have the same length, so nothing is padded."""
    sampling = {"temperature": writing.temperature, "top_k": writing.top_k, "top_p": 1.0}
    # All settings are given, so that those of a checkpoint's generation_config.json have no effect.
    settings = GenerationConfig(
        do_sample=bool(writing.temperature), **(sampling if writing.temperature else {}),
        max_new_tokens=writing.tokens, eos_token_id=end, pad_token_id=pad, use_cache=True,
        num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0,
    )  # fmt: skip
    torch.manual_seed(writing.seed)
    for first in range(0, len(prompts), BATCH):
        ids = torch.tensor(prompts[first : first + BATCH], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        for row in out[:, ids.shape[1] :].tolist():
            ended = end in row
            yield Continuation(row[: row.index(end)] if ended else row, ended)


def _measures(tokenizer: Any, generated: list[Continuation], held_out: list[Continuation]) -> dict[str, Any]:
    sides = (generated, held_out)
    words = [[words_of(tokenizer.decode(text.ids)) for text in side] for side in sides]
    pairs: dict[str, list[float | None]] = {
        **{f"distinct_{n}": distinct(words[0], words[1], n) for n in (1, 2, 3)},
        "repetition": [repetition(side) for side in words],
        "words": [float(np.mean([len(text) for text in side])) for side in words],
        "tokens": [float(np.mean([len(text.ids) for text in side])) for side in sides],
        "ended": [float(np.mean([text.ended for text in side])) for side in sides],
    }
    return {name: dict(zip(("generated", "held_out"), pair, strict=True)) for name, pair in pairs.items()}


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, and single punctuation marks, in lower case."""
    return WORD.findall(text.lower())


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def distinct(one: list[list[str]], other: list[list[str]], n: int) -> list[float | None]:
    """Different n-grams / all n-grams of two sets of texts, counting as many n-grams of both. None if a set
    has no n-gram."""
    sides = [[gram for words in texts for gram in ngrams(words, n)] for texts in (one, other)]
    most = min(map(len, sides))
    return [len(set(grams[:most])) / most if most else None for grams in sides]


def repetition(texts: list[list[str]]) -> float | None:
    """The mean share of a text's 4-grams that occur earlier in it; None if no text has four words."""
    shares = [1 - len(set(grams)) / len(grams) for words in texts if (grams := ngrams(words, REPEATED))]
    return float(np.mean(shares)) if shares else None
