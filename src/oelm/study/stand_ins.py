"""Made-up data, tokenizers and weights, in the right shape, for those that are not on this machine.

Texts are as long as real ones and their labels can be learned; a tokenizer has the vocabulary size of the one
it replaces, so that parameter counts are exact. Of a real corpus a sample is enough for a few steps.
"""

import itertools
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from huggingface_hub import try_to_load_from_cache
from transformers import BertConfig, BertModel, BertTokenizer, GPT2Tokenizer

from oelm.config import RunConfig, TaskConfig
from oelm.data import TASKS
from oelm.data.catalogue import HELD_OUT, Task
from oelm.data.sources import split_files
from oelm.data.tasks import task_kind
from oelm.system.files import write_json

EVALUATED = 32  # rows of a split that is only evaluated
LARGEST_BATCH = 32  # of the catalogue
HEAD = 50_000  # rows at the beginning of a real file, over which a sample is spread
DOCUMENT = 20_000  # characters that are kept of a real document
BERT = "bert-base-uncased"
VOCABULARY = {"gpt2": 50_257, BERT: 30_522}
# Made-up words of a text, on average. Each is two or three tokens; a corpus has documents.
WORDS, DOCUMENT_WORDS = {"imdb": 120, "ag_news": 20, "sst2": 6, "mnli": 8, "xnli": 8}, 80
SHORT, SMALL_GPT = 32, "gpt-tiny"  # the texts and models of `shrink`
SMALL_BERT = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


