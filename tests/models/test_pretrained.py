"""Checkpoints that are not what they say: one line each, exit code 2, and nothing left behind."""

import json
import pickle
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import oelm
from oelm.data.tokenizer import train_tokenizer
from oelm.errors import UserError
from oelm.inference.trained import Trained
from oelm.models.pretrained import check_checkpoint, load_as_saved, load_checkpoint
from tests import tiny
from tests.command_line import caller
from tests.data.made import unigram_pieces, wordpiece

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


def no_heads(config, tensors):
    config["num_attention_heads"] = 0


def endless(config, tensors):
    config["num_hidden_layers"] = 2**31


def infinite(config, tensors):
    tensors["bert.encoder.layer.1.attention.self.query.weight"][0, 0] = float("inf")


BROKEN = {
    "no-heads": (no_heads, "config.json says num_attention_heads = 0; it must be between 1 and 1,000"),
    "endless": (endless, "config.json says num_hidden_layers = 2,147,483,648"),
    "infinite": (infinite, "layer.1.attention.self.query.weight holds infinity or NaN"),
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


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def sharded(save, name, shard):
    """A checkpoint of two shards, of which the index names one as told; the pickle there is a trap."""
    folder = save(name)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    keys = load_file(folder / "model-00001-of-00001.safetensors")
    shards = dict.fromkeys(keys, "model-00001-of-00001.safetensors") | {next(iter(keys)): shard}
    index = {"metadata": {"total_size": 1}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / shard).parent.mkdir(exist_ok=True)
    (folder / shard).write_bytes(pickle.dumps(Trap(folder.parent / "ran"), protocol=2))
    return folder


@pytest.mark.parametrize(
    "shard", ["../weights.dat", "weights.bin", "../other.safetensors", "in/x.safetensors"]
)
def test_an_index_may_name_safetensors_of_its_own_folder_only(oelm_cli, world, save, shard):
    folder = sharded(save, "astray", shard)
    refused(oelm_cli, world, folder, f"model.safetensors.index.json names {shard!r}, which is not a safet")
    shutil.rmtree(folder)


def test_a_checkpoint_in_shards_is_read(save):
    whole = load_as_saved(str(save("whole")))
    whole.save_pretrained(save("shards").parent / "in-shards", max_shard_size="20KB")
    found = load_as_saved(str(save("shards").parent / "in-shards"))
    assert len([*(save("shards").parent / "in-shards").glob("*.safetensors")]) > 1
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), found.parameters(), strict=True))


def elsewhere(config, tensors):
    config["transformers_weights"] = "adapter_model.bin"


def test_neither_a_config_nor_an_adapter_leads_to_a_pickle(oelm_cli, world, save):
    named = save("named", change=elsewhere)
    (named / "adapter_model.bin").write_bytes(pickle.dumps(Trap(world / "ran"), protocol=2))
    refused(oelm_cli, world, named, "names the weights 'adapter_model.bin', which are no safetensors")
    adapted = save("adapted")
    (adapted / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
    (adapted / "adapter_model.bin").write_bytes(pickle.dumps(Trap(world / "ran"), protocol=2))
    refused(oelm_cli, world, adapted, "holds an adapter (adapter_config.json)")


@pytest.mark.parametrize("load", [oelm.OelmGPTForCausalLM.from_pretrained, oelm.load])
def test_a_reference_gpt_is_never_unpickled(tmp_path, load):
    model = tiny.build("oelm-gpt")
    oelm.convert(model, "oelm")
    model.save_pretrained(tmp_path / "gpt")
    torch.save(model.state_dict(), tmp_path / "gpt" / "pytorch_model.bin")
    (tmp_path / "gpt" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"pytorch_model\.bin only, a pickle"):
        load(str(tmp_path / "gpt"))


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
    assert "note: new weights for this task: classifier.bias, classifier.weight" in err
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


def start(model, *more, data="three.csv", steps=1):
    return ("train", "--data", data, "--model", model, "--max-length", 24, "--steps", steps, *more)


def config_with(**fields):
    return lambda config, tensors: config.update(fields)


def labels_of(folder, lines=("a fine film", "a dull film about words")):
    return [answer["scores"] for answer in Trained(folder).predict(lines)]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_what_stands_beside_a_text_does_not_change_its_label(oelm_cli, world, save, family):
    """They read the last token that is not the config's padding: that must be what is padded with."""
    name = f"padding-{family}"
    save(name, family, config_with(pad_token_id=7))
    code, _, err = oelm_cli(*start(name, "--out", f"{name}-run"))
    assert code == 0, err
    model = world / f"{name}-run" / "model"
    for _ in range(2):  # as it was trained, and as a folder that was never mended
        trained = Trained(model)
        lines = ["an odd film", "a fine film about words, words, words and words"]
        alone = [next(trained.predict([line]))["scores"] for line in lines]
        for mine, other in zip(labels_of(model, lines), alone, strict=True):
            assert mine == pytest.approx(other, abs=1e-5)
        assert trained.model.config.pad_token_id == trained.tokenizer.pad_token_id
        values = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(values | {"pad_token_id": 7}))


