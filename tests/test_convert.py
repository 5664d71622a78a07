import copy

import numpy as np
import pytest
import torch
import transformers
from threadpoolctl import threadpool_info, threadpool_limits

import oelm
from oelm.errors import AuditError, UserError
from oelm.method import PRESETS, Method, select_layers
from oelm.models.families import FAMILIES, find_sites
from oelm.models.fused import SplitQKV
from oelm.orthogonal import deviation, draw_blocks, one_blas_thread, q_factor, to_blocks, to_weight
from tests.tiny import BUILDERS, VOCAB, build, inputs, logits

every_model = pytest.mark.parametrize("name", BUILDERS)
every_method = pytest.mark.parametrize("method", PRESETS)


def train(model, steps=20, lr=1e-2):
    """AdamW over every parameter, with weight decay: the optimizer that shrinks masked weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    batch = inputs(model)
    losses = []
    for _ in range(steps):
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_every_row_of_the_table_has_a_model_to_test_it():
    assert {build(name).config.model_type for name in BUILDERS} == set(FAMILIES)


@every_model
def test_convert_train_audit_save_load(name, tmp_path):
    """The whole life of a converted model, with real training and plain transformers at the end."""
    model = build(name)
    report = oelm.convert(model, "oelm", seed=3)
    before = oelm.fingerprint(model)
    losses = train(model)
    assert losses[-1] < losses[0]
    oelm.audit(model, before)
    moved = {n for n, p in model.named_parameters() if p.requires_grad}
    assert report.frozen + sum(p.numel() for n, p in model.named_parameters() if n in moved) == report.total

    model.save_pretrained(tmp_path)
    batch = inputs(model)
    expected = logits(model, batch)
    plain = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(plain, batch), expected, rtol=1e-5, atol=1e-6)
    if name != "oelm-gpt":
        assert all(p.requires_grad for p in plain.parameters()), "ordinary and trainable"
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    for again in (oelm.load(tmp_path), oelm.refreeze(plain)):
        assert type(again) is type(model)
        assert {n for n, p in again.named_parameters() if not p.requires_grad} == frozen
        torch.testing.assert_close(logits(again, batch), expected, rtol=1e-5, atol=1e-6)
        assert oelm.audit(again).frozen_parameters == report.frozen
    losses_after = train(again, steps=3)  # and it goes on training
    assert np.isfinite(losses_after).all()
    oelm.audit(again, before)


@every_model
def test_vanilla_checkpoint_keys_do_not_change(name):
    model = build(name)
    keys = {key: value.shape for key, value in model.state_dict().items()}
    oelm.convert(model, "oelm")
    assert {key: value.shape for key, value in model.state_dict().items()} == keys


@every_model
def test_splitting_fused_projections_changes_no_output(name):
    model = build(name)
    batch = inputs(model)
    expected = logits(model, batch)
    total = sum(p.numel() for p in model.parameters())
    report = oelm.convert(model, "frozen")
    torch.testing.assert_close(logits(model, batch), expected, rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in model.parameters()) == total == report.total


@every_model
@every_method
def test_every_method_on_every_family(name, method):
    model = build(name)
    before = state(model)
    rng = torch.get_rng_state()
    try:
        oelm.convert(model, method, seed=1)
    except UserError as error:  # more columns than d_model, or what only the reference GPT can do
        too_wide = method.startswith("oelm-global") and name == "qwen3"
        no_lora = method == "lora" and (name == "oelm-gpt" or "pip install peft" in str(error))
        normed = PRESETS[method].qk_scale != "none" and name == "qwen3"
        assert too_wide or no_lora or normed or (method == "oelm-value-only" and name != "oelm-gpt"), error
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        return
    assert torch.equal(torch.get_rng_state(), rng), "the global generator is not used"
    oelm.audit(model, oelm.fingerprint(model))
    again = build(name)
    oelm.convert(again, method, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    preset = PRESETS[method]
    sites = find_sites(model)
    for site in sites:
        weight = site.module.weight
        if site.part is None:
            frozen = (
                select_layers(preset.freeze[site.role], site.num_layers)
                if site.role in preset.freeze and not (preset.schedule and preset.schedule.freeze_at)
                else ()
            )
            assert weight.requires_grad != (site.layer in frozen)
        kind = preset.start.get(site.role)
        if site.role in ("q", "k") and kind in ("orthogonal", "global", "hadamard"):
            gain = 8**-0.5 if name.startswith("t5") and site.role == "q" else 1.0
            assert deviation(site.weight, site.heads, gain).max() < 1e-6
        elif kind == "normal":
            assert site.weight.std().item() == pytest.approx(0.02, rel=0.15)
        elif kind == "gaussian":
            gain = 8**-0.5 if name.startswith("t5") and site.role == "q" else 1.0
            assert site.weight.std().item() == pytest.approx(gain * 32**-0.5, rel=0.15)
        elif site.role.startswith("ffn") and kind == "orthogonal":
            weight = site.weight if site.weight.shape[0] < site.weight.shape[1] else site.weight.t()
            assert deviation(weight, 1).max() < 1e-6


@every_model
def test_only_what_the_method_names_changes(name):
    model = build(name)
    sites = {site.name: site.weight.clone() for site in find_sites(model)}
    others = {
        n: p.clone()
        for n, p in model.named_parameters()
        if n not in {s.path + ".weight" for s in find_sites(model)}
    }
    oelm.convert(model, "oelm-trainable")
    for site in find_sites(model):
        assert torch.equal(site.weight, sites[site.name]) != (site.role in ("q", "k"))
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n], value) for n, value in others.items())


@every_model
def test_own_blocks_keep_their_row_space(name):
    """Where the model has weights, `oelm` takes the Q factor of each head's own block: FACTS, section 3."""
    model = build(name)
    old = {site.name: site.weight.clone() for site in find_sites(model) if site.role in ("q", "k")}
    report = oelm.convert(model, Method.from_dict({"name": "oelm", "init": "own"}))
    assert "orthogonal, from its own weight" in str(report)
    for site in find_sites(model):
        if site.role in ("q", "k"):
            gain = 8**-0.5 if name.startswith("t5") and site.role == "q" else 1.0
            expected = gain * to_weight(q_factor(to_blocks(old[site.name], site.heads)))
            np.testing.assert_allclose(site.weight.detach(), expected, atol=1e-6)


