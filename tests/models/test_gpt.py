import math

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2LMHeadModel,
)

import oelm
from oelm.errors import UserError
from oelm.models.gpt_config import PRESETS, gpt_config

CLASSES = [
    oelm.OelmGPTForCausalLM,
    oelm.OelmGPTForSequenceClassification,
    oelm.OelmGPTForTokenClassification,
    oelm.OelmGPTForQuestionAnswering,
]
AUTO = [
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
]


def tiny(**fields):
    sizes = {"vocab_size": 97, "d_model": 32, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 40}
    return oelm.OelmGPTConfig(**(sizes | fields))


def logits_of(out):
    return out.start_logits if "start_logits" in out else out.logits


def loud(model):
    """Start far from zero, so that logits differ visibly where they should."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model.eval()


def test_medium_512_has_the_published_size():
    model = oelm.OelmGPTForCausalLM(gpt_config("gpt-medium-512"))
    report = oelm.convert(model, "oelm")
    assert report.total == 44_896_768
    assert report.frozen == 3_145_728
    assert report.trainable == 41_751_040
    assert "44,896,768 = 41,751,040 trainable + 3,145,728 frozen (7.0 %)" in str(report)


def test_presets_have_their_shapes():
    shapes = {name: gpt_config(name) for name in PRESETS}
    got = {name: (c.num_layers, c.d_model, c.num_heads) for name, c in shapes.items()}
    assert got["gpt-tiny"][:2] == (2, 128)
    assert got["gpt-small"][:2] == (4, 256)
    assert got["gpt-large"][:2] == (8, 768)
    assert got["gpt2-small"] == (12, 768, 12)
    assert got["gpt2-medium"] == (24, 1024, 16)
    assert got["gpt2-large"] == (36, 1280, 20)
    assert got["gpt2-xl"] == (48, 1600, 25)
    with pytest.raises(UserError, match="unknown model 'gpt-huge'; known sizes: gpt-tiny"):
        gpt_config("gpt-huge")


@pytest.mark.parametrize("tie", [True, False])
def test_logits_equal_hugging_face_gpt2(tie):
    model = loud(oelm.OelmGPTForCausalLM(tiny(tie_word_embeddings=tie)))
    twin = oelm.to_gpt2(model)
    assert type(twin) is GPT2LMHeadModel
    ids = torch.randint(0, 97, (3, 40))
    with torch.no_grad():
        ours, theirs = model(ids).logits, twin(ids).logits
    assert ours.std() > 1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_gpt2_export_is_a_vanilla_checkpoint(tmp_path):
    model = loud(oelm.OelmGPTForCausalLM(tiny()))
    oelm.convert(model, "oelm")
    oelm.to_gpt2(model).save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 97, (2, 20))
    torch.testing.assert_close(model(ids).logits, loaded(ids).logits, rtol=1e-5, atol=1e-5)
    assert not hasattr(loaded.config, "oelm"), "an ordinary model: nothing claims it is frozen"


def test_rotary_has_no_gpt2_form():
    with pytest.raises(UserError, match="learned positions"):
        oelm.to_gpt2(oelm.OelmGPTForCausalLM(tiny(positions="rotary")))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("cls", CLASSES)
def test_padding_does_not_change_a_text(cls, positions, pooling):
    model = loud(cls(tiny(positions=positions, pooling=pooling, num_labels=3)))
    torch.manual_seed(0)
    lengths, longest = [5, 11, 1, 8], 11
    texts = [torch.randint(0, 97, (n,)) for n in lengths]
    alone = [logits_of(model(t[None]))[0] for t in texts]
    for side in ("left", "right"):
        ids, mask = torch.full((4, longest), 13), torch.zeros(4, longest, dtype=torch.long)
        for row, text in enumerate(texts):
            where = slice(longest - len(text), None) if side == "left" else slice(len(text))
            ids[row, where], mask[row, where] = text, 1
        batched = logits_of(model(ids, attention_mask=mask))
        for row, text in enumerate(texts):
            got = batched[row]
            if cls is not oelm.OelmGPTForSequenceClassification:
                got = got[-len(text) :] if side == "left" else got[: len(text)]
            torch.testing.assert_close(got, alone[row], rtol=1e-4, atol=1e-5)


def test_directions():
    """A language model sees nothing of what follows; a classifier's tokens see it."""
    ids = torch.randint(0, 97, (1, 12))
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 97
    lm = loud(oelm.OelmGPTForCausalLM(tiny()))
    assert torch.allclose(lm(ids).logits[0, :-1], lm(changed).logits[0, :-1], atol=1e-6)
    tagger = loud(oelm.OelmGPTForTokenClassification(tiny()))
    assert not torch.allclose(tagger(ids).logits[0, 0], tagger(changed).logits[0, 0], atol=1e-3)


