"""The published BERT experiments by name, from folders: a small random BERT in the layout of the real one."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from tokenizers import BertWordPieceTokenizer

from oelm.config import resolve_config
from oelm.models.build import build_model
from oelm.orthogonal import q_factor, to_blocks, to_weight
from oelm.study.catalogue import experiment_config, list_experiments
from oelm.training.resolve import prepare_data
from tests.command_line import caller
from tests.data.made import parquet, sentence

BERT = ("XNLI-01", "XNLI-02", "SST2-01", "SST2-02", "MNLI-01", "MNLI-02")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """`bert/` with model and tokenizer as the hub has them, `data/` with the tasks' files."""
    root, rng = tmp_path_factory.mktemp("local"), random.Random(0)
    texts = [sentence(rng) for _ in range(300)]
    learned = BertWordPieceTokenizer(lowercase=True)
    learned.train_from_iterator(texts, vocab_size=120, min_frequency=1, show_progress=False)
    words = transformers.BertTokenizer(vocab=learned.get_vocab(), do_lower_case=True)
    words.save_pretrained(root / "bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**sizes, vocab_size=len(words)))
    with torch.no_grad():  # far from any initial values, as pretrained weights are
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(root / "bert")
    n = 90
    for split in ("train", "validation"):
        rows = [f"{sentence(rng)} {split} {i}" for i in range(n)]
        parquet(root / "data" / "sst2" / f"{split}.parquet", sentence=rows, label=[i % 2 for i in range(n)])
    for folder, splits in (("mnli", ("train", "validation_matched")), ("xnli", ("validation", "test"))):
        for split in splits:
            pairs = {k: [sentence(rng, 3, 90) for _ in range(n)] for k in ("premise", "hypothesis")}
            parquet(root / "data" / folder / f"{split}.parquet", label=[i % 3 for i in range(n)], **pairs)
    return root


@pytest.fixture
def oelm_cli(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    monkeypatch.setenv("OELM_CACHE_DIR", str(world / "cache"))
    monkeypatch.setenv("OELM_DATA_DIR", str(world / "data"))
    return caller(monkeypatch, capsys)


@pytest.mark.parametrize("name", BERT)
def test_runs_by_name_from_local_folders(name, oelm_cli, world, tmp_path):
    short = ("--steps", 20, "--set", "training.eval_every=10", "--set", "training.log_every=1")
    code, _, err = oelm_cli("train", name, "--model", "bert", *short, "--out", tmp_path / "run")
    assert code == 0, err
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["status"], results["experiment"], results["model"]) == ("completed", name, "bert")
    assert results["parameters"]["frozen"] == (2 * 2 * (32 * 32 + 32) if name.endswith("02") else 0)
    assert results["best"]["split"] == ("validation" if name.startswith("XNLI") else "test")
    config = resolve_config(experiment_config(name).to_dict(), None, {}, [])
    batch = 16 if name.startswith("XNLI") else 32
    assert (config.training.batch_size, config.task.max_length, config.training.epochs) == (batch, 128, 3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if line["kind"] == "train"]
    # Up over 10 % of the steps, then down in a line that reaches 0 after the last.
    expected = [config.training.lr * r for r in (0.5, 1.0, *(1 - i / 18 for i in range(18)))]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def start_of(name, world, monkeypatch):
    monkeypatch.setenv("OELM_CACHE_DIR", str(world / "cache"))
    monkeypatch.setenv("OELM_DATA_DIR", str(world / "data"))
    config = resolve_config(experiment_config(name).to_dict(), None, {"model.name": str(world / "bert")}, [])
    config, store = prepare_data(config, torch.device("cpu"), show=False)
    model, report = build_model(config, store)
    return model, report, store


@pytest.mark.parametrize("name", ["XNLI-01", "XNLI-02", "MNLI-01"])
def test_what_each_method_makes_of_pretrained_weights(name, world, monkeypatch):
    model, report, _ = start_of(name, world, monkeypatch)
    pretrained = transformers.BertModel.from_pretrained(world / "bert").state_dict()
    seen = 0
    for path, weight in model.bert.state_dict().items():
        before = pretrained[path].numpy()
        if not (".query." in path or ".key." in path):
            np.testing.assert_array_equal(weight.numpy(), before, err_msg=path)
            continue
        seen += 1
        if name == "MNLI-01":
            np.testing.assert_array_equal(weight.numpy(), before)
        elif name == "XNLI-02" and path.endswith("weight"):
            np.testing.assert_allclose(weight.numpy(), to_weight(q_factor(to_blocks(before, 4))), atol=1e-6)
        elif name == "XNLI-01" and path.endswith("weight"):
            assert 0.018 < weight.std() < 0.022 < before.std()
        elif name == "XNLI-01":
            assert not weight.any(), "a bias belongs to the weight it was trained with"
    assert seen == 2 * 2 * 2
    assert (report.frozen > 0) == (name == "XNLI-02")


def test_pairs_are_encoded_as_bert_wants_them(world, monkeypatch):
    """Against the folder's own tokenizer: [CLS] a [SEP] b [SEP], token types, the longer text cut at 128."""
    import pyarrow.parquet

    _, _, store = start_of("XNLI-02", world, monkeypatch)
    rows = pyarrow.parquet.read_table(world / "data" / "xnli" / "test.parquet").to_pylist()
    words = transformers.AutoTokenizer.from_pretrained(world / "bert")
    split, cut = store["test"], 0
    for item in range(len(split)):
        row = rows[int(split.ids[item])]
        ids = np.array(split.tokens[split.offsets[item] : split.offsets[item + 1]])
        types = (np.arange(len(ids)) >= split.second[item]).astype(int)
        whole = words(row["premise"], row["hypothesis"])
        if len(whole["input_ids"]) <= 128:
            assert ids.tolist() == whole["input_ids"] and types.tolist() == whole["token_type_ids"]
        else:
            cut += 1
            assert len(ids) == 128 and (ids == words.sep_token_id).sum() == 2
            assert (ids[0], ids[-1], types[-1]) == (words.cls_token_id, words.sep_token_id, 1)
    assert 0 < cut < len(split)


@pytest.mark.parametrize("name", [e.id for e in list_experiments()])
def test_another_model_brings_its_tokenizer_where_the_first_did(name):
    config = resolve_config(experiment_config(name).to_dict(), None, {}, [])
    own = config.task.tokenizer == config.model.name
    assert own == (name in BERT)
    other = resolve_config(experiment_config(name).to_dict(), None, {"model.name": "folder"}, [])
    assert other.task.tokenizer == (None if own else config.task.tokenizer)
    flags = {"model.name": "folder", "task.tokenizer": "gpt2"}
    asked = resolve_config(experiment_config(name).to_dict(), None, flags, [])
    assert asked.task.tokenizer == "gpt2"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("XNLI-01",), "name a folder that holds the model and its tokenizer with --model"),
        (("SST2-02", "--model", "bert"), "name a folder that holds it with --data-dir or OELM_DATA_DIR"),
    ],
)
def test_without_hub_and_folder_one_line_says_what_to_do(words, advice, world, tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OELM_", "HF_"))}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "OELM_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "oelm", "train", *words, "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, cwd=world, env=kept | offline, capture_output=True, text=True)
    assert ended.returncode == 2
    assert advice in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stderr.strip().count("\n") == 0