def test_a_model_that_counts_from_its_padding_keeps_it(oelm_cli, world, save):
    save("counting", "roberta", config_with(pad_token_id=1))
    code, _, err = oelm_cli(*start("counting", "--out", "counting-run"))
    assert code == 0, err
    assert load_as_saved(str(world / "counting-run" / "model")).config.pad_token_id == 1


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_tokenizer_without_a_token_to_pad_with(oelm_cli, world, save, family):
    folder = save(f"unpadded-{family}", family, config_with(pad_token_id=None, eos_token_id=None))
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    for key in ("pad_token", "eos_token", "bos_token", "unk_token"):
        values[key] = None
    path.write_text(json.dumps(values))
    code, _, err = oelm_cli(*start(folder, "--out", f"{folder.name}-run"))
    if family == "bert":  # its mask says what is padding
        assert code == 0, err
    else:
        assert code == 2 and "neither a padding nor an end-of-text token" in err
        assert len(err.strip().splitlines()) == 1 and not (world / f"{folder.name}-run").exists()


def test_an_encoder_decoder_must_see_where_a_text_ends(oelm_cli, world, save):
    save("endless", "t5")
    code, _, err = oelm_cli(*start("endless", "--out", "endless-run"))
    assert code == 2 and "t5 classifies by the token that ends a text, 1 in its config.json" in err
    assert len(err.strip().splitlines()) == 1 and not (world / "endless-run").exists()


HEADS = {
    "bert": "classifier",
    "roberta": "classifier.out_proj",
    "gpt2": "score",
    "t5": "classification_head.out_proj",
}


@pytest.mark.parametrize("family", HEADS)
def test_a_head_is_kept_for_its_own_labels_only(oelm_cli, world, save, family):
    """In the data's order: bad, good, odd. Of as many others, each would get another's weights."""
    head = HEADS[family]
    folder = save(f"labels-{family}", family)
    if family == "t5":
        unigram_pieces().save_pretrained(folder)
    words = ("--method", "linear-probe", "--lr", "0.1")
    code, _, err = oelm_cli(*start(f"labels-{family}", *words, "--out", f"labels-{family}-run"))
    assert code == 0 and "note: new weights for this task" in err and f"{head}.weight" in err, err
    trained = world / f"labels-{family}-run" / "model"
    before = load_file(trained / "model.safetensors")
    values = json.loads((trained / "config.json").read_text())
    names = {"0": "odd", "1": "bad", "2": "good"}
    for number, changes in enumerate(
        ({}, {"id2label": names, "label2id": {v: int(k) for k, v in names.items()}}, {"id2label": None})
    ):
        if changes.get("id2label", "") is None:  # default names
            del values["id2label"], values["label2id"]
            changes = {"id2label": {str(i): f"LABEL_{i}" for i in range(3)}}
        (trained / "config.json").write_text(json.dumps(values | changes))
        out = f"labels-{family}-{number}"
        code, _, err = oelm_cli(*start(trained, *words[:2], "--lr", "1e-9", "--out", out))
        assert code == 0, err
        after = load_file(world / out / "model" / "model.safetensors")
        near = torch.allclose(before[f"{head}.weight"], after[f"{head}.weight"], atol=1e-6)
        assert near == (number == 0), (family, changes)
        assert ("as the checkpoint has other labels" in err) == (number > 0)
        assert 0 < after[f"{head}.weight"].std() < 0.5
        assert all(
            torch.equal(before[key], after[key]) for key in before if head.partition(".")[0] not in key
        )
        assert load_as_saved(str(world / out / "model")).config.id2label == {0: "bad", 1: "good", 2: "odd"}


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_a_classifier_is_saved_as_one_whatever_it_was(oelm_cli, world, save, kind):
    name = f"was-{kind}"
    save(name, change=config_with(problem_type=kind))
    code, _, err = oelm_cli("predict", name, "lines.txt")
    assert code == 2 and kind in err and len(err.strip().splitlines()) == 1
    code, _, err = oelm_cli(*start(name, "--out", f"{name}-run"))
    assert code == 0, err
    folder = str(world / f"{name}-run" / "model")
    pipe = transformers.pipeline("text-classification", folder, top_k=None)
    said = {row["label"]: row["score"] for row in pipe(["a fine film"])[0]}
    assert said == pytest.approx(labels_of(folder, ["a fine film"])[0], abs=1e-5)


