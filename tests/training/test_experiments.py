"""Every published experiment runs: its own configuration, two steps, on stand-in data."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

import oelm
from oelm.data import Choice
from oelm.study.catalogue import experiment_config, list_experiments
from oelm.training.loop import train

FAST = ("GPT-02", "IMDB-oelm", "XNLI-02")  # one of each kind of model; the others are the slow rest
WORDS = ("the", "a", "film", "was", "good", "bad", "and", "story", "of", "old", "house", "great", "poor")


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Data sets of a few short rows under the catalogue's names, and a vocabulary for BERT."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("stand-ins")
    draw = np.random.default_rng(0)
    text = lambda n=6: " ".join(draw.choice(WORDS, n))  # noqa: E731

    def write(folder, split, **columns):
        (root / "data" / folder).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), root / "data" / folder / f"{split}.parquet")

    n = 120
    pairs = lambda: {"premise": [text() for _ in range(n)], "hypothesis": [text() for _ in range(n)]}  # noqa: E731
    for folder, splits, classes, key in (
        ("imdb", ("train", "test"), 2, "text"),
        ("ag_news", ("train", "test"), 4, "text"),
        ("sst2", ("train", "validation"), 2, "sentence"),
    ):
        for split in splits:
            rows = {key: [f"{text()} {folder} {split} {i}" for i in range(n)]}
            write(folder, split, label=[i % classes for i in range(n)], **rows)
    for folder, splits in (("mnli", ("train", "validation_matched")), ("xnli", ("validation", "test"))):
        for split in splits:
            write(folder, split, label=[i % 3 for i in range(n)], **pairs())
    # Held-out shares of a corpus are small: 1 % and 0.05 % of the documents.
    for folder, splits, documents in (
        ("tinystories", ("train", "validation"), 300),
        ("openwebtext", ("train",), 12_000),
        ("wikitext-103-raw", ("train", "validation", "test"), 300),
    ):
        for split in splits:
            write(folder, split, text=[text(16) for _ in range(documents if split == "train" else 4)])
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (root / "bert").mkdir()
    (root / "bert" / "vocab.txt").write_text("\n".join([*vocabulary, *map(str, range(n))]))
    return root


def two_steps(name, root, out):
    config = experiment_config(name)
    model, tokenizer = config.model.name, "train:300"
    if model == "bert-base-uncased":
        tokenizer, model = str(root / "bert"), str(root / f"bert-{config.task.name}")
        if not Path(model).exists():
            transformers.BertModel(transformers.BertConfig()).save_pretrained(model)
    task = replace(config.task, data_dir=str(root / "data"), tokenizer=tokenizer)
    training = replace(config.training, steps=2, epochs=None, save_every=0)
    config = replace(config, task=task, model=replace(config.model, name=model), training=training)
    choice = Choice(
        str(task.name),
        train_on=task.train_on,
        data_dir=task.data_dir,
        tokenizer=task.tokenizer,
        max_length=task.max_length,
    )
    return train(config, choice.store(cache=root / "cache"), out, show=False)


@pytest.mark.parametrize(
    "name",
    [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in (e.id for e in list_experiments())],
)
def test_experiment_runs_two_steps(name, stand_ins, tmp_path):
    results = two_steps(name, stand_ins, tmp_path / "run")
    assert results["status"] == "completed"
    assert results["experiment"] == name
    assert results["steps"] == 2
    config = experiment_config(name)
    method = oelm.get_method(config.method.name)
    assert bool(results["parameters"]["frozen"]) == bool(method.freeze)
    if config.model.name == "gpt-medium-512":
        # 44,896,768 with GPT-2's 50,257 tokens; the stand-in's tokenizer has fewer.
        head = 512 * 3 + 3 if config.task.name == "xnli" else 0
        assert results["parameters"]["total"] < 44_896_768 + head
        assert results["parameters"]["frozen"] in (0, 3_145_728)
    else:
        assert results["parameters"]["frozen"] in (0, 14_174_208)
    expected = "test" if config.training.choose_on == "test" else "validation"
    assert results["best"]["split"] == expected
