"""Token classification: words with one tag each; the tag is at the first token of each word."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.data.assemble import Array, Batch
from oelm.data.batches import ranges
from oelm.data.catalogue import Task
from oelm.data.dataset import Dataset
from oelm.data.preparation import Lengths, Rows, write_items
from oelm.data.store import IGNORE, Split, Store
from oelm.data.tasks.base import Baselines, Columns, Items, Measured, Objective, Reader, Splits, TaskKind
from oelm.data.tokenizer import Encoder
from oelm.errors import UserError

MOST_TAGS = 1000  # of a user's file, if they are numbers
Entity = tuple[str, int, int]  # type, index of the first word, index after the last


class TaggingObjective(Objective):
    def count(self, split: str, items: Array) -> int:
        part = self.store[split]
        indices = ranges(part.offsets[items], part.lengths[items])
        return int((part.tags[indices] != IGNORE).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**batch.inputs).logits.float()
        return token_loss(logits, batch.targets["labels"], self.label_smoothing)

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | Array]]:
        logits = model(**batch.inputs).logits.float()
        labels = batch.targets["labels"]
        loss = token_loss(logits, labels, 0.0)
        width = int(self.store.max_length)  # one width for all batches, so that they stack
        pad = (0, width - labels.shape[1])
        return loss, {
            "labels": F.pad(labels, pad, value=IGNORE).short(),
            "predictions": F.pad(logits.argmax(-1), pad).short(),
        }

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        names = np.array(self.store.label_names)
        kept = arrays["labels"] != IGNORE
        truth = [names[row[keep]].tolist() for row, keep in zip(arrays["labels"], kept, strict=True)]
        guess = [names[row[keep]].tolist() for row, keep in zip(arrays["predictions"], kept, strict=True)]
        counts = tag_counts(truth, guess)
        return Measured({"loss": loss_sum / count, **tagging_metrics(counts)}, arrays | counts)


def token_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The sum over the tokens that have a label."""
    options: dict[str, Any] = {"ignore_index": IGNORE, "label_smoothing": smoothing, "reduction": "sum"}
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


class TagReader(Reader):
    """The tag of every word; None for words beyond the model's maximum length."""

    says = ("words", "tags")
    reads = ("tokens",)

    def encode(self, lines: list[str]) -> Items:
        tokens, lengths, firsts, cut = self.encoder.words([line.split() for line in lines])
        starts = np.split(firsts, np.cumsum(lengths)[:-1])
        return Items(tokens, lengths, sum(map(len, self.encoder.single)), cut, more={"starts": starts})

    def outputs(self, inputs: dict[str, Any], second: Array | None) -> tuple[Any, ...]:
        return (self.model(**inputs).logits.argmax(-1),)

    def answer(self, line: str, items: Items, mine: range, said: list[Any]) -> dict[str, Any]:
        ((predicted,),), starts = said, items.more["starts"][mine.start]
        words, names = line.split(), self.model.config.id2label
        tags: list[str | None] = [None] * len(words)
        for token in np.flatnonzero(starts >= 0):
            tags[starts[token]] = names[int(predicted[token])]
        return {"words": words, "tags": tags}