def test_auto_init_draws_for_a_reference_gpt_and_factors_for_others(tmp_path):
    scratch = build("oelm-gpt")
    scratch.save_pretrained(tmp_path)
    assert oelm.convert(scratch, "oelm").init == "fresh"
    pretrained = type(scratch).from_pretrained(tmp_path)
    assert oelm.convert(pretrained, "oelm").init == "own"
    assert oelm.convert(build("bert"), "oelm").init == "own"
    bert = build("bert")
    report = oelm.convert(bert, Method.from_dict({"name": "oelm", "init": "fresh"}))
    assert "orthogonal, fresh" in str(report)


def test_bert_biases_are_kept_by_factors_and_zeroed_by_draws():
    for init in ("own", "fresh"):
        model = build("bert")
        query = model.bert.encoder.layer[0].attention.self.query
        torch.nn.init.ones_(query.bias)
        oelm.convert(model, Method.from_dict({"name": "oelm", "init": init}))
        assert not query.bias.requires_grad
        assert query.bias.eq(1.0 if init == "own" else 0.0).all()


def test_a_classifier_and_its_base_model_get_the_same_blocks():
    config = build("bert").config
    fresh = Method.from_dict({"name": "oelm", "init": "fresh"})
    whole, base = (
        transformers.BertForSequenceClassification(config),
        transformers.BertModel(copy.deepcopy(config)),
    )
    oelm.convert(whole, fresh, seed=5)
    oelm.convert(base, fresh, seed=5)
    for a, b in zip(find_sites(whole), find_sites(base), strict=True):
        assert a.name == b.name
        if a.role in ("q", "k"):
            assert torch.equal(a.weight, b.weight)


