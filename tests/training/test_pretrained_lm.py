"""A language model trained here is a pretrained model: every task starts from its weights, and says so."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from oelm.config import make_config
from oelm.data.tasks import task_kind
from oelm.errors import UserError
from oelm.inference.trained import Trained
from oelm.models.build import build_model
from oelm.orthogonal import deviation, q_factor, to_blocks, to_weight
from oelm.training.resolve import prepare_data, start_warnings
from tests import tiny
from tests.command_line import caller
from tests.data.made import parquet, sentence, wordpiece
from tests.training.language_models import corpus, random_model, tokenizer

LM_STEPS = ("--steps", 6, "--batch-size", 4, "--lr", "1e-2", "--max-length", 48)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus, sentences with a tag for each word, and questions, under the names of tasks."""
    import random

    root, rng = corpus(tmp_path_factory.mktemp("data")), random.Random(0)
    for split, count in (("train", 120), ("test", 20), ("validation", 20)):
        words = [sentence(rng, 3, 9).split() for _ in range(count)]
        tags = [["LONG" if len(word) > 4 else "SHORT" for word in row] for row in words]
        parquet(root / "ptb-pos" / f"{split}.parquet", tokens=words, tags=tags)
        texts = [f"{sentence(rng)} {i} {split}" for i in range(count)]
        parquet(root / "sst2" / f"{split}.parquet", sentence=texts, label=[i % 2 for i in range(count)])
        answers = [
            {"text": [text.split()[1]], "answer_start": [text.index(text.split()[1])]} for text in texts
        ]
        columns = {"id": [str(i) for i in range(count)], "question": ["what?"] * count, "context": texts}
        parquet(root / "squad" / f"{split}.parquet", answers=answers, **columns)
    return root


