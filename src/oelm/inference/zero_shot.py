"""Zero-shot classification by a language model: the verbalised label that is most likely after a prompt.

A prompt is the template with the text filled in; every class has a verbaliser, the words that follow the
prompt if the class is right. A class's score is the log-likelihood of its verbaliser given the prompt:

    sum          over the verbaliser's tokens
    mean         per token, so that longer verbalisers are not at a disadvantage
    calibrated   sum, minus the sum after the template filled with "N/A": how much more likely the text makes
                 the verbaliser (Holtzman et al. 2021; Zhao et al. 2021)
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch

from oelm.data import Choice
from oelm.data.assemble import Array, pad_rows
from oelm.data.batches import fill_batches
from oelm.data.preparation import split_chunks
from oelm.data.tasks import task_kind
from oelm.data.tasks.classification import classification_metrics
from oelm.data.tokenizer import Encoder, boundary_id, pad_id
from oelm.errors import UserError
from oelm.orthogonal import generator
from oelm.training.evaluate import LOGITS, TOKENS

FIELDS = ("text", "text_pair")
NOTHING = "N/A"  # the text of a prompt without content


def make_question(
    template: str, labels: str | None, names: list[str], pairs: bool
) -> tuple[str, dict[str, str]]:
    """The template, and each class's verbaliser. `labels` is `name=words,name=words`; None: " name" each."""
    template = template.replace("\\n", "\n")
    try:
        used = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise UserError(f"--template {template!r}: {error}; write {{{{ for a brace") from None
    allowed = FIELDS if pairs else FIELDS[:1]
    if not used or not used <= set(allowed):
        wanted = " and ".join(f"{{{name}}}" for name in allowed)
        raise UserError(f"--template {template!r} must hold {wanted}, and no other field")
    if labels is None:
        return template, {name: f" {name}" for name in names}
    given = dict(part.partition("=")[::2] for part in labels.split(","))
    given = {name.strip(): words for name, words in given.items()}
    if set(given) != set(names) or not all(words.strip() for words in given.values()):
        wanted = ",".join(f"{name}= words" for name in names)
        raise UserError(f"--labels {labels!r} must give words for each class: {wanted!r}")
    return template, {name: given[name] for name in names}


@dataclass(frozen=True)
class Items:
    """The texts of a split with their labels, and the most frequent class of the training part."""

    task: str
    texts: list[dict[str, str]]
    labels: Array
    names: list[str]
    most_frequent: int


def read_items(choice: Choice, split: str, limit: int | None, seed: int) -> Items:
    """The texts of a split or, with a limit, a sample of that many, drawn with the seed."""
    dataset = choice.load()
    if not task_kind(dataset.kind).class_labels:
        raise UserError(f"--zero-shot needs texts with one label each; {choice.data} is {dataset.kind}")
    texts: list[dict[str, str]] = []
    labels: list[int] = []
    counts = np.zeros(len(dataset.label_names), dtype=np.int64)
    for rows in split_chunks(dataset, False):
        given = rows.part.labels[rows.numbers]
        if rows.split == "train":
            counts += np.bincount(given, minlength=len(counts))
        if rows.split == split:
            fields = [field for field in FIELDS if field in rows.columns]
            columns = zip(*(rows.columns[field] for field in fields), strict=True)
            texts += [dict(zip(fields, row, strict=True)) for row in columns]
            labels += given.tolist()
    if not texts:
        raise UserError(f"{choice.data} has no split {split!r}; it has train, validation and test")
    chosen = np.arange(len(texts))
    if limit is not None:
        if limit < 1:
            raise UserError("--limit must be at least 1")
        chosen = np.sort(generator(seed, "items").permutation(len(texts))[:limit])
    kept, known = [texts[i] for i in chosen], np.array(labels)[chosen]
    return Items(dataset.name, kept, known, dataset.label_names, int(counts.argmax()))


