"""Task kinds, one module each. docs/extending.md says how to add one."""

from typing import TYPE_CHECKING

from oelm.system.plugins import Registry

if TYPE_CHECKING:
    from oelm.data.store import Store
    from oelm.data.tasks.base import Objective, TaskKind

# Imported when they are first used: they need most of the package.
KINDS: "Registry[TaskKind]" = Registry(
    "task kind",
    {
        "classification": "oelm.data.tasks.classification:KIND",
        "lm": "oelm.data.tasks.language_modeling:KIND",
        "token-classification": "oelm.data.tasks.token_classification:KIND",
        "question-answering": "oelm.data.tasks.question_answering:KIND",
        "seq2seq": "oelm.data.tasks.seq2seq:KIND",
        "regression": "oelm.data.tasks.regression:KIND",
    },
)


def task_kind(name: str) -> "TaskKind":
    """The task kind of that name, as it stands in prepared datasets."""
    return KINDS.find(name)


def make_objective(
    store: "Store", window: int, label_smoothing: float = 0.0, class_weights: str = "none"
) -> "Objective":
    """The objective of a prepared dataset; a corpus is cut into windows of so many tokens."""
    return task_kind(store.kind).objective(store, window, label_smoothing, class_weights)