class TokenClassification(TaskKind):
    name = "token-classification"
    does = "tag words"
    auto_class = "AutoModelForTokenClassification"
    metrics = dict.fromkeys(("token_accuracy", "entity_f1", "entity_precision", "entity_recall"), True)
    metrics |= {"loss": False}
    metric = "token_accuracy"
    objective = TaggingObjective
    reader = TagReader

    def file_columns(self, text: str, text_pair: str | None, label: str, target: str | None) -> Columns:
        if text_pair:
            raise UserError(
                "tagging reads one column of words and one of tags; text_pair does not go with it"
            )
        return {"tokens": "tokens" if text == "text" else text, "tags": "tags" if label == "label" else label}

    def read_file(self, dataset: Dataset, splits: int) -> None:
        """Find the names of the tags, which must all be words, or all be numbers from 0."""
        tags: set[str | int] = set()
        for part in dataset.parts:
            for first, chunk in part.rows():
                for row, (words, named) in enumerate(zip(chunk["tokens"], chunk["tags"], strict=True), first):
                    lists = isinstance(words, list) and isinstance(named, list)
                    if words is not None and not (lists and all(isinstance(tag, str | int) for tag in named)):
                        raise UserError(
                            f"{part.source.where(row)}: tagging needs a list of words and a list of tags, as "
                            ".conll, .jsonl and .parquet files can hold"
                        )
                    tags.update(named if words else ())
        numbers = [tag for tag in tags if isinstance(tag, int)]
        if numbers and (len(numbers) < len(tags) or not 0 <= min(numbers) <= max(numbers) < MOST_TAGS):
            raise UserError(
                f"{dataset.name}: tags must all be words, or all numbers from 0 to {MOST_TAGS - 1}"
            )
        dataset.label_names = [str(i) for i in range(max(numbers) + 1)] if numbers else sorted(map(str, tags))

    def item_texts(self, row: dict[str, Any]) -> tuple[str, ...]:
        return (" ".join(row["tokens"]),)

    def read_task(self, dataset: Dataset, task: Task) -> None:
        """Find the tags of a task without a fixed list, in all splits; a model that never saw one of them in
        train gets it wrong."""
        if not dataset.label_names:
            rows = (chunk["tags"] for part in dataset.parts for _, chunk in part.rows())
            dataset.label_names = sorted({tag for chunk in rows for tags in chunk for tag in tags})

    def write(self, dataset: Dataset, tokenizer: Any, folder: Path, lengths: Lengths, show: bool) -> Splits:
        """Columns: tokens and tags (parallel), offsets, ids, `words` (words per item before truncation)."""
        encoder = Encoder(tokenizer, lengths.text)
        number = {name: i for i, name in enumerate(dataset.label_names)}

        def encode(rows: Rows) -> dict[str, Any]:
            sentences = rows.columns["tokens"]
            given = zip(rows.numbers.tolist(), sentences, rows.columns["tags"], strict=True)
            where = rows.part.source.where
            tags = [_tags(where(row), words, named, number) for row, words, named in given]
            tokens, sizes, firsts, cut = encoder.words(sentences)
            flat = np.full(len(tokens), IGNORE, dtype=np.int64)
            item = np.repeat(np.arange(len(sizes)), sizes)
            # `firsts`: the number of the word a token starts, or -1; look it up in all items' tags.
            starts = np.cumsum([0, *map(len, tags)])[:-1]
            begins = firsts >= 0
            flat[begins] = np.concatenate(tags)[starts[item[begins]] + firsts[begins]]
            size = sum(len(word.encode()) for words in sentences for word in words)
            counts = np.array([len(words) for words in sentences])
            values = {"tokens": tokens, "lengths": sizes, "tags": flat, "words": counts}
            return values | {"bytes": size, "truncated": cut}

        dtypes = {"tokens": encoder.dtype, "tags": np.int16, "words": np.uint32}
        splits = write_items(dataset, folder, dtypes, encode, show)
        for split in splits:
            tags = np.load(folder / f"{split}.tags.npy")
            counts = np.bincount(tags[tags != IGNORE], minlength=len(number))
            splits[split]["class_counts"] = counts.tolist()
        return splits

    def trivial_baselines(self, store: Store, splits: list[Split]) -> Baselines:
        """`most_frequent_tag`: each token's most frequent tag in train or, for an unseen token, the most
        frequent of all; ties: the first."""
        tags = np.asarray(store["train"].tags, dtype=np.int64)
        tagged = tags != IGNORE
        classes = len(store.label_names)
        cells, counts = np.unique(
            np.asarray(store["train"].tokens[tagged], dtype=np.int64) * classes + tags[tagged],
            return_counts=True,
        )
        best = np.full(store.vocab_size, np.bincount(tags[tagged], minlength=classes).argmax())
        order = np.lexsort((-cells, counts))  # rising counts: the last one assigned is the most frequent
        best[cells[order] // classes] = cells[order] % classes
        return {"most_frequent_tag": {split.name: _tag_scores(store, split, best) for split in splits}}


KIND = TokenClassification()


def tag_counts(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, Array]:
    """Per sequence: `tags` and how many of them are `right`; and, if all tags are O, B-* or I-*, `entities`,
    `entities_predicted`, and how many of these are right (`entities_right`). Entities are read as conlleval
    does: an I- that does not continue an entity of its type begins one."""
    pairs = [*zip(truth, predicted, strict=True)]
    counts = {
        "tags": [len(true) for true in truth],
        "right": [sum(a == b for a, b in zip(true, guess, strict=True)) for true, guess in pairs],
    }
    tags = {tag for rows in (truth, predicted) for row in rows for tag in row}
    if all(tag == "O" or tag.startswith(("B-", "I-")) for tag in tags):
        entities = [(_entities(true), _entities(guess)) for true, guess in pairs]
        counts["entities"] = [len(gold) for gold, _ in entities]
        counts["entities_predicted"] = [len(guessed) for _, guessed in entities]
        counts["entities_right"] = [len(gold & guessed) for gold, guessed in entities]
    return {name: np.array(values, dtype=np.int64) for name, values in counts.items()}


def tagging_metrics(counts: dict[str, Array]) -> dict[str, float]:
    """Token accuracy and, if entities were counted, their precision, recall and F1 over all sequences. An
    entity is right if its type and extent are; without any entities the scores are 0."""
    total = {name: int(values.sum()) for name, values in counts.items()}
    scores = {"token_accuracy": _ratio(total["right"], total["tags"])}
    if "entities" not in total:
        return scores
    real, claimed, hits = total["entities"], total["entities_predicted"], total["entities_right"]
    return scores | {
        "entity_precision": _ratio(hits, claimed),
        "entity_recall": _ratio(hits, real),
        "entity_f1": _ratio(2 * hits, real + claimed),
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _entities(tags: Sequence[str]) -> set[Entity]:
    entities: set[Entity] = set()
    start = 0
    inside: str | None = None  # the type of the entity we are in
    for index, tag in enumerate([*tags, "O"]):
        kind = None if tag == "O" else tag[2:]
        if inside is not None and (kind != inside or tag.startswith("B-")):
            entities.add((inside, start, index))
            inside = None
        if kind is not None and inside is None:
            inside, start = kind, index
    return entities


def _tag_scores(store: Store, split: Split, best: Array) -> dict[str, Any]:
    names = np.array(store.label_names, dtype=object)
    tags = np.asarray(split.tags, dtype=np.int64)
    tagged = tags != IGNORE
    before = np.concatenate([[0], np.cumsum(tagged)])  # the number of tagged tokens before each index
    bounds = before[split.offsets[1:-1]]
    truth = np.split(names[tags[tagged]], bounds)
    predicted = np.split(names[best[split.tokens[tagged]]], bounds)
    return tagging_metrics(tag_counts([row.tolist() for row in truth], [row.tolist() for row in predicted]))


def _tags(place: str, words: list[str], tags: Any, number: dict[str, int]) -> Array:
    """The tags of one row as numbers, one per word."""
    if not isinstance(tags, list) or len(tags) != len(words):
        count = len(tags) if isinstance(tags, list) else "no"
        raise UserError(f"{place}: {len(words)} words and {count} tags; one per word is needed")
    numbers = [number.get(tag, -1) if isinstance(tag, str) else tag for tag in tags]
    for tag, value in zip(tags, numbers, strict=True):
        if not isinstance(value, int) or not 0 <= value < len(number):
            raise UserError(f"{place}: tag {tag!r} is not one of 0 to {len(number) - 1}")
    return np.array(numbers, dtype=np.int64)