def scores_std(model):
    """Standard deviation of each attention's scores on layer-normed inputs, in the family's own attention.

    A hook feeds the query and key projections layer-normed noise; the scores are read off the softmax
    the model returns: log p differs from the score by a constant per row.
    """
    noise = torch.Generator().manual_seed(0)

    def layer_normed(_, args):
        x = torch.randn(args[0].shape, generator=noise)
        return (torch.nn.functional.layer_norm(x, x.shape[-1:]), *args[1:])

    split = {id(part): m for m in model.modules() if isinstance(m, SplitQKV) for part in m.parts}
    called = {split.get(id(site.module), site.module) for site in find_sites(model) if site.role in "qk"}
    hooks = [module.register_forward_pre_hook(layer_normed) for module in called]
    with torch.no_grad():
        out = model(**inputs(model, rows=24, length=48), output_attentions=True)
    for hook in hooks:
        hook.remove()
    found = []
    for key in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        for layer in out.get(key) or ():
            rows = layer[:, :, -1, :].clamp_min(1e-30).log()  # the last query sees every key
            found.append((rows - rows.mean(-1, keepdim=True)).pow(2).mean().sqrt().item())
    return found


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "oelm-gpt"])
@pytest.mark.parametrize("method", ["oelm", "oelm-gaussian", "oelm-hadamard", "oelm-q-only"])
def test_scores_have_unit_scale_in_the_familys_own_attention(name, method):
    model = build(name)
    for site in find_sites(model):
        if site.role == "k":  # what `oelm-q-only` keeps, at unit scale, as T5's own start has it
            site.write(torch.randn_like(site.weight) / site.weight.shape[1] ** 0.5)
    oelm.convert(model, Method.from_dict({"name": method, "init": "fresh"}), seed=0)
    for path, parameter in model.named_parameters():
        if "relative_attention_bias" in path:
            parameter.data.zero_()  # T5 adds its position bias to the scores
    for module in model.modules():
        if hasattr(module, "config"):  # T5's stacks hold copies of it
            module.config._attn_implementation = "eager"  # the one that returns its softmax
    found = scores_std(model)
    assert found, "the model returned no attention"
    assert found == pytest.approx([1.0] * len(found), rel=0.15)


def test_scores_have_unit_scale_in_the_reference_gpt(monkeypatch):
    torch.manual_seed(0)
    model = oelm.create_oelm_classifier(2, 128, 2, 4, vocab_size=500, dropout=0.0)
    kernel = torch.nn.functional.scaled_dot_product_attention
    found = []

    def watched(q, k, v, **options):
        assert options.get("scale") is None  # then it is 1/sqrt(head_dim)
        found.append((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).std().item())
        return kernel(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model(torch.randint(0, 500, (16, 64)))
    assert found == pytest.approx([1.0, 1.0], rel=0.1)


def test_bert_base_has_the_published_size():
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3))
    total = sum(p.numel() for p in model.parameters())
    frozen = sum(site.parameters for site in find_sites(model) if site.role in ("q", "k"))
    assert (total, frozen, total - frozen) == (109_484_547, 14_174_208, 95_310_339)


@pytest.mark.slow
def test_bert_base_converted_has_the_published_size():
    model = transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3))
    report = oelm.convert(model, "oelm")
    assert (report.total, report.frozen) == (109_484_547, 14_174_208)


def test_frozen_layers_are_selected():
    model = build("llama")
    oelm.convert(model, Method.from_dict({"name": "oelm", "freeze": {"q": ":-1", "k": ":-1"}}))
    trains = {site.layer: site.module.weight.requires_grad for site in find_sites(model) if site.role == "k"}
    assert trains == {0: False, 1: False, 2: True}
    gpt2 = build("gpt2")
    report = oelm.convert(gpt2, Method.from_dict({"name": "oelm", "freeze": {"q": ":-1", "k": "all"}}))
    assert "2 of 3 tensors" in str(report)
    oelm.audit(gpt2)
    bart = build("bart")
    oelm.convert(bart, Method.from_dict({"name": "oelm", "freeze": {"q": "-1:"}}))
    frozen = {site.path for site in find_sites(bart) if not site.module.weight.requires_grad}
    assert frozen == {
        "model.encoder.layers.2.self_attn.q_proj",
        "model.decoder.layers.1.self_attn.q_proj",
        "model.decoder.layers.1.encoder_attn.q_proj",
    }, "the last layer of each stack"


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neox", "oelm-gpt", "t5"])
def test_every_role_can_be_frozen(name):
    model = build(name)
    method = Method(
        freeze=dict.fromkeys(("q", "k", "v", "o", "ffn_in", "ffn_out", "embeddings", "norms"), "all")
    )
    report = oelm.convert(model, method)
    left = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("classifier" in n or "pooler" in n or "lm_head" in n for n in left), left
    assert report.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    oelm.audit(model)