def test_rotary_scores_depend_on_distance_only():
    from oelm.models.gpt_block import rotate, rotation_of

    q, k = torch.randn(2, 1, 1, 1, 16)
    positions = torch.arange(9)[None]
    table = rotation_of(positions, 16, 10000.0)
    at = lambda x, p: rotate(x, table[:, :, p : p + 1])  # noqa: E731
    score = lambda p, s: (at(q, p) * at(k, s)).sum()  # noqa: E731
    assert torch.allclose(score(2, 0), score(8, 6), atol=1e-5)
    assert not torch.allclose(score(2, 0), score(3, 0), atol=1e-3)
    assert torch.allclose(at(q, 5).norm(), q.norm())


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_with_a_cache_gives_the_same_tokens(positions, padded):
    model = loud(oelm.OelmGPTForCausalLM(tiny(positions=positions)))
    ids = torch.randint(0, 97, (3, 6))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = 0
    run = lambda cache: model.generate(  # noqa: E731
        ids, attention_mask=mask, max_new_tokens=20, do_sample=False, use_cache=cache, pad_token_id=0
    )
    assert torch.equal(run(True), run(False))
    if padded:
        alone = model.generate(ids[1:2, 3:], max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert torch.equal(run(True)[1, 3:], alone[0])


def test_a_cache_continues_a_text_in_chunks():
    model = loud(oelm.OelmGPTForCausalLM(tiny()))
    ids = torch.randint(0, 97, (2, 15))
    whole = model(ids).logits
    first = model(ids[:, :6], use_cache=True)
    second = model(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-4, atol=1e-5)


def test_two_methods_share_everything_but_q_and_k():
    def build(method):
        return oelm.create_oelm_classifier(3, 64, 2, 4, method=method, seed=7, vocab_size=50).state_dict()

    baseline, frozen = build("baseline"), build("oelm")
    different = {key for key in baseline if not torch.equal(baseline[key], frozen[key])}
    assert different == {f"transformer.h.{i}.attn.{x}_proj.weight" for i in (0, 1) for x in "qk"}
    random = build("oelm-random")
    assert all(torch.equal(baseline[key], random[key]) for key in baseline), "the usual start, frozen"


def test_tensors_start_by_seed_and_name():
    backbone = lambda model: model.transformer.state_dict()  # noqa: E731
    lm = backbone(oelm.OelmGPTForCausalLM(tiny(init_seed=5)))
    torch.manual_seed(99)
    deeper = backbone(oelm.OelmGPTForSequenceClassification(tiny(init_seed=5, num_layers=5)))
    assert all(torch.equal(lm[key], deeper[key]) for key in lm), "other layers and heads do not matter"
    other = backbone(oelm.OelmGPTForCausalLM(tiny(init_seed=6)))
    assert not any(torch.equal(lm[k], other[k]) for k in lm if k.endswith("weight") and "ln_" not in k)
    flat = torch.cat([v.flatten() for k, v in lm.items() if k.endswith("weight") and "ln_" not in k])
    assert flat.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(("cls", "auto"), list(zip(CLASSES, AUTO, strict=True)))
def test_save_and_load_through_auto_classes_keeps_it_frozen(cls, auto, tmp_path):
    model = loud(cls(tiny(num_labels=2)))
    oelm.convert(model, "oelm")
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is cls
    assert {n for n, p in loaded.named_parameters() if not p.requires_grad} == {
        f"transformer.h.{i}.attn.{x}_proj.weight" for i in range(3) for x in "qk"
    }
    ids = torch.randint(0, 97, (2, 9))
    assert torch.equal(logits_of(model(ids)), logits_of(loaded.eval()(ids)))
    oelm.audit(loaded)
    base = AutoModel.from_pretrained(tmp_path)
    assert not base.h[0].attn.q_proj.weight.requires_grad


def test_a_config_with_a_method_builds_a_converted_model():
    model = oelm.create_oelm_classifier(3, 32, 2, 4, seed=3, vocab_size=50)
    again = AutoModelForSequenceClassification.from_config(model.config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    oelm.audit(again)
    assert not again.transformer.h[1].attn.k_proj.weight.requires_grad
    assert not AutoModel.from_config(model.config).h[1].attn.k_proj.weight.requires_grad


def test_a_saved_config_builds_the_same_start(tmp_path):
    model = oelm.create_oelm_classifier(3, 32, 2, 4, seed=3, vocab_size=50)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_transformers_names_for_the_sizes_work():
    config = oelm.OelmGPTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    assert (config.d_model, config.num_layers, config.num_heads, config.d_ff) == (64, 2, 4, 256)
    with pytest.raises(UserError, match="30 is not a multiple"):
        oelm.OelmGPTConfig(hidden_size=30, num_attention_heads=4)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_trainer_accumulates_correctly(cls, tmp_path):
    """16 texts at once and 4 x 4 give the same first loss and gradient in Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(0, 97, (8,))} for _ in range(16)]
    for row in rows:
        if cls is oelm.OelmGPTForQuestionAnswering:
            row |= {"start_positions": torch.tensor(1), "end_positions": torch.tensor(2)}
        else:
            by_text = cls is oelm.OelmGPTForSequenceClassification
            row["labels"] = torch.tensor(1) if by_text else torch.randint(0, 3, (8,))

    def first_step(accumulate):
        arguments = TrainingArguments(
            tmp_path / str(accumulate), per_device_train_batch_size=16 // accumulate,
            gradient_accumulation_steps=accumulate, max_steps=1, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(cls(tiny(num_labels=3)), arguments, train_dataset=rows)
        trainer.train()
        return [trainer.state.log_history[0][key] for key in ("loss", "grad_norm")]

    assert first_step(4) == pytest.approx(first_step(1), rel=1e-3)


def test_what_a_static_cache_would_get_wrong_is_refused():
    model = loud(oelm.OelmGPTForCausalLM(tiny()))
    ids = torch.randint(0, 97, (1, 5))
    with pytest.raises(UserError, match="static cache is not supported"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static", pad_token_id=0)
    with pytest.raises(UserError, match="attention_mask must be"):
        model(ids, attention_mask=torch.ones(1, 1, 5, 5))


@pytest.mark.parametrize("split", [False, True])
def test_weights_changed_after_generating_are_used(split):
    """The fused matrix is kept from token to token; it must not outlive a change of the weights."""
    model = loud(oelm.OelmGPTForCausalLM(tiny()))
    if split:  # the same in a GPT-2 whose matrices were split
        model = oelm.to_gpt2(model)
        oelm.convert(model, "frozen")
    ids = torch.randint(0, 97, (1, 5))
    write = lambda: model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)  # noqa: E731
    slow = lambda: model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False, pad_token_id=0)  # noqa: E731
    first = write()
    assert torch.equal(first, slow())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)  # leaves no trace in `_version`
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert not torch.equal(write(), first)
    assert torch.equal(write(), slow())
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
    assert torch.equal(write(), slow())


def test_an_answer_outside_the_window_does_not_count():
    model = loud(oelm.OelmGPTForQuestionAnswering(tiny()))
    ids = torch.randint(0, 97, (2, 7))
    both = model(ids, start_positions=torch.tensor([1, 9]), end_positions=torch.tensor([3, -1])).loss
    one = model(ids[:1], start_positions=torch.tensor([1]), end_positions=torch.tensor([3])).loss
    torch.testing.assert_close(both, one, rtol=1e-4, atol=1e-5)


def test_a_language_model_becomes_a_classifier(tmp_path):
    lm = loud(oelm.OelmGPTForCausalLM(tiny()))
    oelm.convert(lm, "oelm")
    lm.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert torch.equal(classifier.transformer.h[1].mlp.fc_in.weight, lm.transformer.h[1].mlp.fc_in.weight)
    assert classifier.classifier.weight.std() > 0
    assert not classifier.transformer.h[0].attn.q_proj.weight.requires_grad
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert torch.equal(classifier.classifier.weight, again.classifier.weight), (
        "a new head starts by seed and name"
    )


def test_pipeline_runs(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {"good": 0, "bad": 1, "film": 2, "[PAD]": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="film"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    model = oelm.create_oelm_classifier(
        2, 32, 1, 4, vocab_size=4, id2label={0: "neg", 1: "pos"}, label2id={"neg": 0, "pos": 1}
    )
    model.save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    answers = pipeline("text-classification", model=str(tmp_path), tokenizer=str(tmp_path))(
        ["good film", "bad"]
    )
    assert {a["label"] for a in answers} <= {"neg", "pos"}


@pytest.mark.parametrize("cls", CLASSES)
def test_losses_are_means_over_what_counts(cls):
    model = loud(cls(tiny(num_labels=3)))
    ids = torch.randint(0, 97, (2, 7))
    if cls is oelm.OelmGPTForQuestionAnswering:
        out = model(ids, start_positions=torch.tensor([1, 2]), end_positions=torch.tensor([3, 3]))
        start, end = out.start_logits.log_softmax(-1), out.end_logits.log_softmax(-1)
        expected = -(start[0, 1] + start[1, 2] + end[0, 3] + end[1, 3]) / 4
    elif cls is oelm.OelmGPTForSequenceClassification:
        out = model(ids, labels=torch.tensor([2, 0]))
        expected = -(out.logits.log_softmax(-1)[[0, 1], [2, 0]]).mean()
    else:
        labels = ids.clone() if cls is oelm.OelmGPTForCausalLM else torch.randint(0, 3, (2, 7))
        labels[0, 3] = -100
        out = model(ids, labels=labels)
        scores = out.logits.log_softmax(-1)
        if cls is oelm.OelmGPTForCausalLM:
            scores, labels = scores[:, :-1], labels[:, 1:]
        kept = labels != -100
        expected = -scores[kept].gather(1, labels[kept][:, None]).mean()
    torch.testing.assert_close(out.loss, expected)


def test_gradient_checkpointing_gives_the_same_gradients():
    ids = torch.randint(0, 97, (2, 9))

    def gradients(checkpointing):
        model = oelm.create_oelm_classifier(3, 32, 3, 4, vocab_size=97, dropout=0.0).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=torch.tensor([0, 2])).loss.backward()
        return {n: p.grad for n, p in model.named_parameters()}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain["transformer.h.0.attn.q_proj.weight"] is None
    for name, gradient in plain.items():
        if gradient is not None:
            torch.testing.assert_close(gradient, checkpointed[name])


def test_dropout_fields_are_separate():
    model = oelm.OelmGPTForSequenceClassification(tiny(attention_dropout=0.5, dropout=0.0)).train()
    ids = torch.randint(0, 97, (1, 12))
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model = oelm.OelmGPTForSequenceClassification(tiny()).train()
    assert torch.equal(model(ids).logits, model(ids).logits), "the presets have no dropout"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 30}, "30 is not a multiple of num_heads 4"),
        ({"positions": "alibi"}, "'learned' or 'rotary'"),
        ({"pooling": "max"}, "'last' or 'mean'"),
        ({"d_model": 36, "num_heads": 12, "positions": "rotary"}, "even head size, not 3"),
    ],
)
def test_bad_configurations_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        tiny(**fields)


def test_too_long_a_text_is_refused_by_learned_positions_only():
    ids = torch.randint(0, 97, (1, 41))
    with pytest.raises(UserError, match="41 positions, but this model has 40"):
        oelm.OelmGPTForCausalLM(tiny())(ids)
    assert oelm.OelmGPTForCausalLM(tiny(positions="rotary"))(ids).logits.shape == (1, 41, 97)


def test_the_reports_call():
    model = oelm.create_oelm_classifier(
        num_classes=4, d_model=64, num_layers=2, num_heads=8, freeze_qk=True, init_method="orthogonal"
    )
    assert model.config.dropout == model.config.attention_dropout == 0.1
    assert model.config.oelm["method"]["name"] == "oelm"
    assert model.config.oelm["init"] == "fresh"
    names = {
        (kind, frozen): oelm.create_oelm_classifier(2, 16, 1, 2, frozen, kind, vocab_size=9).config.oelm[
            "method"
        ]["name"]
        for kind in ("orthogonal", "normal")
        for frozen in (True, False)
    }
    assert sorted(names.values()) == ["baseline", "oelm", "oelm-random", "oelm-trainable"]
    with pytest.raises(UserError, match="init_method"):
        oelm.create_oelm_classifier(2, init_method="xavier")


def test_an_untrained_language_model_is_at_chance():
    model = oelm.OelmGPTForCausalLM(tiny()).eval()
    ids = torch.randint(0, 97, (4, 40))
    assert model(ids, labels=ids).loss.item() == pytest.approx(math.log(97), abs=0.1)