@pytest.fixture
def oelm_cli(monkeypatch, capsys, tmp_path_factory, data):
    monkeypatch.setenv("OELM_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "lm-cache"))
    monkeypatch.setenv("OELM_DATA_DIR", str(data))
    return caller(monkeypatch, capsys)


@pytest.fixture
def language_model(oelm_cli, tmp_path_factory):
    """The folder of a run that trained a language model of this family by this method, made once."""
    root = tmp_path_factory.getbasetemp() / "language-models"

    def made(family, method):
        run = root / f"{family}-{method}"
        if not run.exists():
            start = random_model(family, root / f"{family}-start") if family != "oelm-gpt" else "gpt-tiny"
            words = ("--model", start, "--method", method, *LM_STEPS)
            words += ("--tokenizer", "train:320") if family == "oelm-gpt" else ()
            code, _, err = oelm_cli("train", "--task", "tinystories", *words, "--out", run)
            assert code == 0, err
        return run

    return made


def built(run, task, method, **more):
    """The model of a run that starts here, before its first step, and its store."""
    values = {"task": {"name": task, "max_length": 48} | more, "model": {"name": str(run)}}
    config = make_config(values | {"method": {"name": method}})
    config, store = prepare_data(config, torch.device("cpu"), show=False)
    model, report = build_model(config, store)
    return model.eval(), report, store


TASKS = ("sst2", "ptb-pos", "squad", "tinystories")
IDS = torch.arange(3, 33).view(2, 15)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", ["oelm-gpt", "gpt2"])
def test_every_task_starts_from_its_weights(family, task, language_model):
    run = language_model(family, "oelm")
    model, report, store = built(run, task, "frozen")
    lm = Trained(run)
    assert store.tokenizer().get_vocab() == lm.tokenizer.get_vocab()
    if family == "oelm-gpt" and task != "tinystories":
        assert not model.transformer.causal
        model.transformer.causal = True  # as it was trained; in this direction all must be as it was
    with torch.no_grad():
        mine = model.base_model(IDS).last_hidden_state
        torch.testing.assert_close(mine, lm.model.base_model(IDS).last_hidden_state, rtol=0, atol=0)
    assert report.init == "own" and report.frozen > 0


@pytest.mark.parametrize("family", ["oelm-gpt", "gpt2"])
def test_oelm_takes_the_language_models_own_blocks(family, language_model):
    def query(model, layer):
        block = model.base_model.h[layer].attn
        return (block.q_proj if family == "oelm-gpt" else block.c_attn.q).weight

    kept, _, _ = built(language_model(family, "oelm"), "sst2", "frozen")
    model, _, _ = built(language_model(family, "oelm"), "sst2", "oelm")
    trained, _, _ = built(language_model(family, "baseline"), "sst2", "frozen")
    turned, _, _ = built(language_model(family, "baseline"), "sst2", "oelm")
    for layer in range(2):
        # Orthonormal blocks that were never trained are their own Q factors.
        torch.testing.assert_close(query(model, layer), query(kept, layer), rtol=0, atol=2e-6)
        expected = to_weight(q_factor(to_blocks(query(trained, layer), 4)))
        np.testing.assert_allclose(query(turned, layer).detach().numpy(), expected, atol=1e-6)
        assert deviation(query(turned, layer), 4).max() < 1e-5 < deviation(query(trained, layer), 4).max()


def trained_on(oelm_cli, run, task, method, out):
    words = ("--method", method, "--steps", 4, "--batch-size", 4, "--lr", "1e-2", "--max-length", 48)
    code, _, err = oelm_cli("train", "--task", task, "--model", run, *words, "--out", out)
    assert code == 0, err
    return json.loads((out / "results.json").read_text()), load_file(out / "model" / "model.safetensors")


@pytest.mark.parametrize("family", ["oelm-gpt", "gpt2"])
@pytest.mark.parametrize("method", ["linear-probe", "norms-only", "frozen"])
def test_what_is_frozen_of_a_language_model_stays(method, family, oelm_cli, language_model, tmp_path):
    run = language_model(family, "oelm")
    results, weights = trained_on(oelm_cli, run, "ptb-pos", method, tmp_path / "probe")
    before = load_file(run / "model" / "model.safetensors")
    shared = sorted(set(before) & set(weights))
    assert len(shared) > 20
    moved = {name for name in shared if not torch.equal(before[name], weights[name])}
    if method == "linear-probe":
        assert not moved
    elif method == "norms-only":
        assert moved and all("ln_" in name for name in moved)
    elif family == "oelm-gpt":
        assert moved and not any("q_proj" in name or "k_proj" in name for name in moved)
    else:  # saved as GPT-2 has it: Q, K and V side by side
        q_k, v = (0, 64), (64, 96)
        for name in (name for name in shared if name.endswith("c_attn.weight")):
            for (start, end), stays in ((q_k, True), (v, False)):
                assert torch.equal(before[name][:, start:end], weights[name][:, start:end]) == stays
    assert results["parameters"]["trainable"] > 0
    code, out, _ = oelm_cli("audit", tmp_path / "probe")
    assert code == 0 and "clean" in out and "0 blocks" not in out


def test_a_run_and_its_model_are_the_same_start_and_notes_are_kept(oelm_cli, language_model, tmp_path):
    run = language_model("oelm-gpt", "oelm")
    first, one = trained_on(oelm_cli, run, "sst2", "baseline", tmp_path / "one")
    second, two = trained_on(oelm_cli, run / "model", "sst2", "baseline", tmp_path / "two")
    assert first["model"] == second["model"] == str(run / "model")
    assert all(torch.equal(one[name], two[name]) for name in one)
    (note,) = (w for w in first["warnings"] if w["code"] == "training.was_causal")
    assert note["values"] == {"model": str(run / "model")}
    assert not any(w["code"] == "training.new_positions" for w in first["warnings"])
    again, _ = trained_on(oelm_cli, run, "tinystories", "baseline", tmp_path / "lm")
    assert not any(w["code"] == "training.was_causal" for w in again["warnings"])
    other, _ = trained_on(oelm_cli, language_model("gpt2", "oelm"), "ptb-pos", "baseline", tmp_path / "gpt2")
    assert not any(w["code"] == "training.was_causal" for w in other["warnings"]), "GPT-2 stays causal"
    notes = start_warnings(str(run / "model"), task_kind("classification"), 80)
    assert any("was trained on 48 positions" in str(note) and "80" in str(note) for note in notes)


def test_gpt2_classifies_batches_of_texts(oelm_cli, language_model, tmp_path):
    trained_on(oelm_cli, language_model("gpt2", "oelm"), "sst2", "oelm", tmp_path / "run")


@pytest.mark.parametrize("family", ["oelm-gpt", "gpt2"])
def test_a_taggers_head_is_kept_for_its_own_tags_only(family, oelm_cli, language_model, tmp_path):
    run = tmp_path / "tags"
    _, weights = trained_on(oelm_cli, language_model(family, "oelm"), "ptb-pos", "baseline", run)
    model, report, _ = built(run, "ptb-pos", "frozen")
    assert not report.notes and torch.equal(model.classifier.weight, weights["classifier.weight"])
    path = run / "model" / "config.json"
    values = json.loads(path.read_text())
    assert values["id2label"] == {"0": "LONG", "1": "SHORT"}
    values |= {"id2label": {"0": "SHORT", "1": "LONG"}, "label2id": {"SHORT": 0, "LONG": 1}}
    path.write_text(json.dumps(values))
    model, report, _ = built(run, "ptb-pos", "frozen")
    assert report.notes[0].code == "training.new_labels" and "classifier.weight" in str(report.notes[0])
    assert not torch.allclose(model.classifier.weight, weights["classifier.weight"], atol=1e-3)
    assert model.config.id2label == {0: "LONG", 1: "SHORT"}


def test_a_run_without_a_model_is_told_in_one_line(oelm_cli, language_model, tmp_path):
    (tmp_path / "half").mkdir()
    config = (language_model("oelm-gpt", "oelm") / "config.toml").read_text()
    (tmp_path / "half" / "config.toml").write_text(config)
    code, _, err = oelm_cli("train", "--task", "sst2", "--model", tmp_path / "half", "--out", tmp_path / "x")
    assert code == 2 and "is a run that holds no model" in err
    assert err.strip().count("\n") == 0


def test_a_language_model_is_not_evaluated_as_a_classifier(oelm_cli, language_model):
    code, _, err = oelm_cli("evaluate", language_model("gpt2", "oelm"), "--task", "sst2")
    assert code == 2 and "is a language model, and sst2 has labels" in err
    assert "--zero-shot" in err


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "llama"])
def test_a_language_model_may_not_see_what_it_predicts(family, tmp_path):
    """An encoder loads as a language model without a word, and its perplexity is too good to be true."""
    tiny.build(family).save_pretrained(tmp_path / family)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family)
    check = task_kind("lm").fit_model
    if family in ("gpt2", "llama"):
        check(model, None, family)
    else:
        with pytest.raises(UserError, match="sees the tokens that follow"):
            check(model, None, family)


