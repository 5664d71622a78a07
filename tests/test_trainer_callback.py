"""Schedules of freezing in Hugging Face's Trainer, by `Freezing.trainer_callback`."""

import re

import pytest
import torch

import oelm
from tests.test_freeze_schedule import converted, trains


def train_by_hugging_face(folder, schedule, resume=None, family="bert", steps=9, **given):
    """A model after Hugging Face's Trainer with the callback, audited."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": int(row[0] > 30)} for row in torch.randint(5, 60, (40, 6)).tolist()]
    if family == "gpt2":
        rows = [row | {"labels": row["input_ids"]} for row in rows]
    model = converted(schedule, family)
    before = oelm.fingerprint(model)
    arguments = TrainingArguments(
        str(folder), max_steps=steps, learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True,
        seed=1, per_device_train_batch_size=4, logging_strategy="no", **given.pop("arguments"),
    )  # fmt: skip
    callback = oelm.Freezing(model).trainer_callback()
    data = {"train_dataset": rows, "eval_dataset": rows[:4]}
    Trainer(model=model, args=arguments, callbacks=[callback], **data, **given).train(resume)
    oelm.audit(model, before)
    return model


@pytest.mark.slow
def test_hugging_faces_trainer_resumes_exactly(tmp_path):
    """Its own optimizer takes what trains when it is built; the callback sees to it that this is enough."""

    def train(folder, resume=None):
        schedule = {"freeze_at": 4, "polar": True, "unfreeze_at": 6, "warmup": 2}
        return train_by_hugging_face(folder, schedule, resume, arguments={"save_steps": 4}).state_dict()

    whole = train(tmp_path)
    for number in (4, 8):  # at the border of a stage, and later
        again = train(tmp_path / "again", str(tmp_path / f"checkpoint-{number}"))
        assert all(torch.equal(value, again[key]) for key, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize(("best", "later", "frozen"), [(2, {}, False), (6, {"unfreeze_at": 7}, True)])
def test_hugging_faces_best_model_is_frozen_as_it_was_then(tmp_path, family, best, later, frozen):
    """Its weights are those of an earlier stage, and so are what is frozen and its digests."""
    scores = iter([float(step == best) for step in (2, 4, 6, 8)])
    arguments = {"metric_for_best_model": "score", "greater_is_better": True, "load_best_model_at_end": True}
    for kind in ("save", "eval"):
        arguments |= {f"{kind}_strategy": "steps", f"{kind}_steps": 2}
    schedule = {"freeze_at": 4, "polar": True, **later}
    model = train_by_hugging_face(
        tmp_path, schedule, family=family, steps=8, arguments=arguments,
        compute_metrics=lambda _: {"score": next(scores)},
    )  # fmt: skip
    queries = [p for name, p in model.named_parameters() if re.search(r"query|\.q\.", name)]
    assert {p.requires_grad for p in queries} == {not frozen}
    model.save_pretrained(tmp_path / "saved")
    assert trains(oelm.load(tmp_path / "saved")) == trains(model)
