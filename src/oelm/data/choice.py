"""A user's choice of data as one value: what the command line and a run's `[task]` table say."""

from dataclasses import dataclass
from pathlib import Path

from oelm.data.catalogue import TASKS
from oelm.data.dataset import Dataset
from oelm.data.preparation import prepare
from oelm.data.sources import load_file, load_task
from oelm.data.store import Store, open_store
from oelm.errors import UserError


@dataclass(frozen=True)
class Choice:
    """`data` is a task's name, a file, or the folder of a prepared store; the rest says how to read it.

    `tokenizer=None` means gpt2 for a task and train:8192 for a file.
    """

    data: str
    text: str = "text"
    text_pair: str | None = None
    label: str = "label"
    test_file: str | Path | None = None
    train_size: int | None = None
    split_seed: int = 0
    train_on: str | None = None
    data_dir: str | Path | None = None
    tokenizer: str | None = None
    max_length: int = 512
    target: str | None = None
    max_target_length: int | None = None
    kind: str | None = None
    metric: str | None = None

    def load(self) -> Dataset:
        """The rows, checked and assigned to splits."""
        if self.data in TASKS:
            for name in ("text_pair", "test_file", "target", "kind", "metric"):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"{self.data} is a task with fixed columns and splits; {name} is for files"
                    )
            return load_task(
                self.data, data_dir=self.data_dir, train_on=self.train_on, train_size=self.train_size
            )
        if not Path(self.data).suffix and not Path(self.data).exists():
            raise UserError(f"{self.data!r} is neither a task (see `oelm data list`) nor a file")
        return load_file(
            self.data, text=self.text, text_pair=self.text_pair, label=self.label, test_file=self.test_file,
            train_size=self.train_size, split_seed=self.split_seed, target=self.target, kind=self.kind,
            metric=self.metric,
        )  # fmt: skip

    def store(self, cache: str | Path | None = None, show_progress: bool = False) -> Store:
        """The prepared store: opened, found in the cache, or made."""
        if Path(self.data).is_dir() and self.data not in TASKS:
            return open_store(self.data)
        tokenizer = self.tokenizer or ("gpt2" if self.data in TASKS else "train:8192")
        return prepare(
            self.load(),
            tokenizer=tokenizer,
            max_length=self.max_length,
            max_target_length=self.max_target_length,
            cache=cache,
            show_progress=show_progress,
        )
