"""Statistics of heads: Hugging Face's own attention weights and closed forms as oracles."""

import gc
import json
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification

import oelm
from oelm.inference.attention_page import attention_page
from oelm.inference.attention_statistics import MEASURES, AttentionStatistics, measure_heads
from oelm.models.families import find_sites
from tests import tiny
from tests.command_line import caller


def _one_by_one(model: Any, batch: dict[str, torch.Tensor]) -> Iterator[int]:
    for row in range(len(batch["input_ids"])):
        model(**{name: values[row : row + 1] for name, values in batch.items()})
        yield batch["input_ids"].shape[1]


def _measure(model: Any, batch: dict[str, torch.Tensor], start: Any = None) -> AttentionStatistics:
    return measure_heads(model, _one_by_one(model, batch), start)


def _by_hand(weights: torch.Tensor, cross: bool) -> dict[str, np.ndarray]:
    """The measures of one layer from its attention weights (B, H, T, S), by head."""
    p = weights.double().numpy()[:, :, 0 if cross else 1 :]
    seen = p > 0
    logs = np.log(np.where(seen, p, 1))
    counts, places = seen.sum(-1), np.arange(p.shape[2])
    means = logs.sum(-1) / counts
    squares = (((logs - means[..., None]) * seen) ** 2).sum(-1)  # of scores: they differ by a constant
    values = {
        "entropy": -(p * logs).sum(-1).mean((0, 2)),
        "relative_entropy": -(p * logs).sum((0, 2, 3)) / np.log(counts).sum((0, 2)),
        "first": p[..., 0].mean((0, 2)),
        "score_std": np.sqrt(squares.sum((0, 2)) / (counts - 1).sum((0, 2))),
    }
    if not cross:
        values["previous"] = p[:, :, places, places].mean((0, 2))
        values["same"] = p[:, :, places, places + 1].mean((0, 2))
    return values


