"""Tokenizers: by name, from a folder, or trained on the data; and the encoder that turns texts into numbers.

The encoder treats everything it is given as text: "[SEP]" or "<|endoftext|>" inside a text never becomes
the special token. Special tokens come only from the tokenizer's own template.
"""

import hashlib
import os
import re
from array import array
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from oelm.errors import Interrupted, UserError
from oelm.system.hub import hub_reachable, not_in_cache, with_cache_only
from oelm.system.library_errors import first_line, is_out_of_memory

END = "<|endoftext|>"
JOINER = " [SEP]"  # between the texts of a pair where the tokenizer has no template for pairs
# Tokens of a trained vocabulary: at least 256 bytes and a special token.
SMALLEST, LARGEST = 257, 1_000_000


def trained_size(name: str) -> int | None:
    """The vocabulary size in `train:N`, or None for any other name."""
    if not name.startswith("train:"):
        return None
    size = name.removeprefix("train:")
    if not re.fullmatch(r"[0-9]{1,9}", size) or not SMALLEST <= int(size) <= LARGEST:
        must = f"between {SMALLEST} and {LARGEST:,} tokens"
        raise UserError(f"tokenizer {name[:40]!r}: a trained vocabulary has {must}, as in train:8192")
    return int(size)


def train_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A byte-level BPE of at most `size` tokens learned from the texts; it can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, bos_token=END, unk_token=END, pad_token=END
    )


def load_tokenizer(name: str) -> Any:
    """A fast tokenizer from a folder, from OELM_TOKENIZER_DIR/name, or from the hub."""
    from transformers import AutoTokenizer

    folders = [Path(name), Path(os.environ.get("OELM_TOKENIZER_DIR") or "", name)]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    try:
        tokenizer = None if folder is None else _from_vocabulary(folder)
        if tokenizer is None:
            hub = with_cache_only(str(folder or name), {})
            tokenizer = AutoTokenizer.from_pretrained(folder or name, trust_remote_code=False, **hub)
    except Exception as error:  # a broken file, the network, the hub: the libraries raise many kinds
        if isinstance(error, UserError | Interrupted) or is_out_of_memory(error):
            raise
        if folder is not None:
            raise UserError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}") from None
        if not hub_reachable():
            hint = "set OELM_TOKENIZER_DIR to a folder that has it, or use --tokenizer train:8192"
            raise UserError(f"the tokenizer {not_in_cache(name)}; {hint}") from None
        raise UserError(
            f"tokenizer {name!r} is no folder and cannot be loaded from the hub: {first_line(error)}"
        ) from None
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer {name!r} has no fast version, which is needed here")
    return tokenizer