def zero_shot(
    model: Any, tokenizer: Any, items: Items, template: str, labels: dict[str, str], window: int
) -> dict[str, Any]:
    """Accuracy and F1 by each score, and those of the most frequent class."""
    encoder = _PromptEncoder(tokenizer, template, labels, window)
    rows = [encoder.encode(texts) for texts in [dict.fromkeys(items.texts[0], NOTHING), *items.texts]]
    sums, counts = _likelihoods(model, pad_id(tokenizer), rows)
    scores = {"sum": sums[1:], "mean": sums[1:] / counts[1:], "calibrated": sums[1:] - sums[0]}
    n = len(items.names)
    majority = np.full_like(items.labels, items.most_frequent)
    return {
        "task": items.task,
        "items": len(items.labels),
        "template": template,
        "labels": labels,
        "cut": encoder.cut,
        "metrics": {
            name: classification_metrics(items.labels, values.argmax(1), n) for name, values in scores.items()
        },
        "references": {"majority": classification_metrics(items.labels, majority, n)},
    }


Row = list[tuple[list[int], int]]  # for each class its tokens, and how many of them are the prompt's


class _PromptEncoder:
    """Encodes prompts with their verbalisers. The text is cut if they do not fit the model's window."""

    def __init__(self, tokenizer: Any, template: str, labels: dict[str, str], window: int) -> None:
        self.encoder, self.window = Encoder(tokenizer, 1 << 30), window
        self.template, self.verbalisers = template, list(labels.values())
        self.before = self.encoder.single[0] or [boundary_id(tokenizer)]
        self.cut = 0

    def encode(self, texts: Mapping[str, str]) -> Row:
        given = texts
        while True:
            prompt = self.template.format(**texts)
            alone, *whole = self.encoder.ids([prompt, *(prompt + words for words in self.verbalisers)])
            longest = len(self.before) + max(map(len, whole)) - 1  # the last token is predicted, not read
            if longest <= self.window:
                break
            field = max(texts, key=lambda name: len(texts[name]))
            if not texts[field]:
                raise UserError(
                    f"--template and --labels alone need {longest} positions; this model reads {self.window}"
                )
            # Slightly shorter than in proportion, so that few attempts are needed.
            keep = int(len(texts[field]) * self.window / longest * 0.98)
            texts = {**texts, field: texts[field][:keep]}
        self.cut += texts is not given
        # A verbaliser may change the tokens of the prompt's last letters. The tokens that the prompt has with
        # every verbaliser count as the prompt; all others are scored.
        alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(alone, *whole, strict=False))
        own = len(self.before) + sum(1 for _ in alike)
        return [([*self.before, *ids], own) for ids in whole]


@torch.no_grad()
def _likelihoods(model: Any, pad: int, rows: list[Row]) -> tuple[Array, Array]:
    """The summed log-likelihood of each verbaliser of every item, and its number of tokens, (items,
    classes)."""
    shape = (len(rows), len(rows[0]))
    sums, counts = np.zeros(shape), np.zeros(shape)
    # Verbalisers of one token have the same input, which is computed once.
    wanted: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for i, row in enumerate(rows):
        for j, (ids, start) in enumerate(row):
            counts[i, j] = len(ids) - start
            wanted.setdefault(tuple(ids[:-1]), []).append((i, j))
    inputs = sorted(wanted, key=len)
    lengths = np.array([len(given) for given in inputs])
    vocabulary = int(model.config.get_text_config().vocab_size)
    most = min(TOKENS, LOGITS.get(model.device.type, 1 << 26) // vocabulary)  # tokens that fit into memory
    for start, end in pairwise([0, *fill_batches(lengths, most)]):
        batch = inputs[start:end]
        padded, real = map(torch.from_numpy, pad_rows(np.concatenate(batch), lengths[start:end], pad))
        mask = real.long().to(model.device)
        out = model(input_ids=padded.to(model.device), attention_mask=mask, use_cache=False)
        for k, given in enumerate(batch):
            for i, j in wanted[given]:
                tokens, first = rows[i][j]
                logs = out.logits[k, first - 1 : len(given)].float().log_softmax(-1)
                targets = torch.tensor(tokens[first:], device=logs.device)
                sums[i, j] = float(logs.gather(1, targets[:, None]).double().sum())
    if not np.isfinite(sums).all():
        raise UserError("the model gives likelihoods that are not finite; its weights may be damaged")
    return sums, counts