def test_a_model_of_one_number_says_it(oelm_cli, world, save):
    folder = save("number")
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    code, out, err = oelm_cli("predict", "number", "lines.txt")
    assert code == 0, err
    assert any(isinstance(json.loads(line)["value"], float) for line in out.splitlines())
    code, _, err = oelm_cli("evaluate", "number", "--data", "three.csv")
    assert code == 2 and "gives a text a number" in err and len(err.strip().splitlines()) == 1


def test_a_bare_roberta_reads_as_far_as_its_positions(save):
    """It counts them from behind its padding's."""
    folder = save("bare", "roberta", config_with(pad_token_id=1, max_position_embeddings=20))
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.RobertaForSequenceClassification(config).save_pretrained(folder)
    assert Trained(folder).max_length == 18
    assert next(Trained(folder).predict(["a fine film " * 30]))["label"]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_segments_a_model_has_no_room_for_are_not_marked(oelm_cli, world, save, family):
    folder = save(f"segments-{family}", family, words=False)
    wordpiece().save_pretrained(folder)
    if family == "bert":
        config = transformers.AutoConfig.from_pretrained(folder, type_vocab_size=1)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    rows = [f"good film {i},dog {i},{'yes' if i % 2 else 'no'}" for i in range(40)]
    (world / "pairs.csv").write_text("\n".join(["a,b,label", *rows]))
    out = f"segments-{family}-run"
    code, _, err = oelm_cli(*start(folder, "--text", "a", "--text-pair", "b", "--out", out, data="pairs.csv"))
    assert code == 0, err
    assert oelm_cli("evaluate", out)[0] == 0
    assert next(Trained(world / out).predict(["good film\tdog"]))["label"] in ("yes", "no")


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
    code, text, err = oelm_cli(*words, "--set", 'method.freeze={"q"="-1:"}')
    assert code == 0, err
    assert "scores' standard deviation, predicted from the weights" in text
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
    assert found["frozen"] == 6336 and len(found["scores"]) == 12
    for words, message in (
        (("--method", "olem"), "unknown method 'olem'"),
        (("--set", "training.lr=1"), "keys of [method] only"),
        (("--set", "method.gian=1"), "unknown key 'method.gian'"),
    ):
        code, _, err = oelm_cli("convert", "json-in", "--out", "new", *words)
        assert code == 2 and message in err and len(err.strip().splitlines()) == 1, err
        assert not (world / "new").exists()
    code, _, err = oelm_cli("convert", "empty-out", "--out", "again")
    assert code == 2 and "already converted" in err


def test_a_quantised_checkpoint_is_refused_before_it_is_loaded(tmp_path):
    tiny.build("bert").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for load in (check_checkpoint, load_as_saved):
        with pytest.raises(UserError, match="quantised"):
            load(str(tmp_path))