@pytest.mark.parametrize(
    "name", [n for n in tiny.BUILDERS if n not in ("oelm-gpt", "bert-decoder", "t5-gated")]
)
def test_heads_do_what_hugging_face_says(name: str) -> None:
    model = tiny.build(name)
    with torch.no_grad():  # larger weights: attention of a fresh model is almost uniform
        for site in find_sites(model):
            if site.role in ("q", "k"):
                site.write(site.weight * (3 if name == "t5" else 8))
    batch = tiny.inputs(model, rows=3, length=9)
    batch.pop("labels") if not model.config.is_encoder_decoder else None
    statistics = _measure(model, batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    kinds = {"attentions": out.get("attentions")}
    if model.config.is_encoder_decoder:
        kinds = {kind: out[kind] for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions")}
    assert len(statistics.attentions) == len(kinds)
    for at, (kind, layers) in zip(statistics.attentions, kinds.items(), strict=True):
        for layer, weights in enumerate(layers):
            for measure, values in _by_hand(weights, kind == "cross_attentions").items():
                grid = statistics.grid(at, measure)
                assert grid is not None and grid.shape == (len(layers), weights.shape[1])
                np.testing.assert_allclose(
                    grid[layer], values, rtol=2e-3, atol=1e-5, err_msg=f"{at} {measure}"
                )
    assert statistics.texts == 3 and statistics.tokens == 27


def test_a_head_made_to_look_at_the_previous_token() -> None:
    """One-hot positions, and queries that are the keys of the position before."""
    config = oelm.OelmGPTConfig(
        d_model=16, num_layers=1, num_heads=2, vocab_size=9, max_position_embeddings=8
    )
    model = oelm.OelmGPTForCausalLM(config)
    body = model.transformer
    with torch.no_grad():
        body.wte.weight.zero_()
        body.wpe.weight.copy_(torch.eye(8, 16))
        attention = body.h[0].attn
        attention.q_proj.weight.zero_()
        attention.k_proj.weight.zero_()
        attention.k_proj.weight[:8, :8] = 10 * torch.eye(8)  # head 0; head 1 is uniform
        attention.q_proj.weight[:8, :8] = 10 * torch.eye(8).roll(-1, 0)
    statistics = _measure(model, {"input_ids": torch.zeros(1, 8, dtype=torch.long)})
    first, second = statistics.heads
    assert first.previous == pytest.approx(1) and first.same == pytest.approx(0, abs=1e-6)
    assert first.first == pytest.approx(1 / 7) and first.entropy == pytest.approx(0, abs=1e-6)
    uniform = sum(1 / n for n in range(2, 9)) / 7
    assert second.first == pytest.approx(uniform) and second.same == pytest.approx(uniform)
    assert statistics.uniform == {"h.*.attn": pytest.approx(uniform)}
    assert second.relative_entropy == pytest.approx(1) and second.score_std == pytest.approx(0)
    assert second.entropy == pytest.approx(sum(math.log(n) for n in range(2, 9)) / 7)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_oelm_starts_with_full_rank_and_scores_of_scale_one(positions: str) -> None:
    config = oelm.OelmGPTConfig(
        d_model=128,
        num_layers=2,
        num_heads=4,
        vocab_size=500,
        max_position_embeddings=64,
        positions=positions,
    )
    model = oelm.OelmGPTForSequenceClassification(config)
    start = oelm.OelmGPTForSequenceClassification(config)
    for one in (model, start):
        oelm.convert(one, "oelm", seed=0)
    ids = torch.randint(500, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.transformer.h[1].attn.q_proj.weight[:32] *= 2  # head 0 of layer 1
    statistics = _measure(model, {"input_ids": ids}, start)
    scales = [head.score_std for head in statistics.heads]
    assert scales[:4] == pytest.approx([1] * 4, abs=0.15) and scales[4] == pytest.approx(2, abs=0.3)
    assert [head.effective_rank for head in statistics.heads] == pytest.approx([32] * 8)
    assert statistics.head_dim == 32
    moved = [head.distance for head in statistics.heads]
    assert moved == pytest.approx([0] * 4 + [math.sqrt(0.5)] + [0] * 3) and moved[0] == 0.0


def test_a_block_of_rank_one() -> None:
    model = tiny.build("llama")
    key = next(site for site in find_sites(model) if site.role == "k" and site.layer == 1)
    weight = key.weight.detach().clone()
    weight[1:8] = weight[:1]  # the first of two key heads: it serves two of the four query heads
    key.write(weight)
    batch = {"input_ids": torch.arange(12)[None] + 5}
    ranks = _measure(model, batch).grid("layers.*.self_attn", "effective_rank")
    assert ranks is not None
    assert (
        ranks[1, :2] == pytest.approx([1, 1], abs=1e-4) and (ranks[1, 2:] > 2).all() and (ranks[0] > 2).all()
    )


def test_a_model_computes_as_before_while_it_is_measured() -> None:
    for name in ("gpt2", "oelm-gpt", "t5"):
        model = tiny.build(name)
        batch = tiny.inputs(model, rows=2)
        before = tiny.logits(model, batch)
        _measure(model, batch)
        torch.testing.assert_close(tiny.logits(model, batch), before, rtol=0, atol=0)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_page_has_a_cell_for_every_head_and_their_difference(lang: str) -> None:
    model = tiny.build("gpt2")
    batch = {"input_ids": torch.arange(12)[None] + 5}
    one = _measure(model, batch, model)
    page = attention_page({"a <b>": one, "c": one}, lang)
    assert page.count("<rect") == 3 * 7 * len(one.heads) and "<b>: " not in page and "a &lt;b&gt;" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page
    assert attention_page({"c": _measure(model, batch)}, lang).count("<rect") == 6 * len(one.heads)


def test_nothing_holds_a_model_that_was_measured() -> None:
    """transformers keeps what was registered with it for good."""
    model = tiny.build("gpt2")
    _measure(model, {"input_ids": torch.arange(12)[None] + 5})
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_the_command_compares_two_runs_on_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the reference GPT, and of a Hugging Face model that a run has trained."""
    call = caller(monkeypatch, capsys)
    rows = "\n".join(f"{'good fine' if i % 2 else 'bad poor'} film {i},{i % 2}" for i in range(60))
    (tmp_path / "data.csv").write_text(f"text,label\n{rows}\n")
    (tmp_path / "lines.txt").write_text("a good film\na poor film\n")
    config = tiny.build("bert").config
    config.vocab_size, config.num_labels = 300, 2
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    given = ("--data", tmp_path / "data.csv", "--max-length", 24, "--tokenizer", "train:300", "--steps", 3)
    for model in ("gpt-tiny", tmp_path / "bert"):
        runs = []
        for method in ("baseline", "oelm"):
            runs.append(tmp_path / f"{Path(model).name}-{method}")
            code, _, err = call("train", *given, "--model", model, "--method", method, "--out", runs[-1])
            assert code == 0, err
        code, out, err = call("explain", *runs, "--lines", tmp_path / "lines.txt", "--json")
        assert code == 0, err
        answer = json.loads(out)
        one, other = (answer[str(run)] for run in runs)
        assert one["texts"] == other["texts"] == 2
        assert {*answer["difference"]} == {*MEASURES} and any(head["distance"] for head in one["heads"])
        for measure, by_attention in answer["difference"].items():
            grids = [value for grid in by_attention.values() for row in grid for value in row]
            known = [b[measure] - a[measure] for a, b in zip(one["heads"], other["heads"], strict=True)]
            assert grids == pytest.approx(known), measure
        assert call("explain", *runs, "--lines", tmp_path / "lines.txt", "--out", tmp_path / "p.html")[0] == 0
        assert (tmp_path / "p.html").read_text(encoding="utf-8").count("<rect") >= 3 * len(one["heads"])


def test_a_page_that_cannot_be_written_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = caller(monkeypatch, capsys)
    for out, said in (
        (tmp_path / "none" / "x.html", f"there is no folder {tmp_path}/none"),
        (tmp_path, "is a folder"),
        (tmp_path / "x.json", "the page is HTML; name a file that ends in .html, or --json > FILE\n"),
    ):
        code, _, err = call("explain", tmp_path, "--out", out)
        assert code == 2 and err.startswith(f"oelm: {out}") and said in err and ".part" not in err
    code, _, err = call("explain", tmp_path, "--out", tmp_path / "x.html", "--json")
    assert code == 2 and "keep one: --json > FILE writes that" in err and err.count("\n") == 1


@pytest.mark.slow
def test_the_command_measures_a_run(
    unbroken: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = caller(monkeypatch, capsys)
    _, run = unbroken()
    code, out, err = call("explain", run, "--texts", 3, "--json")
    assert code == 0, err
    (answer,) = json.loads(out).values()
    assert answer["texts"] == 3
    assert all(head["distance"] == 0 for head in answer["heads"]) and len(answer["heads"]) == 8
    assert call("explain", run)[0] == 0 and "<rect" in (run / "explain.html").read_text(encoding="utf-8")
    for words in ((run, run), (run, "--texts", 0), (run / "nowhere",), (run, "--split", "nothing")):
        code, _, err = call("explain", *words)
        assert code == 2 and len(err.splitlines()) == 1, err
