"""An embedding that trains through windows takes the steps it would have taken without them."""

import shutil
import traceback

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification

from oelm.config import make_config
from oelm.data import Epoch, open_store, prepare
from oelm.data import load_file as read_file
from oelm.speed import step as fast_step
from oelm.speed.adamw import step_without_gradients
from oelm.speed.live_rows import live_weights, set_aside
from oelm.speed.row_windows import RowWindows
from oelm.training.loop import train
from tests.data.made import write_csv

WORDS = 600


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Short texts of many words: a batch has few of them, and so has a window."""
    folder, rng = tmp_path_factory.mktemp("windows"), np.random.default_rng(0)
    rows = [[" ".join(f"w{n}" for n in rng.integers(0, WORDS, 4)), ("no", "yes")[i % 2]] for i in range(300)]
    path = write_csv(folder / "many.csv", ["text", "label"], rows)
    made = prepare(read_file(path), tokenizer="train:1500", max_length=8, cache=folder / "cache")
    return open_store(made.folder)


def config(**values):
    training = {
        "steps": 45, "batch_size": 4, "eval_every": 20, "save_every": 7, "keep": 20, "lr": 1e-2, "seed": 1,
        "weight_decay": 0.1, "log_every": 1,
    }  # fmt: skip
    return make_config(
        {"task": {"data": "x", "max_length": 8}, "model": {"name": "gpt-tiny"}, "training": training | values}
    )


def files(run, step):
    at = run / "checkpoints" / f"step-{step:08d}"
    return load_file(at / "model.safetensors") | load_file(at / "optimizer.safetensors")


@pytest.fixture
def opened(monkeypatch):
    """How many rows the windows had, and of how many steps they were."""
    found = []
    real = RowWindows._open

    def watch(self, batches, k):
        real(self, batches, k)
        found.append((len(self.rows), self.end - self.first, self.capacity))

    monkeypatch.setattr(RowWindows, "_open", watch)
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_has_the_bits_of_one_without_windows(store, tmp_path, monkeypatch, opened, accumulate):
    """Weights and moments, at every checkpoint: within windows, at their ends, after evaluations."""
    asked = config(accumulate=accumulate, clip=0)  # the norm is a sum, whose order depends on the shape
    results = [train(asked, store, tmp_path / "windows", show=False)]
    assert {steps for _, steps, _ in opened} == {8} and len(opened) > 5
    assert all(rows <= capacity for rows, _, capacity in opened)
    monkeypatch.setattr(fast_step, "make_windows", lambda *_: None)
    results.append(train(asked, store, tmp_path / "dense", show=False))
    assert results[0]["test"]["metrics"] == results[1]["test"]["metrics"]
    for step in (7, 14, 21, 28, 35, 42, 45):
        mine, theirs = files(tmp_path / "windows", step), files(tmp_path / "dense", step)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs), step


def test_a_run_that_resumes_within_a_window_has_the_same_bits(store, tmp_path):
    run = tmp_path / "run"
    train(config(), store, run, show=False)
    whole = files(run, 45)
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 28:
            shutil.rmtree(folder)
    for name in ("results.json", "predictions.npz", "timing_stats.json", "freeze_audit.json"):
        (run / name).unlink()
    shutil.rmtree(run / "model")
    train(config(), store, run, show=False)
    again = files(run, 45)
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_windows_have_fewer_steps_where_the_table_is_small(store, tmp_path, monkeypatch, opened):
    def small(live, optimizer, store, plan):
        """As many rows as the largest batch may need."""
        live.windows = RowWindows(live, optimizer, store["train"], store.pad_id, 4 * 8 + 2)
        return live.windows

    monkeypatch.setattr(fast_step, "make_windows", small)
    train(config(save_every=0, clip=0), store, tmp_path / "small", show=False)
    assert all(rows <= capacity for rows, _, capacity in opened)
    assert {steps for _, steps, _ in opened} & {1, 2, 4}
    small = files(tmp_path / "small", 45)
    monkeypatch.setattr(fast_step, "make_windows", lambda *_: None)
    train(config(save_every=0, clip=0), store, tmp_path / "dense", show=False)
    assert all(torch.equal(small[n], value) for n, value in files(tmp_path / "dense", 45).items())


def test_there_are_none_where_steps_need_too_many_rows(store, tmp_path, opened):
    train(config(batch_size=100, steps=3, save_every=0), store, tmp_path / "most", show=False)
    train(config(batch_size=12, steps=3, save_every=0), store, tmp_path / "many", show=False)
    assert not opened


def test_missed_steps_are_training_and_their_time_is_counted(store, tmp_path, monkeypatch):
    """Whatever wants the embedding as a whole finds nothing left to do."""
    found = []
    real = RowWindows.write_back

    def watch(self):
        callers = {frame.name for frame in traceback.extract_stack()}
        found.append((bool(self.missed), bool(callers & {"capture", "evaluate"})))
        real(self)

    monkeypatch.setattr(RowWindows, "write_back", watch)
    train(config(), store, tmp_path / "run", show=False)
    assert (True, False) in found and (False, True) in found and (True, True) not in found


class Texts:
    """A split whose text i is the tokens of row i."""

    def __init__(self, tokens):
        self.tokens = tokens.reshape(-1)
        self.offsets = np.arange(len(tokens) + 1) * tokens.shape[1]
        self.lengths = np.full(len(tokens), tokens.shape[1])


def test_a_padding_row_stays_without_gradient_in_every_window():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ids = torch.randint(1, 400, (40, 6), generator=torch.Generator().manual_seed(0))
    used = np.arange(500) < 400
    epoch = Epoch(np.arange(40), np.arange(0, 41, 2))
    found = {}
    for windows in (True, False):
        torch.manual_seed(0)
        options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(vocab_size=500, **sizes, **options)).train()
        set_aside(model, used)
        (live,) = live_weights(model).values()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        if windows:
            live.windows = RowWindows(live, optimizer, Texts(ids.numpy()), 0, 250)
        for step in range(50):
            k = step % 20
            if live.windows is not None:
                live.windows.prepare(epoch, k)
            texts = torch.cat([ids[2 * k : 2 * k + 2], torch.zeros(2, 2, dtype=torch.int64)], 1)
            model(texts, (texts != 0).long(), labels=torch.tensor([0, 1])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if live.windows is not None:
                live.windows.count(1e-2)
        model.eval()  # folds
        assert not optimizer.state[live.weight]["exp_avg_sq"][live.padding].any()
        found[windows] = live.weight.detach().clone(), optimizer.state[live.weight]
    assert torch.equal(found[True][0], found[False][0])
    assert all(torch.equal(found[True][1][key], value) for key, value in found[False][1].items())


def test_coasting_is_adamw_without_a_gradient():
    """Beside PyTorch's own, rates that differ, and numbers that are not whole chunks."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(700, 5))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    weight.grad = torch.randn(700, 5)
    optimizer.step()
    state = optimizer.state[weight]
    mine = [x.detach().clone() for x in (weight, state["exp_avg"], state["exp_avg_sq"])]
    rates = [1e-2, 3e-3, 5e-2]
    step_without_gradients(*mine, rates, 1, torch.tensor(1.0 + len(rates)), optimizer.param_groups[0])
    weight.grad = torch.zeros(700, 5)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    for a, b in zip(mine, (weight, state["exp_avg"], state["exp_avg_sq"]), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-7)
