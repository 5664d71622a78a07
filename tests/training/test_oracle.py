"""Our training beside Hugging Face's Trainer: the same start, batches and recipe give the same losses.

Comparing our paths with each other cannot find a fault that they share. Trainer brings its own model code
(GPT-2), AdamW groups, clipping, accumulation and schedule; the runs themselves are in benchmarks/oracle.py.
In fp32 the two differ by rounding alone. How far 200 steps carry that depends on the task: where losses come
near 0, a run of Trainer from weights that differ in their last bit says how far.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils.data import Dataset

from benchmarks import oracle
from oelm.config import RunConfig, make_config
from oelm.data import Store, open_store
from oelm.data.tasks import make_objective
from oelm.models.build import build_model
from tests.training.runs import make_store

CPU = torch.device("cpu")
STEPS = 200
CLOSE = 1e-5  # relative, of every step's loss and of the validation loss
CLOSE_NORM = 1e-4  # relative, of every step's gradient norm


def run_config(task: dict[str, Any], model: str, method: str, **training: Any) -> RunConfig:
    defaults = {"steps": STEPS, "batch_size": 4, "weight_decay": 0.1, "log_every": 1, "eval_every": STEPS}
    more = {"save_every": 0, "test": False, "precision": "fp32", "seed": 5}
    dropout = {} if model.startswith("gpt-") else {"dropout": 0.0}
    values = {"task": task, "model": {"name": model, **dropout}, "method": {"name": method}}
    return make_config(values | {"training": defaults | more | training})


def check_same(ours: dict[str, Any], theirs: dict[str, Any], rounded: dict[str, Any] | None = None) -> None:
    """Losses and norms agree; where `rounded`, a run that differs from `theirs` by the rounding of its start,
    is further away than the usual bound, four times its distance is allowed."""
    assert len(ours["training_loss"]) == STEPS
    for name, close in (("training_loss", CLOSE), ("grad_norm", CLOSE_NORM)):
        if rounded is not None:
            close = max(close, 4 * distance(rounded[name], theirs[name]))
        assert distance(ours[name], theirs[name]) <= close
    # A model that learns nothing would agree with anything.
    assert sum(ours["training_loss"][-20:]) < 0.9 * sum(ours["training_loss"][:20])


def distance(values: list[float], others: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, others, strict=True))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return oracle.made_store(tmp_path_factory.mktemp("corpus"), 12_000, 300)


LANGUAGE = {
    "transformers' own schedule": ("baseline", {"lr": 3e-4, "warmup": 0}),
    # Five windows in two micro-batches: a mean of their means would not be the mean.
    "frozen q and k, warm-up, accumulation, clipping": (
        "oelm",
        {"lr": 3e-4, "warmup": 10, "batch_size": 5, "accumulate": 2, "clip": 0.5, "eps": 1e-4},
    ),
}


@pytest.mark.parametrize(("method", "training"), LANGUAGE.values(), ids=LANGUAGE.keys())
def test_a_language_model_learns_as_gpt2_does(method, training, corpus, tmp_path):
    task = {"max_length": 24}
    theirs = oracle.trainer_run(run_config(task, "gpt-tiny", method, **training), corpus, tmp_path / "t", CPU)
    for fast in (True, False):
        config = run_config(task, "gpt-tiny", method, fast=fast, **training)
        ours = oracle.our_run(config, corpus, tmp_path / f"fast-{fast}")
        check_same(ours, theirs)
        assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=CLOSE)


class Texts(Dataset[dict[str, torch.Tensor]]):
    """The padded batches of a run, in its order."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        training = config.training
        self.objective = make_objective(store, config.task.max_length, 0.0, "none")
        plan = self.objective.plan("train", training.batch_size, None, training.seed)
        self.batches = [
            batches.batch(k) for _, (_, k, batches) in zip(range(STEPS), plan.schedule(), strict=False)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        batch = self.objective.batch("train", self.batches[i])
        return batch.inputs | batch.targets


def bert(folder: Path) -> str:
    """A small random BERT that knows more words than the data has."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    transformers.BertModel(transformers.BertConfig(vocab_size=700, **sizes)).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lr"), [("gpt-tiny", 3e-4), ("bert", 1e-3)])
def test_a_classifier_learns_in_our_loop_as_in_trainer(name, lr, tmp_path):
    """The model is the same; batches that are padded, rows of the embedding that no text uses and so are set
    aside, and the optimizer's kernel are ours."""
    store = open_store(make_store(tmp_path))
    model_name = bert(tmp_path / "bert") if name == "bert" else name
    task = {"max_length": 32}
    training = {"lr": lr, "warmup": 0, "batch_size": 6, "test": True, "choose_on": "last"}
    config = run_config(task, model_name, "baseline", **training)

    def by_trainer(factor: float) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        model = build_model(config, store)[0]
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        out = tmp_path / f"trainer-{factor}"
        curve = oracle.train_by_trainer(model, Texts(store, config), config.training, out, CPU, [])
        return curve, model.state_dict()

    theirs, weights = by_trainer(1.0)
    rounded, other_weights = by_trainer(1 + 2.0**-23)
    for fast in (True, False):
        out = tmp_path / f"fast-{fast}"
        ours = oracle.our_run(run_config(task, model_name, "baseline", fast=fast, **training), store, out)
        check_same(ours, theirs, rounded)
        saved = load_file(out / "model" / "model.safetensors")
        assert saved.keys() == weights.keys()
        for key, value in saved.items():
            # Adam makes of a gradient that is 0 but for rounding a step like any other: a key's bias shifts
            # all scores of a query alike, so nothing depends on it.
            usual = 1e-2 if key.endswith("key.bias") else 1e-5
            tolerance = max(usual, 4 * float((other_weights[key] - weights[key]).abs().max()))
            assert torch.allclose(value, weights[key], rtol=0, atol=tolerance), key
