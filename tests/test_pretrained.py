"""Checkpoints that are not what they say: one line each, exit code 2, and nothing left behind."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import oelm
from oelm.data.tokenizer import train_tokenizer
from oelm.errors import UserError
from oelm.pretrained import check_checkpoint, load_as_saved, load_checkpoint
from tests import tiny
from tests.command_line import caller

WORDS = 300  # of the tokenizer below


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("pretrained")
    kinds = {"good": "a fine film", "bad": "a dull film", "odd": "an odd film", "more": "no film"}
    rows = [f"{text} about words {i},{label}" for i in range(40) for label, text in kinds.items()]
    (root / "four.csv").write_text("\n".join(["text,label", *rows]))
    (root / "three.csv").write_text("\n".join(["text,label", *(r for r in rows if not r.endswith("more"))]))
    (root / "lines.txt").write_text("a fine film\n\nan odd film about words\n")
    return root


@pytest.fixture(scope="module")
def save(world):
    """Save a tiny model with a tokenizer under a name; `change` may edit its config and its tensors."""
    tokenizer = train_tokenizer(["a fine dull odd film about words"] * 9, WORDS)

    def make(name, family="bert", change=None, words=True):
        folder = world / name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "VOCAB", WORDS)
            patch.setitem(tiny.SIZES, "vocab_size", WORDS)
            tiny.build(family).save_pretrained(folder)
        if words:
            tokenizer.save_pretrained(folder)
        if change is not None:
            config = json.loads((folder / "config.json").read_text())
            tensors = load_file(folder / "model.safetensors")
            change(config, tensors)
            (folder / "config.json").write_text(json.dumps(config))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.fixture
def oelm_cli(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    monkeypatch.setenv("OELM_CACHE_DIR", str(world / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return caller(monkeypatch, capsys)


def wider(config, tensors):
    config["intermediate_size"] = 64


def a_hole(config, tensors):
    for key in [key for key in tensors if "layer.1.attention.self.query" in key]:
        del tensors[key]


def deeper(config, tensors):
    config["num_hidden_layers"] = 5


def shallower(config, tensors):
    config["num_hidden_layers"] = 2


def remote(config, tensors):
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}


def remote_alone(config, tensors):
    remote(config, tensors)
    config["model_type"] = "mine"


def another_family(config, tensors):
    config |= {"model_type": "electra", "architectures": ["ElectraForSequenceClassification"]}


BROKEN = {
    "wider": (wider, "does not match its config: bert.encoder.layer.0.intermediate.dense.bias has the shape"),
    "a-hole": (a_hole, "does not match its config: 2 tensors of BertForSequenceClassification not there"),
    "deeper": (deeper, "does not match its config: 32 tensors of BertForSequenceClassification not there"),
    "shallower": (shallower, "does not match its config: 16 tensors its config has no place for"),
    "remote": (remote, "asks for code of its own"),
    "remote-alone": (remote_alone, "asks for code of its own"),
    "another-family": (another_family, "lectra"),  # no table row, or tensors that are not an Electra's
}


def commands(folder):
    yield "convert", folder, "--out", "out"
    yield (
        "train",
        "--data",
        "three.csv",
        "--model",
        folder,
        "--max-length",
        "24",
        "--steps",
        "1",
        "--out",
        "out",
    )
    yield "evaluate", folder, "--data", "three.csv"


def refused(oelm_cli, world, folder, message):
    (folder / "code.py").write_text(f"open({str(world / 'ran')!r}, 'w')\n")
    for words in commands(folder):
        code, _, err = oelm_cli(*words)
        assert code == 2, (words, err)
        assert message in err and len(err.strip().splitlines()) == 1, (words, err)
        assert not (world / "out").exists() and not (world / "ran").exists()
    assert not [*world.glob(".out*")]


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_that_is_not_what_its_config_says(oelm_cli, world, save, name):
    change, message = BROKEN[name]
    refused(oelm_cli, world, save(name, change=change), message)


def test_pickles_are_not_read(oelm_cli, world, save):
    folder = save("pickle")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(oelm_cli, world, folder, "has its weights in pytorch_model.bin only, a pickle")


def test_files_that_are_broken_or_missing(oelm_cli, world, save):
    folder = save("cut")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(oelm_cli, world, folder, "cannot be loaded")
    (folder / "model.safetensors").unlink()
    refused(oelm_cli, world, folder, "no file named model.safetensors")
    refused(oelm_cli, world, save("wordless", words=False), "holds no tokenizer")


def test_another_tokenizer_may_be_named(oelm_cli, world, save):
    save("wordless", words=False)
    code, _, err = oelm_cli("convert", "wordless", "--tokenizer", save("words"), "--out", "worded")
    assert code == 0, err
    assert len(transformers.AutoTokenizer.from_pretrained(world / "worded")) <= WORDS


def test_more_labels_than_the_head_has(oelm_cli, world, save):
    """Evaluation refuses; training makes a new head, and says so."""
    save("three")
    code, _, err = oelm_cli("evaluate", "three", "--data", "four.csv")
    assert code == 2 and "the data has the labels ['bad', 'good', 'more', 'odd'], the model" in err
    words = (
        "--data",
        "four.csv",
        "--model",
        "three",
        "--max-length",
        "24",
        "--steps",
        "1",
        "--method",
        "oelm",
    )
    code, _, err = oelm_cli("train", *words, "--out", "re-headed")
    assert code == 0, err
    assert "note: classifier.bias, classifier.weight: new, for this task" in err
    model = load_as_saved(str(world / "re-headed" / "model"))
    assert model.config.num_labels == 4
    card = (world / "re-headed" / "model" / "README.md").read_text()
    results = json.loads((world / "re-headed" / "results.json").read_text())
    for fact in (
        "from `three` by method `oelm` (seed 0)",
        f"({100 * results['parameters']['frozen'] / results['parameters']['total']:.1f} %) are frozen",
        "four: 128 train, 16 validation, 16 test items",
        f"| accuracy | {results['test']['metrics']['accuracy']:.4f} | majority 0.2500",
        "BertForSequenceClassification.from_pretrained(path)",
        "oelm.load(path)",
    ):
        assert fact in card


def test_a_head_of_another_task_is_left_and_a_new_one_made(save):
    """A pooler and heads may be new; embeddings, norms and layers may not."""
    folder = str(save("base"))
    _, new = load_checkpoint(transformers.AutoModelForQuestionAnswering, folder, new_head=True)
    assert new == {"qa_outputs.weight", "qa_outputs.bias"}
    transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).save_pretrained(folder)
    _, new = load_checkpoint(transformers.AutoModelForSequenceClassification, folder, new_head=True)
    assert new == {
        f"{part}.{kind}" for part in ("classifier", "bert.pooler.dense") for kind in ("weight", "bias")
    }
    with pytest.raises(UserError, match="not there"):
        load_checkpoint(transformers.AutoModelForSequenceClassification, folder, new_head=False)


@pytest.mark.parametrize("lost", ["wte.weight", "ln_f.weight", "h.1.mlp.c_fc.weight"])
def test_what_is_lost_of_a_base_model_is_no_new_head(save, lost):
    def change(config, tensors):
        del tensors[next(key for key in tensors if key.endswith(lost))]

    folder = str(save(f"lost-{lost}", "gpt2", change))
    with pytest.raises(UserError, match=f"not there: transformer.{lost}"):
        load_checkpoint(transformers.AutoModelForSequenceClassification, folder, new_head=True)


def test_a_t5s_embedding_is_no_new_head(save):
    def change(config, tensors):
        del tensors["shared.weight"]

    folder = str(save("t5-lost", "t5", change))
    with pytest.raises(UserError, match="not there"):
        load_checkpoint(transformers.AutoModelForSeq2SeqLM, folder, new_head=True)


def test_a_language_models_head_of_another_size_is_refused(save):
    def change(config, tensors):
        config["vocab_size"] += 7

    with pytest.raises(UserError, match="has the shape"):
        load_checkpoint(transformers.AutoModelForCausalLM, str(save("vocab", "llama", change)), new_head=True)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart", "llama"])
def test_convert_writes_a_checkpoint_of_its_family(oelm_cli, world, save, family):
    save(f"{family}-in", family)
    out = world / f"{family}-out"
    words = ("convert", f"{family}-in", "--method", "oelm-fresh", "--seed", "5", "--out", out)
    code, text, err = oelm_cli(
        *words, "--sample", "lines.txt", "--heads", "--set", 'method.freeze={"q"="-1:"}'
    )
    assert code == 0, err
    assert "measured on the sample" in text and "largest angle" in text
    loaded = oelm.load(out)
    record = loaded.config.oelm
    assert record["method"]["freeze"] == {"q": "-1:"} and record["seed"] == 5
    expected = load_as_saved(str(world / f"{family}-in"))
    assert type(loaded) is type(expected), "the head is the one that was saved"
    oelm.convert(expected, oelm.Method.from_dict(record["method"]), seed=5)
    for (key, value), other in zip(expected.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(value, other), key
    card = (out / "README.md").read_text()
    assert f"from `{family}-in` by method `oelm-fresh (freeze=q:-1:)` (seed 5)" in card
    assert str(world) not in card

    code, _, err = oelm_cli(*words)
    assert code == 2 and "is not empty: name a new folder" in err and len(err.splitlines()) == 1


def test_convert_as_json_and_its_mistakes(oelm_cli, world, save):
    save("json-in")
    (world / "empty-out").mkdir()  # an empty folder is as good as none
    code, text, err = oelm_cli("convert", "json-in", "--out", "empty-out", "--json")
    assert code == 0, err
    found = json.loads(text)
    assert found["frozen"] == 6336 and found["scores_from"] == "weights" and len(found["heads"]) == 24
    (world / "blank.txt").write_text(" \n")
    for words, message in (
        (("--method", "olem"), "unknown method 'olem'"),
        (("--set", "training.lr=1"), "keys of [method] only"),
        (("--set", "method.gian=1"), "unknown key 'method.gian'"),
        (("--sample", "nowhere.txt"), "--sample nowhere.txt cannot be read"),
        (("--sample", "blank.txt"), "holds no text"),
    ):
        code, _, err = oelm_cli("convert", "json-in", "--out", "new", *words)
        assert code == 2 and message in err and len(err.strip().splitlines()) == 1, err
        assert not (world / "new").exists()
    code, _, err = oelm_cli("convert", "empty-out", "--out", "again")
    assert code == 2 and "already converted" in err


def test_a_quantised_checkpoint_is_refused_before_it_is_loaded(tmp_path):
    for name, change in (("config", True), ("tensors", False)):
        folder = tmp_path / name
        tiny.build("bert").save_pretrained(folder)
        if change:
            values = json.loads((folder / "config.json").read_text())
            values["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
            (folder / "config.json").write_text(json.dumps(values))
        else:
            state = load_file(folder / "model.safetensors")
            save_file({k: (v * 100).to(torch.int8) for k, v in state.items()}, folder / "model.safetensors")
        with pytest.raises(UserError, match="quantised"):
            check_checkpoint(str(folder))
        with pytest.raises(UserError, match="quantised"):
            load_as_saved(str(folder))
