"""What this package makes is used without it: transformers, pipelines, lm-evaluation-harness."""

import json
import math
import subprocess
import sys

import pytest
import torch
import transformers

import oelm
from oelm.data.tokenizer import train_tokenizer
from oelm.inference.trained import Trained
from tests import tiny
from tests.models.test_pretrained import oelm_cli, save, world  # noqa: F401 - fixtures
from tests.tiny import inputs

WORDS = 300
FAMILIES = {
    "bert": "AutoModelForSequenceClassification",
    "gpt2": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
    "bart": "AutoModelForSeq2SeqLM",
    "llama": "AutoModelForCausalLM",
}

# What a user without this package does: load, look at logits, ask a pipeline or let it write.
PLAIN = """
import json, sys
sys.modules["oelm"] = None  # an import of it fails, as where it is not installed
import torch, transformers
root, families = sys.argv[1], json.loads(sys.argv[2])
found = {}
for name, auto in families.items():
    folder = f"{root}/{name}"
    batch = torch.load(f"{root}/{name}.pt", weights_only=True)
    model = getattr(transformers, auto).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        torch.save(model(**batch).logits, f"{root}/{name}-plain.pt")
    assert all(p.requires_grad for p in model.parameters())
    text = "a fine film"
    if name == "bert":
        pipe = transformers.pipeline("text-classification", folder, top_k=None)
        found[name] = {row["label"]: row["score"] for row in pipe([text])[0]}
    elif name in ("gpt2", "llama"):
        pipe = transformers.pipeline("text-generation", folder)
        found[name] = pipe(text, max_new_tokens=5, do_sample=False)[0]["generated_text"]
    else:
        ids = tokenizer(text, return_tensors="pt").input_ids
        found[name] = model.generate(ids, max_new_tokens=5, do_sample=False)[0].tolist()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model of each family, converted, trained for a few steps and saved with a tokenizer."""
    root = tmp_path_factory.mktemp("made")
    tokenizer = train_tokenizer(["a fine dull odd film about words"] * 9, WORDS)
    models = {}
    for name in FAMILIES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "VOCAB", WORDS)
            patch.setitem(tiny.SIZES, "vocab_size", WORDS)
            model = tiny.build(name)
        oelm.convert(model, "oelm", seed=1)
        before = oelm.fingerprint(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = inputs(model)
        for _ in range(5):
            model.train()(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        oelm.audit(model, before)
        model.eval().save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        torch.save(batch, root / f"{name}.pt")
        models[name] = model
    return root, tokenizer, models


def test_transformers_alone_loads_what_was_converted_and_trained(made):
    root, tokenizer, models = made
    command = [sys.executable, "-c", PLAIN, str(root), json.dumps(FAMILIES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, model in models.items():
        with torch.no_grad():
            expected = model(**torch.load(root / f"{name}.pt", weights_only=True)).logits
            plain = torch.load(root / f"{name}-plain.pt", weights_only=True)
            torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-6)
            ids = tokenizer("a fine film", return_tensors="pt").input_ids
            if name == "bert":
                scores = model(ids).logits.softmax(-1)[0].tolist()
                assert [found[name][f"LABEL_{i}"] for i in range(3)] == pytest.approx(scores, abs=1e-5)
                continue
            written = model.generate(ids, max_new_tokens=5, do_sample=False)[0]
        expected = tokenizer.decode(written) if name in ("gpt2", "llama") else written.tolist()
        assert found[name] == expected, name


def test_a_run_loads_in_a_pipeline_and_says_the_same(oelm_cli, world, save):  # noqa: F811
    save("pipe")
    words = (
        "--data",
        "three.csv",
        "--model",
        "pipe",
        "--max-length",
        "24",
        "--steps",
        "3",
        "--method",
        "oelm",
    )
    code, _, err = oelm_cli("train", *words, "--out", "pipe-run")
    assert code == 0, err
    pipe = transformers.pipeline("text-classification", str(world / "pipe-run" / "model"), top_k=None)
    expected = next(Trained(world / "pipe-run").predict(["a fine film"]))
    assert {row["label"]: row["score"] for row in pipe(["a fine film"])[0]} == pytest.approx(
        expected["scores"], abs=1e-5
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_evaluation_harness_measures_what_the_model_says(made, name):
    """lm-evaluation-harness is not among our dependencies: pip install lm_eval."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface", exc_type=ImportError)
    from lm_eval.api.instance import Instance

    root, tokenizer, models = made
    harness = huggingface.HFLM(pretrained=str(root / name), device="cpu", batch_size=1)
    context, continuation = "a fine", " film about"
    request = Instance("loglikelihood", {}, (context, continuation), 0)
    found = harness.loglikelihood([request])[0][0]
    ids = tokenizer(context + continuation, return_tensors="pt").input_ids
    first = len(tokenizer(context).input_ids)
    with torch.no_grad():
        logs = models[name](ids).logits.log_softmax(-1)[0]
    expected = sum(logs[i - 1, ids[0, i]].item() for i in range(first, ids.shape[1]))
    assert math.isclose(found, expected, rel_tol=1e-4)
