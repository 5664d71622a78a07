"""The tasks known by name, as data: where each is stored, its columns, its splits.

Splits are fixed, never drawn per seed. `held out` is a part of the training rows that depends on the texts
alone. GLUE does not publish its test labels, so its validation split is our test split.
"""

from dataclasses import dataclass, field, replace

from oelm.errors import UserError

HELD_OUT = "held out"
NLI = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class Hub:
    """A dataset on the Hugging Face hub. `revision` names a Parquet copy if the dataset itself is a loading
    script, which `datasets` no longer runs."""

    path: str
    config: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Task:
    """One task; `kind` is a name in `oelm.data.tasks`. `train`, `validation` and `test` name the source's
    splits, or HELD_OUT.

    `columns` maps our roles (text, text_pair, label, tokens, tags, ...) to the source's columns;
    `group` says which rows must stay together when a split is held out.
    """

    name: str
    kind: str
    hub: Hub | None
    folder: str
    columns: dict[str, str]
    metric: str
    labels: tuple[str, ...] | None = None
    train: tuple[str, ...] = ("train",)
    validation: str = "validation"
    test: str | None = "test"
    held_out: float = 0.1  # the share of the training rows that HELD_OUT takes
    drop_unlabelled: bool = False  # rows labelled -1 are dropped and counted, not refused
    group: str | None = None  # "contains": phrases within one another; "text": equal first texts
    separate: bool = True  # a corpus: rows are documents (True) or lines of articles (False)
    train_on: dict[str, tuple[str, ...]] = field(default_factory=dict)  # choices: name -> task names


def _pair(first: str, second: str) -> dict[str, str]:
    return {"text": first, "text_pair": second, "label": "label"}


def _glue(name: str, columns: dict[str, str], labels: tuple[str, ...], **changes: object) -> Task:
    base = Task(
        name=name, kind="classification", hub=Hub("nyu-mll/glue", name), folder=name, columns=columns,
        metric="accuracy", labels=labels, validation=HELD_OUT, test="validation",
        group="text" if "text_pair" in columns else None,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def _corpus(name: str, hub: Hub, folder: str | None = None, **changes: object) -> Task:
    base = Task(name=name, kind="lm", hub=hub, folder=folder or name, columns={"text": "text"},
                metric="perplexity")  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


_SENTIMENT = {"text": "text", "label": "label"}
_TAGS_CONLL = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("imdb", "classification", Hub("stanfordnlp/imdb"), "imdb", _SENTIMENT, "accuracy",
             ("neg", "pos"), validation=HELD_OUT),
        Task("ag_news", "classification", Hub("fancyzhx/ag_news"), "ag_news", _SENTIMENT, "accuracy",
             ("World", "Sports", "Business", "Sci/Tech"), validation=HELD_OUT),
        _glue("sst2", {"text": "sentence", "label": "label"}, ("negative", "positive"), group="contains"),
        _glue("mnli", _pair("premise", "hypothesis"), NLI, test="validation_matched", held_out=0.05),
        Task("snli", "classification", Hub("stanfordnlp/snli"), "snli", _pair("premise", "hypothesis"),
             "accuracy", NLI, drop_unlabelled=True),
        Task("xnli", "classification", Hub("facebook/xnli", "en"), "xnli", _pair("premise", "hypothesis"),
             "accuracy", NLI, train_on={"mnli": ("mnli",), "snli+mnli": ("snli", "mnli")}),
        _glue("qnli", _pair("question", "sentence"), ("entailment", "not_entailment"), held_out=0.05),
        _glue("qqp", _pair("question1", "question2"), ("not_duplicate", "duplicate"), metric="f1_macro",
              held_out=0.05),
        _glue("mrpc", _pair("sentence1", "sentence2"), ("not_equivalent", "equivalent"), metric="f1_macro"),
        _glue("rte", _pair("sentence1", "sentence2"), ("entailment", "not_entailment")),
        _corpus("tinystories", Hub("roneneldan/TinyStories"), validation=HELD_OUT, test="validation",
                held_out=0.01),
        _corpus("openwebtext", Hub("Skylion007/openwebtext", revision="refs/convert/parquet"),
                validation=HELD_OUT, test=HELD_OUT, held_out=0.0005),
        _corpus("wikitext-103", Hub("Salesforce/wikitext", "wikitext-103-raw-v1"), "wikitext-103-raw",
                separate=False),
        _corpus("wikitext-2", Hub("Salesforce/wikitext", "wikitext-2-raw-v1"), "wikitext-2-raw",
                separate=False),
        _corpus("imdb-text", Hub("stanfordnlp/imdb"), "imdb", train=("unsupervised",), validation=HELD_OUT,
                held_out=0.02),
        Task("conll2003", "token-classification", Hub("eriktks/conll2003", revision="refs/convert/parquet"),
             "conll2003", {"tokens": "tokens", "tags": "ner_tags"}, "entity_f1", _TAGS_CONLL),
        Task("ptb-pos", "token-classification", None, "ptb-pos", {"tokens": "tokens", "tags": "tags"},
             "token_accuracy", validation=HELD_OUT),
        Task("squad", "question-answering", Hub("rajpurkar/squad"), "squad",
             {"id": "id", "question": "question", "context": "context", "answers": "answers"}, "f1",
             validation=HELD_OUT, test="validation", group="text"),
    )
}  # fmt: skip


def get_task(name: str) -> Task:
    """The task of that name; the error for an unknown name lists the known ones."""
    if name not in TASKS:
        raise UserError(f"there is no task {name!r}; known: {', '.join(sorted(TASKS))}")
    return TASKS[name]