class StandIns:
    """Makes each thing once, in a folder that the caller deletes. `shrink`: small models, short texts."""

    def __init__(self, folder: Path, data_dir: Path | None, steps: int, shrink: bool) -> None:
        self.folder, self.data_dir, self.steps, self.shrink = folder, data_dir, steps, shrink
        self._data: dict[str, str] = {}  # task -> "real" or "made-up"

    def fit(self, config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
        """A config that runs here, and what was replaced: {"task.data_dir": "made-up", ...}."""
        task, model, name = config.task, config.model, str(config.task.name)
        data = self.folder / "data" / name
        if name not in self._data:
            self._data[name] = self._write(task, data)
        replaced = {"task.data_dir": self._data[name]}
        task = replace(task, data_dir=str(data))
        if not available_offline(str(task.tokenizer), "tokenizer.json"):
            task = replace(task, tokenizer=self._tokenizer(str(task.tokenizer), data))
            replaced["task.tokenizer"] = "made-up"
        if self.shrink:
            task, model = replace(task, max_length=SHORT), replace(model, name=SMALL_GPT)
            replaced |= {"task.max_length": str(SHORT), "model.name": "shrunk"}
        if config.model.name == BERT and (self.shrink or not available_offline(BERT, "model.safetensors")):
            model = replace(model, name=self._bert())
            replaced.setdefault("model.name", "random weights")
        return replace(config, task=task, model=model), replaced

    def _write(self, config: TaskConfig, folder: Path) -> str:
        """Write a task's splits as a data folder has them; returns whether they are "real" or "made-up"."""
        task = TASKS[str(config.name)]
        trained = [TASKS[name] for name in task.train_on.get(config.train_on or "", (task.name,))]
        splits = [(other, split, self._rows(task)) for other in trained for split in other.train]
        others = (task.validation, task.test)
        splits += [(task, split, EVALUATED) for split in others if split not in (None, HELD_OUT)]
        root = self.data_dir
        files = [split_files(root, other, split) if root else [] for other, split, _ in splits]
        for (other, split, rows), paths in zip(splits, files, strict=True):
            table = _sample(other, paths, rows) if all(files) else self._make_up(other, split, rows)
            (folder / other.folder).mkdir(parents=True, exist_ok=True)
            pq.write_table(table, folder / other.folder / f"{split}.parquet")
        return "real" if all(files) else "made-up"

    def _rows(self, task: Task) -> int:
        """The number of training rows: enough for the steps and for the share that is held out."""
        if not task_kind(task.kind).stream:
            return 400 + round(1.25 * self.steps * LARGEST_BATCH)
        tokens = self.steps * LARGEST_BATCH * (SHORT if self.shrink else 512)
        return round(max(8 / task.held_out, tokens / DOCUMENT_WORDS))

    def _make_up(self, task: Task, split: str, rows: int) -> pa.Table:
        """Texts of made-up words with natural frequencies; every fourth word of a text depends on its
        label."""
        draw = np.random.default_rng(len(split))
        syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
        words = ["".join(parts) for n in (1, 2, 3) for parts in itertools.product(syllables, repeat=n)][
            :20_000
        ]
        likely = 1 / np.arange(10, 10 + len(words))
        mean = min(WORDS.get(task.name, DOCUMENT_WORDS), SHORT // 2 if self.shrink else 1_000)
        columns: dict[str, list[Any]] = {}
        labels = [row % len(task.labels) for row in range(rows)] if task.labels else None
        for role, column in task.columns.items():
            if role == "label":
                columns[column] = labels or []
                continue
            lengths = np.maximum(2, draw.lognormal(math.log(mean) - 0.125, 0.5, rows).astype(int)).tolist()
            drawn = iter(draw.choice(words, sum(lengths), p=likely / likely.sum()).tolist())
            texts = [list(itertools.islice(drawn, length)) for length in lengths]
            for text, label in zip(texts, labels or (), strict=False):
                text[::4] = [syllables[label]] * len(text[::4])
            columns[column] = [" ".join([*text, split, str(row)]) for row, text in enumerate(texts)]
        return pa.table(columns)

    def _tokenizer(self, name: str, data: Path) -> str:
        """A folder with a tokenizer of the same kind and vocabulary size, trained on the task's texts."""
        folder = data / "tokenizers" / name
        if not folder.exists():
            table = pq.read_table(next(data.glob("*/train.parquet")))
            texts = next(table[column] for column in table.column_names if column != "label").to_pylist()
            base: Any = BertTokenizer() if name == BERT else GPT2Tokenizer()
            made = base.train_new_from_iterator(texts[:2_000], VOCABULARY[name], show_progress=False)
            folder.mkdir(parents=True)
            made.backend_tokenizer.model.save(str(folder))  # vocab.txt, or vocab.json and merges.txt
            unused = {f"<unused{i}>": i for i in range(len(made), VOCABULARY[name])}
            if name == BERT:
                with (folder / "vocab.txt").open("a", encoding="utf-8") as file:
                    file.writelines(f"{token}\n" for token in unused)
            else:
                write_json(folder / "vocab.json", made.get_vocab() | unused)
        return str(folder)

    def _bert(self) -> str:
        """A folder with random weights in bert-base-uncased's shape."""
        folder = self.folder / BERT
        if not folder.exists():
            sizes: dict[str, Any] = SMALL_BERT if self.shrink else {}
            BertModel(BertConfig(**sizes)).save_pretrained(folder)
        return str(folder)


def available_offline(name: str, file: str) -> bool:
    """Whether a tokenizer or a model, of which this is one file, can be loaded without a network."""
    root = os.environ.get("OELM_TOKENIZER_DIR")
    own = file == "tokenizer.json" and root and (Path(root) / name).is_dir()
    return bool(own) or Path(name).is_dir() or isinstance(try_to_load_from_cache(name, file), str)


def _sample(task: Task, paths: list[Path], rows: int) -> pa.Table:
    """Rows spread over the beginning of a real split: files may be sorted by label."""
    table = ds.dataset([str(path) for path in paths]).head(HEAD, columns=list(task.columns.values()))
    table = table.take(np.linspace(0, len(table) - 1, min(rows, len(table))).astype(int))
    if task_kind(task.kind).stream:
        table = pa.table({"text": pc.utf8_slice_codeunits(table[task.columns["text"]], 0, DOCUMENT)})
    return table
