"""Tensors from a store, against Hugging Face's collator and the texts themselves."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DataCollatorWithPadding

from oelm.data import Plan, Store, load_file, packed_batch, padded_batch, prepare
from oelm.data.assemble import round_width
from tests.data.made import sentence, write_csv


@pytest.fixture(scope="module")
def stores(bert: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    folder = tmp_path_factory.mktemp("stores")
    bert.save_pretrained(folder / "bert")
    rng = random.Random(0)
    rows = [[sentence(rng), sentence(rng), "ab"[i % 2]] for i in range(80)]
    path = write_csv(folder / "x.csv", ["text", "other", "label"], rows)
    single = prepare(load_file(path), tokenizer="train:300", cache=folder)
    pairs = prepare(load_file(path, text_pair="other"), tokenizer=str(folder / "bert"), cache=folder)
    return {"single": single, "pairs": pairs}


picks = st.lists(st.integers(0, 63), min_size=1, max_size=20).map(np.array)


@given(picks, st.sampled_from(["single", "pairs"]))
def test_unpacking_a_packed_batch_gives_the_items_back(
    stores: dict[str, Store], items: np.ndarray, which: str
) -> None:
    train = stores[which]["train"]
    batch = packed_batch(train, items)
    texts = torch.split(batch.inputs["input_ids"][0], torch.diff(batch.inputs["bounds"]).tolist())
    for item, tokens in zip(items, texts, strict=True):
        assert tokens.tolist() == train.tokens[train.offsets[item] : train.offsets[item + 1]].tolist()
    assert batch.targets["labels"].tolist() == train.labels[items].tolist()
    assert batch.ids.tolist() == train.ids[items].tolist()
    assert batch.longest == train.lengths[items].max()
    starts, positions = batch.inputs["bounds"][:-1].tolist(), batch.inputs["position_ids"][0]
    assert positions[starts].tolist() == [0] * len(items)
    assert int(positions.max()) == batch.longest - 1


@given(picks)
def test_padded_batches_are_what_the_collator_makes(stores: dict[str, Store], items: np.ndarray) -> None:
    store = stores["pairs"]
    train, tokenizer = store["train"], store.tokenizer()
    features = []
    for item in items:
        ids = train.tokens[train.offsets[item] : train.offsets[item + 1]].tolist()
        types = [int(i >= train.second[item]) for i in range(len(ids))]
        features.append(
            {"input_ids": ids, "token_type_ids": types, "attention_mask": [1] * len(ids),
             "labels": int(train.labels[item])}
        )  # fmt: skip
    expected = DataCollatorWithPadding(tokenizer)(features)
    batch = padded_batch(train, items, store.pad_id)
    assert batch.inputs.keys() | {"labels"} == set(expected)
    for name, value in (batch.inputs | batch.targets).items():
        assert torch.equal(value, expected[name]), name


def test_an_epoch_of_shares_holds_every_text_once(stores: dict[str, Store]) -> None:
    train = stores["single"]["train"]
    batches = Plan(train.lengths, batch_tokens=256, seed=3).epoch(1)
    ids = [
        padded_batch(train, batches.share(step, part, 2), 0).ids
        for step in range(len(batches))
        for part in range(2)
    ]
    assert sorted(np.concatenate(ids).tolist()) == sorted(train.ids.tolist())


def test_a_text_alone_has_no_segments(stores: dict[str, Store]) -> None:
    assert "token_type_ids" not in padded_batch(stores["single"]["train"], np.arange(2), 0).inputs


@given(st.integers(1, 1 << 14))
def test_round_widths_are_few_and_near(n):
    assert n <= round_width(n) < n + max(8, n // 8 + 1)
    assert round_width(round_width(n)) == round_width(n)