@pytest.mark.parametrize("name", ["gpt2", "bert", "oelm-gpt"])
def test_release_gives_an_ordinary_model_back(name):
    model, reference = build(name), build(name)
    oelm.convert(model, "frozen")
    oelm.release(model)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert not getattr(model.config, "oelm", None)
    assert oelm.convert(model, "oelm").frozen > 0
    with pytest.raises(UserError, match="was not converted"):
        oelm.release(reference)


def refused(model, message, method="oelm"):
    before = state(model)
    grads = [p.requires_grad for p in model.parameters()]
    classes = [type(m) for m in model.modules()]
    with pytest.raises(UserError, match=message) as error:
        oelm.convert(model, method)
    assert "\n" not in str(error.value)
    assert [p.requires_grad for p in model.parameters()] == grads
    assert [type(m) for m in model.modules()] == classes
    assert all(v.is_meta or torch.equal(before[k], v) for k, v in model.state_dict().items()), (
        "left as it was"
    )


def test_what_cannot_be_converted_is_refused_and_left_as_it_was():
    converted = build("gpt2")
    oelm.convert(converted, "oelm", seed=4)
    refused(converted, r"already converted \(method oelm, seed 4\).*oelm.release")
    with torch.device("meta"):
        refused(transformers.BertModel(build("bert").config), "meta device")
    tied = build("llama")
    tied.model.layers[1].self_attn.k_proj.weight = tied.model.layers[0].self_attn.k_proj.weight
    refused(tied, "share one weight")
    same = build("bert")
    attention = same.bert.encoder.layer[0].attention.self
    attention.key.weight = attention.query.weight
    refused(same, r"attention.self.query and .*attention.self.key share one weight \(tied\)")
    integer = build("bert")
    query = integer.bert.encoder.layer[1].attention.self.query
    query.weight = torch.nn.Parameter(query.weight.to(torch.int8), requires_grad=False)
    refused(integer, "quantised")
    flagged = build("bert")
    flagged.is_quantized = True
    refused(flagged, "quantised")
    replaced = build("bert")
    replaced.bert.encoder.layer[1].attention.self.query = torch.nn.Identity()
    refused(replaced, "layer.1.attention.self.query is a Identity, not a plain linear layer")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=VOCAB, add_cross_attention=True
    )
    refused(transformers.GPT2LMHeadModel(config), "cross-attention")
    refused(build("qwen3"), "'global' needs", method="oelm-global")
    wide = transformers.Qwen3Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=48, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    for method in ("oelm", Method(start={"q": "polar"})):
        refused(transformers.Qwen3ForCausalLM(wide), "head_dim 64 > d_model 32", method=method)
    broken = build("bert")
    broken.bert.encoder.layer[0].attention.self.query.weight.data[0, 0] = float("nan")
    refused_nan(broken)
    nothing = Method.from_dict({"name": "oelm", "freeze": {"q": "12", "k": "7:"}})
    refused(build("bert"), r"freeze q = '12' selects none of the model's 3 layers", method=nothing)
    for layers, others in ((":-3", {}), (":-4", {"embeddings": "all"}), ("9", {"embeddings": "all"})):
        none = Method(freeze={"q": layers, "k": layers} | others)
        refused(build("bert"), f"freeze q = '{layers}' selects none of the model's 3 layers", method=none)
    refused(torch.compile(build("bert"), backend="eager"), "convert it before wrapping")


def refused_nan(model):
    with pytest.raises(UserError, match=r"layer.0.attention.self.query holds values that are not finite"):
        oelm.convert(model, "oelm")
    assert all(p.requires_grad for p in model.parameters())


def test_an_unknown_family_is_told_how_to_join(monkeypatch):
    config = transformers.AlbertConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=48, vocab_size=VOCAB
    )
    refused(transformers.AlbertModel(config), "'albert'; supported: oelm-gpt, bert.*oelm.FAMILIES")
    with pytest.raises(UserError, match="convert it before wrapping"):
        oelm.convert(torch.nn.Linear(2, 2), "oelm")
    # ELECTRA is built like BERT: one row, no code.
    monkeypatch.setitem(oelm.FAMILIES, "electra", oelm.FAMILIES["bert"])
    electra = transformers.ElectraModel(
        transformers.ElectraConfig(
            hidden_size=32,
            embedding_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            vocab_size=VOCAB,
        )
    )
    assert oelm.convert(electra, "oelm").frozen == 2 * 2 * (32 * 32 + 32)