def _from_vocabulary(folder: Path) -> Any:
    """The tokenizer of a folder that holds only a vocabulary; None if transformers can load the folder."""
    from transformers import BertTokenizer, GPT2Tokenizer

    names = {path.name for path in folder.iterdir()}
    if names & {"tokenizer.json", "tokenizer_config.json"}:
        return None
    if {"vocab.json", "merges.txt"} <= names:
        return GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    if "vocab.txt" in names:
        cased = "cased" in folder.name.replace("uncased", "")
        return BertTokenizer(vocab=str(folder / "vocab.txt"), do_lower_case=not cased)
    raise UserError(
        f"{folder} holds no tokenizer: expected tokenizer.json, or vocab.json and merges.txt, or vocab.txt"
    )


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of the tokenizer's whole configuration."""
    text = tokenizer.backend_tokenizer.to_str() + str(sorted(tokenizer.special_tokens_map.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def encoding_digest(tokenizer: Any) -> str:
    """A digest that is equal for tokenizers that encode texts alike. Truncation and padding, which may differ
    in their files, are first switched off, as an Encoder does."""
    _read_texts_only(tokenizer.backend_tokenizer)
    return tokenizer_digest(tokenizer)


def pad_id(tokenizer: Any) -> int:
    """The id of the padding token; any other if there is none, as padding is always masked."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(value) for value in known if value is not None), 0)


def boundary_id(tokenizer: Any) -> int:
    """The id of the token that ends a text: after every document of a corpus, before the first, and after a
    target."""
    for value in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if value is not None:
            return int(value)
    raise UserError("this tokenizer has no end-of-text token, which a text that is to be written needs")


def _target_template(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a target (some tokenizers add a language code); at least an end
    token, which the model learns to write."""
    text = tokenizer(text_target="a", add_special_tokens=False)["input_ids"]
    whole = tokenizer(text_target="a")["input_ids"]
    start = next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)
    return whole[:start], whole[start + len(text) :] or [boundary_id(tokenizer)]


def _read_texts_only(backend: Any) -> Any:
    """The backend, set to read special tokens as text, without truncation and padding. Nothing is set that
    is set already, as another thread may be encoding."""
    if backend.padding is not None:
        backend.no_padding()
    if backend.truncation is not None:
        backend.no_truncation()
    if not backend.encode_special_tokens:
        backend.encode_special_tokens = True
    return backend


class Encoder:
    """Encodes many texts at a time, on all cores (inside the tokenizers library). With `target=True` texts
    get the special tokens of a target. It shares the tokenizer's backend (a copy of GPT-2's takes 40 MB),
    and sets its options before each use, as a call of the tokenizer itself changes them."""

    def __init__(self, tokenizer: Any, max_length: int, target: bool = False) -> None:
        self._backend = tokenizer.backend_tokenizer
        self.single, self.pair, self.typed = self._templates()
        self.has_pairs = bool(self.pair[1])
        if not self.has_pairs:
            self.pair = (self.pair[0], self.ids([JOINER])[0], self.pair[2])
        self.dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
        self.max_length = max_length
        needed = 2 + sum(map(len, self.pair))
        if target:
            self.single = _target_template(tokenizer)
            needed = 1 + sum(map(len, self.single))
        if max_length < needed:
            name = "max_target_length" if target else "max_length"
            raise UserError(f"{name} {max_length} leaves no room for text; use at least {needed}")

    def _templates(self) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int], list[int]], bool]:
        """The special tokens around a text, those around and between two texts, and whether the second text
        has its own token type; all taken from an example."""
        backend = self._text_only()
        one, two = backend.encode("a"), backend.encode("a", "b")
        text = [i for i, sequence in enumerate(one.sequence_ids) if sequence is not None]
        first = [i for i, sequence in enumerate(two.sequence_ids) if sequence == 0]
        second = [i for i, sequence in enumerate(two.sequence_ids) if sequence == 1]
        single = (one.ids[: text[0]], one.ids[text[-1] + 1 :])
        pair = (two.ids[: first[0]], two.ids[first[-1] + 1 : second[0]], two.ids[second[-1] + 1 :])
        return single, pair, bool(pair[1]) and two.type_ids[second[0]] == 1

    def _text_only(self) -> Any:
        return _read_texts_only(self._backend)

    def ids(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens and truncation."""
        return [e.ids for e in self._text_only().encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def texts(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, int]:
        """Flat tokens, lengths, and how many texts were cut at max_length."""
        before, after = self.single
        room = self.max_length - len(before) - len(after)
        flat = array("H" if self.dtype == np.uint16 else "I")  # a third of the time of lists of numbers
        ends = np.empty(len(texts) + 1, dtype=np.int64)
        ends[0] = cut = 0
        encoded = self._text_only().encode_batch_fast(texts, add_special_tokens=False)
        for number, encoding in enumerate(encoded, 1):
            ids = encoding.ids
            if len(ids) > room:
                del ids[room:]
                cut += 1
            flat.fromlist([*before, *ids, *after] if before or after else ids)
            ends[number] = len(flat)
        return np.frombuffer(flat, dtype=self.dtype), np.diff(ends), cut

    def pairs(self, firsts: list[str], seconds: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Flat tokens, lengths, where the second segment starts (the length, for models without segments),
        and how many pairs were cut. The longer text of a pair is cut first."""
        before, between, after = self.pair
        room = self.max_length - len(before) - len(between) - len(after)
        rows, starts, cut = [], [], 0
        others = self.ids(seconds if self.has_pairs else [" " + second for second in seconds])
        for first, second in zip(self.ids(firsts), others, strict=True):
            if len(first) + len(second) > room:
                keep = share_room(len(first), len(second), room)
                first, second, cut = first[: keep[0]], second[: keep[1]], cut + 1
            row = [*before, *first, *between, *second, *after]
            rows.append(row)
            starts.append(len(before) + len(first) + len(between) if self.typed else len(row))
        return self._flat(rows), _lengths(rows), np.array(starts, dtype=np.int64), cut

    def words(self, rows: list[list[str]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Flat tokens, lengths, for each token the number of the word it starts (-1: none), and how many rows
        were cut."""
        before, after = self.single
        room = self.max_length - len(before) - len(after)
        if self.ids(["a b"])[0] != self.ids(["a"])[0] + self.ids(["b"])[0]:
            # A word inside a sentence carries its space, as it would in running text.
            rows = [[*words[:1], *(" " + word for word in words[1:])] for words in rows]
        encoded = self._text_only().encode_batch(rows, is_pretokenized=True, add_special_tokens=False)
        tokens, firsts, cut = [], [], 0
        for encoding in encoded:
            words = np.array(encoding.word_ids[:room], dtype=np.int64)
            begins = np.diff(words, prepend=-1) != 0
            ends = (np.full(len(before), -1), np.full(len(after), -1))
            firsts.append(np.concatenate([ends[0], np.where(begins, words, -1), ends[1]]))
            tokens.append([*before, *encoding.ids[:room], *after])
            cut += len(encoding.ids) > room
        return self._flat(tokens), _lengths(tokens), np.concatenate(firsts), cut

    def seconds_with_spans(self, texts: list[str]) -> list[tuple[list[int], np.ndarray]]:
        """The second texts of pairs: tokens, and for each the characters (from, to) it came from."""
        shift = 0 if self.has_pairs else 1
        given = [" " + text for text in texts] if shift else texts
        encoded = self._text_only().encode_batch(given, add_special_tokens=False)
        spans = [np.array(e.offsets, dtype=np.int64).reshape(-1, 2) for e in encoded]
        return [(e.ids, np.maximum(span - shift, 0)) for e, span in zip(encoded, spans, strict=True)]

    def _flat(self, rows: list[list[int]]) -> np.ndarray:
        return np.fromiter(chain.from_iterable(rows), dtype=self.dtype, count=sum(map(len, rows)))


def share_room(first: int, second: int, room: int) -> tuple[int, int]:
    """The tokens kept of each text of a pair: all of the shorter one, unless it needs more than half."""
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)


def _lengths(rows: list[list[int]]) -> np.ndarray:
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
