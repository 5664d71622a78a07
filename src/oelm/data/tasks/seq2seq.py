"""Sequence to sequence: an encoder reads the source, a decoder writes the target (T5, BART and their like).

A target is learned token by token, and measured by the text the model writes by itself: the likeliest token
every time, until it ends or is longer than any target of the train split.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import GenerationConfig, PreTrainedModel

from oelm.audit import unwrap
from oelm.data import IGNORE, Plan, Store, read_references
from oelm.data.assemble import Layout
from oelm.data.tasks import metrics
from oelm.data.tasks.objective import PADDED, Batch, Measured, Objective, token_loss
from oelm.data.tokenizer import boundary_id
from oelm.errors import UserError

Array = np.ndarray
TEXTS = 32  # sources written for at once


class Seq2Seq(Objective):
    auto_class = "AutoModelForSeq2SeqLM"

    @cached_property
    def tokenizer(self) -> Any:
        return self.store.tokenizer()

    def plan(self, split: str, batch_size: int | None, batch_tokens: int | None, seed: int | None) -> Plan:
        """An item's tokens are those of its source and of its target."""
        part = self.store[split]
        return Plan(part.lengths + part.target_lengths, batch_size, batch_tokens, seed)

    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        padded = self.padded(split, items, layout)
        assert padded.labels is not None
        tokens = int(self.store[split].lengths[items].sum()) + self.count(split, items)
        return Batch(padded.ids, padded.inputs(), {"labels": padded.labels}, tokens)

    def count(self, split: str, items: Array) -> int:
        return int(self.store[split].target_lengths[items].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return token_loss(self._logits(model, batch), batch.targets["labels"], self.label_smoothing)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        # What the decoder reads is the model's own affair; with `labels` it would also compute a mean loss.
        shifted = unwrap(model).prepare_decoder_input_ids_from_labels(batch.targets["labels"])  # type: ignore[operator]
        return model(**batch.inputs, decoder_input_ids=shifted, use_cache=False).logits.float()

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Array]]:
        labels = batch.targets["labels"]
        losses = F.cross_entropy(
            self._logits(model, batch).transpose(1, 2), labels, ignore_index=IGNORE, reduction="none"
        ).double()
        longest = self.store["train"].meta["target_longest"]
        written = write(unwrap(model), self.tokenizer, batch.inputs, max_new_tokens=longest)  # type: ignore[arg-type]
        return losses.sum(), {
            "predictions": np.array([metrics.plain_text(text) for text in written]),
            "scores": losses.sum(1).cpu().numpy(),  # nats per target
            "tokens": (labels != IGNORE).sum(1).cpu().numpy(),
        }

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        """`labels` are the right texts, so that equal entries of `predictions` are exact matches."""
        known = read_references(self.store[split])
        right = [known[row]["target"] for row in arrays["ids"].tolist()]
        found = metrics.written_texts(right, arrays["predictions"].tolist())
        means = {name: float(values.mean()) for name, values in found.items()}
        labels = np.array([metrics.plain_text(text) for text in right])
        language = metrics.language(loss_sum, count, self.store[split].meta["target_bytes"])
        return Measured(language | means, arrays | {"labels": labels} | found)


def write(model: PreTrainedModel, tokenizer: Any, inputs: dict[str, Tensor], **options: Any) -> list[str]:
    """The texts a model writes for its sources, as its generation config says and `options` change it."""
    sharded = isinstance(model, FSDPModule)
    if sharded and "generate" not in vars(model):
        # It calls the encoder on its own; `synced_gpus`: everyone goes on as long as anyone does.
        register_fsdp_forward_method(model, "generate")
    ids = model.generate(**inputs, synced_gpus=sharded, **options)  # type: ignore[operator]
    return tokenizer.backend_tokenizer.decode_batch(ids.tolist(), skip_special_tokens=True)


def set_writing(model: PreTrainedModel, store: Store) -> None:
    """Let the model write as it is measured, here and wherever its checkpoint is loaded: greedily.

    What another task left behind (beams, a least length, forbidden repetitions) would be in the way.
    """
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