def test_a_row_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setitem(oelm.FAMILIES, "bert", oelm.FAMILIES["llama"])
    refused(build("bert"), "its row does not fit")


@pytest.mark.parametrize("name", ["bert", "gpt2", "oelm-gpt"])
def test_what_the_user_froze_stays_frozen(name, tmp_path):
    """A linear probe: the whole body frozen by hand, then converted, saved, loaded and released."""
    model = build(name)
    body = getattr(model, model.base_model_prefix)
    body.requires_grad_(False)
    oelm.convert(model, "oelm")
    assert not any(p.requires_grad for p in body.parameters())
    oelm.audit(model, oelm.fingerprint(model))
    oelm.audit(model)
    model.save_pretrained(tmp_path)
    loaded = oelm.load(tmp_path)
    assert not any(p.requires_grad for p in getattr(loaded, loaded.base_model_prefix).parameters())
    oelm.release(loaded)
    # Only what the method had frozen trains again; of a fused matrix that is the whole.
    attention = ("query", "key", "q_proj", "k_proj", "c_attn")
    trains = {n for n, p in loaded.named_parameters() if p.requires_grad}
    assert trains and all(n.split(".")[-2] in (*attention, "classifier") for n in trains)


def test_a_method_of_ones_own_survives_saving(tmp_path):
    model = build("gpt2")
    method = Method("only-queries", start={"q": "orthogonal"}, freeze={"q": ":-1"})
    oelm.convert(model, method)
    oelm.audit(model)
    model.save_pretrained(tmp_path)
    assert oelm.load(tmp_path).config.oelm["method"]["name"] == "only-queries"


def test_an_overridden_preset_does_not_call_itself_by_the_presets_name():
    report = oelm.convert(build("bert"), Method.from_dict({"name": "oelm", "freeze": {"q": "all"}}))
    assert report.method == "oelm (freeze=q:all)"


def test_two_models_of_one_config_are_two_models():
    config = oelm.gpt_config("gpt-tiny", vocab_size=50)
    one, other = oelm.OelmGPTForCausalLM(config), oelm.OelmGPTForCausalLM(config)
    oelm.convert(one, "baseline")
    oelm.convert(other, "oelm")
    assert (one.config.oelm["method"]["name"], other.config.oelm["method"]["name"]) == ("baseline", "oelm")
    assert config.oelm is None
    assert one.transformer.config is one.config
    bert_config = build("bert").config
    first, second = (transformers.BertModel(bert_config) for _ in "ab")
    oelm.convert(first, "oelm")
    with pytest.raises(UserError, match="was not converted"):
        oelm.release(second)
    oelm.audit(first)
    first.set_attn_implementation("eager")
    assert first.encoder.layer[0].attention.self.config._attn_implementation == "eager"


@pytest.mark.parametrize("seed", [np.int64(3), True])
def test_whole_numbers_are_seeds(seed, tmp_path):
    model = build("bert")
    oelm.convert(model, "oelm", seed=seed)
    model.save_pretrained(tmp_path)
    assert oelm.load(tmp_path).config.oelm["seed"] == int(seed)


@pytest.mark.parametrize("seed", ["0", 1.5, None])
def test_other_things_are_not(seed):
    with pytest.raises(UserError, match="seed must be a whole number"):
        oelm.convert(build("bert"), "oelm", seed=seed)


def test_a_fused_row_with_fewer_key_heads_is_refused(monkeypatch):
    row = oelm.Family(
        attentions=(
            oelm.Attention("layers.*.self_attn", qkv="qkv_proj", o="o_proj", kv_heads="num_key_value_heads"),
        ),
        ffn_in=("layers.*.mlp.gate_up_proj",),
        ffn_out=("layers.*.mlp.down_proj",),
    )
    monkeypatch.setitem(oelm.FAMILIES, "phi3", row)
    config = transformers.Phi3Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=48, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    refused(transformers.Phi3ForCausalLM(config), "fewer key heads")


