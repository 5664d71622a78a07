"""Sequence to sequence: an encoder reads the source, a decoder writes the target (T5, BART and their like).

A target is learned token by token, and evaluated by greedy generation, until the end token or the length of
the longest target of the train split. Sources and targets are stored in a flat array each. The splits that
are evaluated on also keep both texts (`Split.right_texts`): generated text is compared with the target in the
file, not with its tokenised and truncated form.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import GenerationConfig, PreTrainedModel

from oelm.audit import unwrap
from oelm.data.assemble import Array, Batch
from oelm.data.batches import Plan
from oelm.data.dataset import Dataset
from oelm.data.preparation import Lengths, Rows, write_items
from oelm.data.store import IGNORE, Split, Store
from oelm.data.tasks.base import Baselines, Columns, Items, Measured, Objective, Reader, Splits, TaskKind
from oelm.data.tasks.language_modeling import language_metrics, unigram
from oelm.data.tasks.question_answering import word_f1
from oelm.data.tasks.token_classification import token_loss
from oelm.data.tokenizer import Encoder, boundary_id
from oelm.errors import UserError

# A word is text between spaces; in scripts without spaces (kana, Han) every character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


class Seq2SeqObjective(Objective):
    @cached_property
    def tokenizer(self) -> Any:
        return self.store.tokenizer()

    def plan(self, split: str, batch_size: int | None, batch_tokens: int | None, seed: int | None) -> Plan:
        """An item's tokens are those of its source and of its target."""
        part = self.store[split]
        return Plan(part.lengths + part.target_lengths, batch_size, batch_tokens, seed)

    def count(self, split: str, items: Array) -> int:
        return int(self.store[split].target_lengths[items].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return token_loss(self._logits(model, batch), batch.targets["labels"], self.label_smoothing)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        # The model itself shifts the labels; called with `labels=` it would also compute a mean loss.
        shifted = unwrap(model).prepare_decoder_input_ids_from_labels(batch.targets["labels"])  # type: ignore[operator]
        return model(**batch.inputs, decoder_input_ids=shifted, use_cache=False).logits.float()

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | Array]]:
        labels = batch.targets["labels"]
        losses = F.cross_entropy(
            self._logits(model, batch).transpose(1, 2), labels, ignore_index=IGNORE, reduction="none"
        ).double()
        longest = self.store["train"].meta["target_longest"]
        written = write(unwrap(model), self.tokenizer, batch.inputs, max_new_tokens=longest)  # type: ignore[arg-type]
        return losses.sum(), {
            "predictions": np.array([plain_text(text) for text in written]),
            "scores": losses.sum(1),  # nats per target
            "tokens": (labels != IGNORE).sum(1),
        }

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        """`labels` become the reference texts, so that equal entries of `predictions` are exact matches."""
        known = self.store[split].right_texts()
        right = [known[row]["target"] for row in arrays["ids"].tolist()]
        scores = text_scores(right, arrays["predictions"].tolist())
        means = {name: float(values.mean()) for name, values in scores.items()}
        labels = np.array([plain_text(text) for text in right])
        language = language_metrics(loss_sum, count, self.store[split].meta["target_bytes"])
        return Measured(language | means, arrays | {"labels": labels} | scores)


class TargetReader(Reader):
    """The text that an encoder-decoder generates."""

    says = ("target",)

    def __init__(self, model: Any, tokenizer: Any, max_length: int, **options: Any) -> None:
        """`options` override the model's generation config."""
        super().__init__(model, tokenizer, max_length)
        self.options, self.vocabulary = options, int(model.config.vocab_size)

    def outputs(self, inputs: dict[str, Any], second: Array | None) -> tuple[Any, ...]:
        return (write(self.model, self.tokenizer, inputs, **self.options),)

    def answer(self, line: str, items: Items, mine: range, said: list[Any]) -> dict[str, Any]:
        return {"target": said[0][0]}