def test_a_prompt_is_encoded_as_a_corpus_is(tmp_path):
    """Without what the tokenizer puts after a text, and from what stands before one where it is empty."""
    words = wordpiece()
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=len(words))
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    trained = Trained(tmp_path)
    seen = []
    write = trained.model.generate
    trained.model.generate = lambda ids, **options: seen.append(ids[0].tolist()) or write(ids, **options)
    for prompt in ("the film was", "", "[SEP]"):
        trained.generate(prompt, 4, temperature=0.0, top_k=1, seed=0)
    assert seen[0] == words("the film was", add_special_tokens=False)["input_ids"]
    assert seen[1] == [words.sep_token_id]
    assert words.sep_token_id not in seen[2], "a prompt is text"


def test_an_empty_prompt_needs_a_token_to_begin_with(tmp_path):
    trained = Trained(random_model("gpt2", tmp_path))
    trained.tokenizer.bos_token = trained.tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-text token"):
        trained.generate("", 4, temperature=0.0, top_k=1, seed=0)


@pytest.mark.parametrize(
    ("family", "task", "said"),
    [
        ("bart", "tinystories", "a bart, and such a model does not continue texts"),
        ("t5", "tinystories", "a t5, and such a model does not continue texts"),
        ("bart", "ptb-pos", "a bart, and such a model does not tag words"),
        ("distilbert", "tinystories", "a distilbert, and such a model does not continue texts"),
    ],
)
def test_what_an_architecture_does_not_do_is_said(family, task, said, oelm_cli, tmp_path):
    tiny.build(family).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    words = ("--model", tmp_path / "model", "--max-length", 16, "--steps", 1, "--out", tmp_path / "run")
    code, _, err = oelm_cli("train", "--task", task, *words)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "run").exists()