def test_the_digest_does_not_depend_on_the_head(tmp_path):
    model = transformers.BertForMaskedLM(build("bert").config)
    method = Method(freeze={"norms": "all", "q": "all"})
    oelm.convert(model, method)
    model.save_pretrained(tmp_path)
    classifier = transformers.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    oelm.refreeze(classifier)
    assert not classifier.bert.embeddings.LayerNorm.weight.requires_grad


@pytest.mark.parametrize("name", ["bert", "gpt2", "oelm-gpt"])
def test_distributed_checkpoints_know_the_parameters(name):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = build(name)
    oelm.convert(model, "oelm")
    assert set(get_model_state_dict(model)) == set(model.state_dict())


def test_the_report_prints_as_a_table():
    text = str(oelm.convert(build("t5"), "oelm", seed=2))
    lines = text.splitlines()
    assert lines[0] == "T5ForConditionalGeneration: method oelm, seed 2"
    q = next(line.split("  ") for line in lines if line.startswith("q "))
    assert "0.354" in q, "T5's queries carry 1/sqrt(head_dim)"
    assert max(map(len, lines)) < 110
    assert [line.split(" ")[0] for line in lines[-2:]] == ["parameters", "scores'"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, tmp_path):
    model = build("bert").to(dtype)
    oelm.convert(model, "oelm")
    oelm.audit(model)
    model.save_pretrained(tmp_path)
    for loaded in (dtype, torch.float32, "auto"):
        oelm.audit(oelm.load(tmp_path, dtype=loaded))


def test_a_checkpoint_saved_wide_and_loaded_narrow_is_recognised(tmp_path):
    model = build("gpt2")
    oelm.convert(model, "oelm")
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert oelm.audit(oelm.load(tmp_path, dtype=dtype)).orthonormal_heads == 24


def test_a_checkpoint_trained_after_all_is_refused(tmp_path):
    model = build("gpt2")
    oelm.convert(model, "oelm")
    model.save_pretrained(tmp_path)
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    train(plain, steps=2)
    plain.save_pretrained(tmp_path)
    with pytest.raises(AuditError, match="not the weight that was frozen"):
        oelm.load(tmp_path)
    build("bert").save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="was not converted"):
        oelm.load(tmp_path / "other")
    with pytest.raises(UserError, match="nothing: there is no such folder"):
        oelm.load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not a model that can be loaded"):
        oelm.load(tmp_path / "empty")


@pytest.mark.parametrize("method", ["oelm-polar-scaled", Method("own", {"q": "orthogonal"}, gain="own")])
def test_a_head_may_keep_the_scale_it_had(method):
    model = build("bert")
    old = {
        site.path: to_blocks(site.weight.clone(), site.heads)
        for site in find_sites(model)
        if site.role in "qk"
    }
    oelm.convert(model, method, seed=0)
    oelm.audit(model, oelm.fingerprint(model))
    changed = [site for site in find_sites(model) if site.role in oelm.get_method(method).start]
    assert changed
    for site in changed:
        before, after = old[site.path], to_blocks(site.weight, site.heads)
        norms = np.linalg.norm(before, ord=2, axis=(1, 2))
        assert np.allclose(np.linalg.svd(after, compute_uv=False), norms[:, None], rtol=1e-5)
        for a, b in zip(before, after, strict=True):  # the same columns space: the projector is kept
            assert np.allclose(a @ np.linalg.pinv(a), b @ np.linalg.pinv(b), atol=1e-4)


def test_a_head_without_a_scale_is_refused():
    model = build("bert")
    site = next(site for site in find_sites(model) if site.role == "q")
    with torch.no_grad():
        site.weight.zero_()
    with pytest.raises(UserError, match="scale 0"):
        oelm.convert(model, Method("x", {"q": "orthogonal"}, init="fresh", gain="own"))


def test_blocks_are_drawn_on_one_core_with_the_same_bits():
    """Threads of BLAS that wait for each other made a conversion of Medium-512 take 15 s instead of 0.3."""

    def threads():
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    def blocks():
        return draw_blocks("orthogonal", 256, 2, 64, seed=0, name="w").tobytes()

    with threadpool_limits(limits=2, user_api="blas"):
        before, several = threads(), blocks()
        with one_blas_thread():
            assert threads() and set(threads()) == {1}
            one = blocks()
        assert threads() == before
    assert one == several
