"""T5 and BART learn to write targets with frozen Q/K in self- and cross-attention."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import oelm
from oelm.config import make_config, to_toml
from oelm.data import Choice, Store
from oelm.data.tasks import make_objective
from oelm.data.tasks.seq2seq import text_scores
from oelm.data.trivial_baselines import trivial_baselines
from oelm.data.writer import copy_store
from oelm.inference.trained import Trained
from oelm.study.item_values import item_values
from oelm.training.loop import train
from oelm.training.resolve import prepare_data
from tests.data.made import byte_pairs, ciphers, unigram_pieces
from tests.training.runs import Machine, Strike, outcome

CPU = torch.device("cpu")

ROOT = Path(__file__).parents[2]
KINDS = ("t5", "bart")
# So many steps at such a rate: post-norm BART wants a start of some size at this width, and then is quick.
RECIPE = {"t5": (400, 5e-3), "bart": (150, 3e-3)}
FROZEN = {"t5": (12, 6 * 2 * 64 * 64), "bart": (24, 6 * 2 * (64 * 64 + 64))}  # BART's projections have biases


def save_model(kind: str, folder: Path, **fields: Any) -> Path:
    """A random model with its tokenizer, as one would lie on the hub."""
    torch.manual_seed(0)
    tokenizer: Any
    model: Any
    if kind == "t5":
        tokenizer = unigram_pieces()
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        more = {"decoder_start_token_id": 0, "dropout_rate": 0.0, "vocab_size": len(tokenizer)}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes | more | fields))
    else:
        tokenizer = byte_pairs()
        stacks = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
        sizes = {f"{stack}_{key}": n for stack in ("encoder", "decoder") for key, n in stacks.items()}
        more = {"d_model": 64, "dropout": 0.0, "init_std": 0.1, "max_position_embeddings": 32}
        config = transformers.BartConfig(**sizes | more | {"vocab_size": len(tokenizer)} | fields)
        model = transformers.BartForConditionalGeneration(config)
        # What a hub checkpoint brings along from its own task, and must not reach another.
        model.generation_config.update(num_beams=4, min_length=9, no_repeat_ngram_size=2)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def config_of(root: Path, **training: Any) -> dict[str, Any]:
    return {
        "task": {"data": str(root / "x.csv"), "text": "source", "target": "target", "max_length": 16},
        "model": {"name": str(root / "model")},
        "method": {"name": "oelm"},
        "training": {"batch_size": 32, "warmup": 20, "seed": 1} | training,
    }


def store_of(root: Path, **changes: Any) -> Store:
    choice = Choice(
        str(root / "x.csv"), text="source", target="target", tokenizer=str(root / "model"), max_length=16
    )
    return replace(choice, **changes).store(cache=root / "cache")


@pytest.fixture(scope="module", params=KINDS)
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of each kind of model, made once."""
    kind = request.param
    root = tmp_path_factory.mktemp(kind)
    save_model(kind, root / "model")
    ciphers(root / "x.csv", 1500)
    steps, lr = RECIPE[kind]
    values = config_of(root, steps=steps, lr=lr, eval_every=steps // 2)
    train(make_config(values), store_of(root), root / "run", show=False)
    return kind, root


def results_of(root: Path) -> dict[str, Any]:
    return json.loads((root / "run" / "results.json").read_text())


def test_a_copy_in_other_words_is_learned(learned: tuple[str, Path]) -> None:
    kind, root = learned
    results = results_of(root)
    found, references = results["test"]["metrics"], results["references"]
    assert results["status"] == "completed" and results["metric"] == "f1"
    assert found["exact_match"] > 0.75 and found["f1"] > 0.9
    for name in ("copy_source", "most_frequent_target"):
        assert references[name]["test"]["exact_match"] < 0.05 and references[name]["test"]["f1"] < 0.25
    assert found["perplexity"] < 0.2 * references["unigram"]["test"]["perplexity"]
    assert found["bits_per_byte"] < 0.2 * references["unigram"]["test"]["bits_per_byte"]
    assert not results["warnings"]
    tensors, parameters = FROZEN[kind]
    checked = Trained(root / "run").audit()
    assert (checked.frozen_tensors, checked.frozen_parameters) == (tensors, parameters)
    assert parameters == results["parameters"]["frozen"]
    # Two layers of three attentions (encoder, decoder, across), four heads, Q and K each.
    assert checked.orthonormal_heads == 2 * 3 * 4 * 2


def test_the_checkpoint_is_a_vanilla_one_and_comes_back_frozen(learned: tuple[str, Path]) -> None:
    kind, root = learned
    folder = root / "run" / "model"
    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ours = oelm.load(str(folder)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["the film was good", "very nice"], padding=True, return_tensors="pt")
    labels = tokenizer(text_target=["a dog", "and a cat"], padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(plain(**batch, labels=labels).logits, ours(**batch, labels=labels).logits)
    assert all(parameter.requires_grad for parameter in plain.parameters())
    across = {"t5": "EncDecAttention.{}.", "bart": "encoder_attn.{}_proj."}[kind]
    own = {"t5": "SelfAttention.{}.", "bart": "self_attn.{}_proj."}[kind]
    for name, parameter in ours.named_parameters():
        frozen = any(part.format(letter) in name for part in (across, own) for letter in "qk")
        assert parameter.requires_grad != frozen, name


def test_what_was_recorded_is_what_the_saved_model_writes(learned: tuple[str, Path]) -> None:
    """Evaluated anew, asked line by line, and by plain transformers with the checkpoint's own settings."""
    _, root = learned
    results, trained = results_of(root), Trained(root / "run")
    again = trained.evaluate("test", data=str(root / "x.csv"))["metrics"]
    assert again == pytest.approx(results["test"]["metrics"], rel=1e-5)
    test = store_of(root)["test"]
    lines = [line.split(",") for line in (root / "x.csv").read_text().splitlines()[1:]]
    sources, targets = zip(*(lines[row] for row in test.ids), strict=True)
    with np.load(root / "run" / "predictions.npz") as arrays:
        order = np.argsort(np.argsort(arrays["ids"]))
        recorded = {name: arrays[name] for name in arrays.files}
    by_id = dict(zip(recorded["ids"].tolist(), recorded["predictions"].tolist(), strict=True))
    assert len(order) == len(test) == 150
    answers = [*trained.predict(sources)]
    assert [answer["text"] for answer in answers] == [*sources]
    assert [answer["target"] for answer in answers] == [by_id[row] for row in test.ids.tolist()]
    assert dict(zip(recorded["ids"].tolist(), recorded["labels"].tolist(), strict=True)) == dict(
        zip(test.ids.tolist(), targets, strict=True)
    )
    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(root / "run" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "run" / "model")
    batch = tokenizer([*sources[:20]], padding=True, return_tensors="pt")
    written = tokenizer.batch_decode(plain.generate(**batch), skip_special_tokens=True)
    assert written == [answer["target"] for answer in answers[:20]]
    assert trained.generate(sources[0], 20, temperature=0.0, top_k=1, seed=0) == answers[0]["target"]
    assert trained.generate(sources[0], 1, temperature=0.0, top_k=1, seed=0) != answers[0]["target"]


def test_every_item_is_recorded(learned: tuple[str, Path]) -> None:
    """Means over items are the run's numbers, and the statistics over items can be computed."""
    _, root = learned
    numbers = results_of(root)["test"]["metrics"]
    with np.load(root / "run" / "predictions.npz", allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    right = found["predictions"] == found["labels"]
    assert right.mean() == found["exact_match"].mean() == pytest.approx(numbers["exact_match"])
    assert found["f1"].mean() == pytest.approx(numbers["f1"])
    assert found["scores"].sum() / found["tokens"].sum() == pytest.approx(numbers["loss"])
    for metric in ("f1", "exact_match"):
        values = item_values(metric, found)
        assert values is not None and values.items == len(right)
        assert np.average(values.values, weights=values.sizes) == pytest.approx(numbers[metric])


def test_texts_are_compared_word_by_word() -> None:
    """By hand. Case, punctuation and articles count; spaces do not; Chinese is read by characters."""
    right = ["the dog runs", "a b b", "a b", "+ - *", "The dog", "今天天气好"]
    said = ["  the   dog\nruns", "b a c", "", "+ - /", "the dog", "今天好"]
    found = text_scores(right, said)
    assert found["exact_match"].tolist() == [1, 0, 0, 0, 0, 0]
    assert found["f1"].tolist() == pytest.approx([1, 2 / 3, 0, 2 / 3, 1 / 2, 3 / 4])


def test_trivial_baselines_by_hand(tmp_path: Path) -> None:
    rows = [f"word {i},yes" for i in range(40)] + [f"other {i},no" for i in range(38)] + ["yes 1,yes"] * 2
    (tmp_path / "x.csv").write_text("\n".join(["source,target", *rows]))
    (tmp_path / "test.csv").write_text("source,target\nnew a,yes\nnew b,no\nno,no\nyes please,yes\n")
    choice = Choice(str(tmp_path / "x.csv"), text="source", target="target", tokenizer="train:300")
    store = replace(choice, test_file=tmp_path / "test.csv").store(cache=tmp_path / "cache")
    found = trivial_baselines(store)
    assert found["most_frequent_target"]["test"] == {"exact_match": 0.5, "f1": 0.5}
    assert found["copy_source"]["test"] == {"exact_match": 0.25, "f1": pytest.approx((1 + 2 / 3) / 4)}
    tokens = np.array(store["train"].target_tokens)
    seen = np.bincount(tokens, minlength=store.vocab_size) + 1.0
    nats = -np.log(seen / seen.sum())[store["test"].target_tokens]
    assert found["unigram"]["test"]["loss"] == pytest.approx(nats.mean())
    assert found["unigram"]["test"]["bits_per_byte"] == pytest.approx(nats.sum() / np.log(2) / 10)
    assert trivial_baselines(store) == found  # from the cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_hugging_face(kind: str, smoothing: float, tmp_path: Path) -> None:
    """The model's own mean over target tokens, for targets of unequal length; smoothed as torch does."""
    save_model(kind, tmp_path / "model")
    ciphers(tmp_path / "x.csv", 60)
    store = store_of(tmp_path)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    objective = make_objective(store, 16, smoothing, "none")
    items = np.arange(9)
    batch = objective.batch("train", items)
    count = objective.count("train", items)
    labels = batch.targets["labels"]
    assert count == int((labels != -100).sum()) < labels.numel()
    out = model(**batch.inputs, labels=labels)
    expected = F.cross_entropy(
        out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=smoothing
    )
    if not smoothing:
        torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(objective.loss(model, batch) / count, expected)
    assert batch.tokens == int(batch.inputs["attention_mask"].sum()) + count


def test_the_loss_is_the_mean_over_all_target_tokens_of_a_batch(tmp_path: Path) -> None:
    """However the batch is cut into micro-batches of unequal counts."""
    save_model("t5", tmp_path / "model")
    ciphers(tmp_path / "x.csv", 200, 1, 5)
    losses = []
    for accumulate in (1, 3):
        values = config_of(tmp_path, steps=4, lr=1e-3, accumulate=accumulate, log_every=1, batch_size=10)
        train(make_config(values), store_of(tmp_path), tmp_path / str(accumulate), show=False)
        lines = (tmp_path / str(accumulate) / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines if '"train"' in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("kind", "scale"), [("t5", 1.0), ("bart", 16**-0.5)])
def test_scores_start_with_standard_deviation_one(kind: str, scale: float, tmp_path: Path) -> None:
    """T5 does not divide by sqrt(d_kv): its blocks must be smaller. In every attention, across too."""
    folder = save_model(kind, tmp_path / "model")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    oelm.convert(model, "oelm")
    queries: dict[str, torch.Tensor] = {}
    keys: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in ("q", "q_proj", "k", "k_proj"):
            into = queries if last.startswith("q") else keys
            place = name.rsplit(".", 1)[0]
            module.register_forward_hook(
                lambda _, __, out, into=into, place=place: into.__setitem__(place, out.detach())
            )
    draw = torch.Generator().manual_seed(0)
    # Inputs of norm sqrt(d_model), as layer norms make them, without a common direction.
    stacks = {k: torch.randn(4, 24, 64, generator=draw) for k in ("inputs_embeds", "decoder_inputs_embeds")}
    with torch.no_grad():
        model.eval()(**stacks)
    assert len(queries) == len(keys) == 6
    for place, query in queries.items():
        q, k = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in (query, keys[place]))
        scores = scale * q @ k.transpose(-1, -2)
        assert 0.7 < float(scores.std()) < 1.4, place


def test_a_killed_run_ends_as_if_nothing_had_happened(machine: Machine, tmp_path: Path) -> None:
    save_model("bart", tmp_path / "model", dropout=0.1)
    ciphers(tmp_path / "x.csv", 200)
    store = copy_store(store_of(tmp_path), tmp_path / "store")
    values = config_of(tmp_path, steps=12, lr=1e-3, batch_size=8, eval_every=4, save_every=3, log_every=1)
    del values["task"]  # the store has its columns
    (tmp_path / "run.toml").write_text(to_toml(values))
    for out in ("whole", "torn"):
        strike = Strike(signal.SIGKILL, path="step-00000009") if out == "torn" else None
        ended = machine.run(tmp_path / "run.toml", tmp_path / out, store=store.folder, strike=strike)
        assert ended.code == (0 if strike is None else -signal.SIGKILL), ended.text
    ended = machine.run(tmp_path / "run.toml", tmp_path / "torn", store=store.folder)
    assert ended.code == 0 and "resuming after step 6" in ended.text, ended.text
    assert outcome(tmp_path / "torn") == outcome(tmp_path / "whole")


def test_models_that_cannot_write_are_refused(tmp_path: Path) -> None:
    ciphers(tmp_path / "x.csv", 60)
    values = config_of(tmp_path, steps=2)
    config = make_config(values | {"model": {"name": "gpt-tiny"}})
    with pytest.raises(oelm.UserError, match="gpt-tiny is not an encoder-decoder, and writing targets"):
        prepare_data(config, CPU, show=False)
    save_model("t5", tmp_path / "model")
    store = store_of(tmp_path)
    config = replace(config, task=replace(config.task, max_length=16))
    with pytest.raises(oelm.UserError, match="gpt-tiny is not an encoder-decoder"):
        train(config, store, tmp_path / "run", show=False)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": store.vocab_size}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    save_model("t5", tmp_path / "startless", decoder_start_token_id=None)
    save_model("bart", tmp_path / "short", max_position_embeddings=12, vocab_size=store.vocab_size)
    for name, said in (
        ("gpt2", "gpt2 is not an encoder-decoder, and writing targets"),
        ("startless", "t5: config.json names no decoder_start_token_id"),
        ("short", r"task\.max_length 16 exceeds the 12 positions"),
    ):
        config = make_config(values | {"model": {"name": str(tmp_path / name)}})
        with pytest.raises(oelm.UserError, match=said):
            train(config, store, tmp_path / "run", show=False)
    config = make_config(values | {"model": {"name": str(tmp_path / "short")}})
    config = replace(config, task=replace(config.task, max_length=12))
    long = store_of(tmp_path, max_length=12, max_target_length=13)
    with pytest.raises(oelm.UserError, match=r"task\.max_target_length 13 exceeds the 12 positions"):
        train(config, long, tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


def test_a_prepared_store_keeps_its_lengths(tmp_path: Path) -> None:
    save_model("t5", tmp_path / "model")
    ciphers(tmp_path / "x.csv", 60)
    folder = copy_store(store_of(tmp_path, max_target_length=7), tmp_path / "store").folder
    values = config_of(tmp_path, steps=2)
    values["task"] = {"data": str(folder), "max_target_length": 9}
    with pytest.raises(oelm.UserError, match="was prepared with max_target_length 7, not 9"):
        prepare_data(make_config(values), CPU, show=False)
    values["task"]["max_target_length"] = 7
    assert prepare_data(make_config(values), CPU, show=False)[1].max_target_length == 7


@pytest.mark.parametrize("line", ["", "   "])
def test_nothing_is_written_from_nothing(line: str, tmp_path: Path) -> None:
    folder = save_model("t5", tmp_path / "model")
    assert list(Trained(folder).predict([line])) == [{"text": line, "target": None}]
    with pytest.raises(oelm.UserError, match="is empty"):
        Trained(folder).generate(line, 5, temperature=0.0, top_k=1, seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_writing_ends_where_the_positions_do(kind: str, tmp_path: Path) -> None:
    folder = save_model(kind, tmp_path / "model", eos_token_id=None, forced_eos_token_id=None)
    trained = Trained(folder)
    trained.model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=trained.model.config.decoder_start_token_id, eos_token_id=None
    )
    assert isinstance(trained.generate("the film was good", 60, temperature=0.0, top_k=1, seed=0), str)


def oelm_command(root: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OELM_CACHE_DIR": str(root / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "oelm", *words], env=environment, capture_output=True, text=True, cwd=root
    )


@pytest.mark.slow
def test_a_study_from_the_command_line(tmp_path: Path) -> None:
    save_model("bart", tmp_path / "model")
    ciphers(tmp_path / "x.csv", 300)
    task = ["--data", "x.csv", "--text", "source", "--target", "target", "--max-target-length", "8"]
    recipe = ["--model", "model", "--max-length", "16", "--steps", "20", "--batch-size", "16"]
    words = [*task, *recipe, "--lrs", "3e-3", "--seeds", "2", "--jobs", "1"]
    done = oelm_command(tmp_path, "study", *words, "--set", "study.widen=0", "--out", "s")
    assert done.returncode == 0, done.stderr
    assert "x.csv, model" in done.stdout and "test F1 (%)" in done.stdout
    assert "the source itself" in done.stdout
    records = [*(tmp_path / "s").rglob("predictions.npz")]
    assert len(records) == 4
    scores = [np.load(path)["f1"] for path in records]
    assert {len(score) for score in scores} == {30}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_agree_with_one(kind: str, tmp_path: Path) -> None:
    """Copied or sharded: everyone writes as long as anyone does, and every item is measured once."""
    save_model(kind, tmp_path / "model")
    ciphers(tmp_path / "x.csv", 120, 1, 5)
    store = copy_store(store_of(tmp_path), tmp_path / "store")
    values = config_of(tmp_path, steps=10, lr=1e-3, batch_size=12, eval_every=5, log_every=1)
    for name in ("ddp", "fsdp"):
        more = make_config(values | {"training": values["training"] | {"fsdp": name == "fsdp"}})
        (tmp_path / f"{name}.json").write_text(json.dumps(more.to_dict()))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    script = Path(__file__).with_name("two_processes.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-6000:]
    alone = train(make_config(values), store, tmp_path / "alone", show=False)
    for name in ("ddp", "fsdp"):
        other = json.loads((tmp_path / name / "results.json").read_text())
        assert other["test"]["metrics"] == pytest.approx(alone["test"]["metrics"], abs=1e-3)
        with np.load(tmp_path / name / "predictions.npz") as arrays:
            assert sorted(arrays["ids"].tolist()) == sorted(store["test"].ids.tolist())