class Seq2Seq(TaskKind):
    name = "seq2seq"
    does = "write targets"
    auto_class = "AutoModelForSeq2SeqLM"
    metrics = {"f1": True, "exact_match": True, "perplexity": False, "bits_per_byte": False, "loss": False}
    metric = "f1"
    objective = Seq2SeqObjective
    reader = TargetReader
    by_source = True
    writes = True
    predicts_tokens = True

    def file_columns(self, text: str, text_pair: str | None, label: str, target: str | None) -> Columns:
        if not target:
            raise UserError("seq2seq needs the column of the text to be written: target (--target)")
        if text_pair or label != "label":
            other = "text_pair" if text_pair else "label"
            raise UserError(f"target is the column of a text to be written; it does not go with {other}")
        if text == target:
            raise UserError(f"text and target must be different columns, not {[text, target]}")
        return {"text": text, "target": target}

    def item_texts(self, row: dict[str, Any]) -> tuple[str, ...]:
        return (row["text"], row["target"])

    def lengths(self, lengths: Lengths) -> dict[str, int]:
        return {"max_length": lengths.text, "max_target_length": lengths.target}

    def write(self, dataset: Dataset, tokenizer: Any, folder: Path, lengths: Lengths, show: bool) -> Splits:
        """Columns: tokens, offsets and ids of the sources, target_tokens and target_offsets."""
        encoder = Encoder(tokenizer, lengths.text)
        writing = Encoder(tokenizer, lengths.target, target=True)

        def encode(rows: Rows) -> dict[str, Any]:
            sources, targets = rows.columns["text"], rows.columns["target"]
            values = dict(zip(("tokens", "lengths", "truncated"), encoder.texts(sources), strict=True))
            tokens, lengths, cut = writing.texts(targets)
            values |= {"target_tokens": tokens, "target_lengths": lengths, "target_truncated": cut}
            values["bytes"] = rows.bytes("text")
            values["target_bytes"] = _kept_bytes(writing, targets, tokens, lengths)
            records = zip(rows.ids.tolist(), sources, targets, strict=True)
            texts = [{"id": row, "source": source, "target": target} for row, source, target in records]
            return values | {"right_texts": texts}

        dtypes = {"tokens": encoder.dtype, "target_tokens": encoder.dtype, "target_offsets": np.uint64}
        return write_items(dataset, folder, dtypes, encode, show)

    def check_config(self, config: Any, name: str) -> None:
        if not config.is_encoder_decoder:
            raise UserError(
                f"{name} is not an encoder-decoder, and writing targets (task.target, --target) needs one; "
                "name a T5, a BART or their like with --model (a folder or a hub id)"
            )
        super().check_config(config, name)

    def fit_model(self, model: Any, store: Store, name: str) -> None:
        """Set greedy generation, as in evaluation, also for loaded checkpoints. Settings of another task
        (beams, a minimum length, forbidden repetitions) are dropped."""
        start = model.config.decoder_start_token_id
        if start is None:
            raise UserError(
                f"{model.config.model_type}: config.json names no decoder_start_token_id, "
                "so the model cannot begin a target"
            )
        tokenizer = store.tokenizer()
        model.generation_config = GenerationConfig(
            max_new_tokens=store["train"].meta["target_longest"],
            decoder_start_token_id=start,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=boundary_id(tokenizer),
            pad_token_id=store.pad_id,
        )

    def trivial_baselines(self, store: Store, splits: list[Split]) -> Baselines:
        """The most frequent target of train (`most_frequent_target`; ties: the first by its tokens), the
        source itself (`copy_source`), and the `unigram` of the targets."""
        train = store["train"]
        bounds = train.target_offsets
        targets = [train.target_tokens[a:b].tobytes() for a, b in pairwise(bounds.tolist())]
        # Ties are broken by the tokens, so that the order of the rows does not matter.
        most = min(Counter(targets).items(), key=lambda item: (-item[1], item[0]))[0]
        ids = np.frombuffer(most, dtype=train.target_tokens.dtype).tolist()
        common = store.tokenizer().backend_tokenizer.decode(ids, skip_special_tokens=True)
        baselines: Baselines = {"copy_source": {}, "most_frequent_target": {}, "unigram": {}}
        for split in splits:
            texts = split.right_texts().values()
            right = [record["target"] for record in texts]
            for name, written in (
                ("copy_source", [record["source"] for record in texts]),
                ("most_frequent_target", [common] * len(right)),
            ):
                scores = text_scores(right, written)
                baselines[name][split.name] = {key: float(values.mean()) for key, values in scores.items()}
            baselines["unigram"][split.name] = unigram(
                train.target_tokens, split.target_tokens, store.vocab_size, split.meta["target_bytes"]
            )
        return baselines

    def fits(self, model: Any) -> bool:
        return writes_targets(model)


KIND = Seq2Seq()


def writes_targets(model: Any) -> bool:
    """Whether a model is an encoder-decoder that generates a target for a source."""
    return bool(model.config.is_encoder_decoder and model.can_generate())


def text_scores(right: Sequence[str], written: Sequence[str]) -> dict[str, Array]:
    """Per text: exact match (1 or 0), and F1 over words, counted with repetitions. Case and punctuation
    count, unlike in SQuAD's answers; differences in spaces do not."""
    pairs = [*zip(right, written, strict=True)]
    return {
        "exact_match": np.array(
            [float(plain_text(text) == plain_text(generated)) for text, generated in pairs]
        ),
        "f1": np.array([word_f1(_WORD.findall(text), _WORD.findall(generated)) for text, generated in pairs]),
    }


def plain_text(text: str) -> str:
    """A text with single spaces, as tokenizers may change the others."""
    return " ".join(text.split())


def write(model: PreTrainedModel, tokenizer: Any, inputs: dict[str, Tensor], **options: Any) -> list[str]:
    """Generate a text for every source, by the model's generation config, overridden by `options`."""
    sharded = isinstance(model, FSDPModule)
    if sharded and "generate" not in vars(model):
        # `generate` also calls the encoder alone. `synced_gpus`: processes generate until all are done.
        register_fsdp_forward_method(model, "generate")
    ids = model.generate(**inputs, synced_gpus=sharded, **options)  # type: ignore[operator]
    return tokenizer.backend_tokenizer.decode_batch(ids.tolist(), skip_special_tokens=True)


def _kept_bytes(encoder: Encoder, texts: list[str], tokens: Array, lengths: Array) -> int:
    """UTF-8 bytes of the targets' tokens: bits per byte must not count text that was cut off."""
    size, end = 0, 0
    for text, length in zip(texts, lengths.tolist(), strict=True):
        end += length
        full = length < encoder.max_length
        size += len((text if full else encoder.decode(tokens[end - length : end].tolist())).encode())
    return size
