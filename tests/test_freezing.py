"""What trains, by layer and by role, as one asks for it on the command line."""

import re

import pytest
import torch
import transformers

import oelm
from oelm.config import resolve_config
from oelm.errors import UserError
from oelm.method import PRESETS, Method
from oelm.models.families import family_of, layers_of, relative_name, whole_model_roles
from tests.data.made import parquet
from tests.models.test_pretrained import oelm_cli, save, world  # noqa: F401 - fixtures
from tests.tiny import BUILDERS, build

# The task's head; BERT's pooler serves nothing else.
HEADS = {"bert": r"classifier\.|bert\.pooler\.", "gpt2": r"score\.", "t5": r"classification_head\."}
NORMS = {"bert": r"LayerNorm\.", "gpt2": r"\.ln_(1|2|f)\.", "t5": r"layer_norm\."}
# Three layers each, in T5 each of two stacks: the number of a layer, and norms above all layers.
LAYER = {"bert": r"\.layer\.(\d)\.", "gpt2": r"\.h\.(\d)\.", "t5": r"\.block\.(\d)\."}
TOP = {"bert": "(?!)", "gpt2": r"\.ln_f\.", "t5": r"final_layer_norm\."}
QK = {
    "bert": r"self\.(query|key)\.",
    "gpt2": r"c_attn\.(q|k)\.",
    "t5": r"(SelfAttention|EncDecAttention)\.(q|k)\.",
}
every_family = pytest.mark.parametrize("name", HEADS)


def classifier(name):
    if name == "bert":
        return build(name)
    config = build(name).config
    config.num_labels, config.eos_token_id = 3, 1
    kind = {"gpt2": "GPT2", "t5": "T5"}[name]
    return getattr(transformers, f"{kind}ForSequenceClassification")(config)


def trained(name, method, *assignments):
    """The names of what trains under a method named as on the command line."""
    config = resolve_config({}, None, {"method.name": method}, [*assignments])
    model = classifier(name)
    oelm.convert(model, Method.from_dict(config.method.overrides()), seed=0)
    oelm.audit(model)
    found = {path for path, p in model.named_parameters() if p.requires_grad}
    return found, {path for path, _ in model.named_parameters()}


def matching(names, *patterns):
    return {path for path in names if any(re.search(pattern, path) for pattern in patterns)}


def in_layers(names, name, layers):
    return {path for path in names if (m := re.search(LAYER[name], path)) and int(m[1]) in layers}


@every_family
@pytest.mark.parametrize("method", ["oelm", "frozen", "oelm-polar"])
def test_only_the_last_two_layers_train_q_and_k(name, method):
    found, names = trained(name, method, "method.freeze.q=:-2", "method.freeze.k=:-2")
    assert names - found == in_layers(matching(names, QK[name]), name, {0})


@every_family
def test_a_linear_probe_trains_the_head_alone(name):
    found, names = trained(name, "linear-probe")
    assert found == matching(names, HEADS[name])


@every_family
def test_norms_only_trains_norms_and_the_head(name):
    found, names = trained(name, "norms-only")
    assert found == matching(names, HEADS[name], NORMS[name])


@every_family
@pytest.mark.parametrize("top", [1, 2, 3])
def test_the_top_blocks_train_whole(name, top, monkeypatch):
    """Of three layers the last three too: then only what lies below them is frozen."""
    deep = Method("top-3", freeze={"blocks": ":-3", "embeddings": "all"})
    monkeypatch.setitem(PRESETS, "top-3", deep)
    expected = None
    for method, *assignments in (
        (f"top-{top}",),
        ("baseline", f'method.freeze={{blocks=":-{top}", embeddings="all"}}'),
        ("oelm", f"method.freeze.blocks=:-{top}", "method.freeze.embeddings=all"),
    ):
        found, names = trained(name, method, *assignments)
        expected = in_layers(names, name, {*range(3 - top, 3)}) | matching(names, HEADS[name], TOP[name])
        expected -= matching(names, r"relative_attention_bias")  # an embedding, though it lies in block 0
        assert found == expected


@pytest.mark.parametrize("name", BUILDERS)
def test_the_table_knows_every_layer_and_the_norms_of_the_embeddings(name):
    model = build(name)
    parameters = [path for path, _ in model.named_parameters()]
    assert set(layers_of(model, parameters)) == matching(parameters, r"\.\d+\.")
    norms = {relative_name(model, path) for path in whole_model_roles(model)["norms"]}
    assert matching(norms, "embed") == norms & {*family_of(model).embedding_norms}


@every_family
def test_norms_of_some_layers(name):
    found, names = trained(name, "baseline", "method.freeze.norms=-1:")
    assert names - found == in_layers(matching(names, NORMS[name]), name, {2})


@every_family
@pytest.mark.parametrize(("layers", "numbers"), [("first:1", {0}), ("last:2", {1, 2}), ("even", {0, 2})])
def test_layers_by_words(name, layers, numbers):
    found, names = trained(name, "oelm", f"method.freeze.q={layers}", f"method.freeze.k={layers}")
    assert names - found == in_layers(matching(names, QK[name]), name, numbers)
    found, names = trained(name, "baseline", f"method.freeze.norms={layers}")
    assert in_layers(names - found, name, {0, 1, 2}) == in_layers(matching(names, NORMS[name]), name, numbers)


@every_family
@pytest.mark.parametrize("role", ["q", "ffn_out", "norms", "blocks"])
@pytest.mark.parametrize("layers", ["first:0", "last:0", "3,4", "7:"])
def test_a_selection_that_matches_no_layer_is_refused(name, role, layers):
    with pytest.raises(UserError, match=f"= '{layers}' selects none of the model's 3 layers"):
        trained(name, "baseline", f"method.freeze.{role}={layers}")


def test_a_probe_is_a_run_like_any_other(oelm_cli, world, save):  # noqa: F811
    save("probed")
    words = (
        "--data",
        "three.csv",
        "--model",
        "probed",
        "--max-length",
        "24",
        "--steps",
        "3",
        "--out",
        "probe",
    )
    code, _, err = oelm_cli("train", *words, "--method", "top-1")
    assert code == 0, err
    assert "norms            14      -  as it was  -     10 of 14 tensors" in err
    assert oelm_cli("audit", "probe")[0] == 0
    before = transformers.BertForSequenceClassification.from_pretrained(world / "probed").state_dict()
    after = transformers.BertForSequenceClassification.from_pretrained(world / "probe" / "model").state_dict()
    moved = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert moved and moved == matching(moved, r"layer\.2\.", HEADS["bert"])


def test_a_language_model_whose_output_is_its_embedding_cannot_be_probed(oelm_cli, world, save):  # noqa: F811
    save("tied", "gpt2")
    for split in ("train", "validation"):
        (world / "tinystories").mkdir(exist_ok=True)
        parquet(
            world / "tinystories" / f"{split}.parquet",
            text=[f"a fine film about words {split} {i}" for i in range(200)],
        )
    words = (
        "--task",
        "tinystories",
        "--data-dir",
        world,
        "--model",
        "tied",
        "--max-length",
        "24",
        "--steps",
        1,
    )
    code, _, err = oelm_cli("train", *words, "--method", "linear-probe", "--out", "tied-run")
    assert code == 2, err
    assert "linear-probe freezes all of tied" in err
    assert not (world / "tied-run").exists()
