"""The benchmark: what it counts is what is there, what it times is what is trained, and gaps are said."""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)
from typer.testing import CliRunner

from oelm.bench import cases
from oelm.bench.arms import (
    CompactGPT,
    HuggingFaceTrainer,
    OriginalClassifier,
    Ours,
    gpt2_config,
)
from oelm.bench.load import Case, Load, made_lengths, made_stream, made_texts, sample_texts
from oelm.bench.measure import Arm, GpuClock, StepArm, Window, measure, omitted_product
from oelm.bench.run import ratio
from oelm.cli.main import app
from oelm.data import Store, open_store
from oelm.errors import UserError
from oelm.models.gpt import OelmGPTForCausalLM, OelmGPTForSequenceClassification
from oelm.models.gpt_config import gpt_config
from tests.training.runs import make_store

CPU = torch.device("cpu")
RECORDS = Path(__file__).parents[1] / "benchmarks"
TINY = [
    "--size", "gpt-tiny", "--steps", "5", "--rounds", "2", "--batch-size", "4", "--max-length", "16",
    "--tokens-per-step", "128", "--vocab-size", "300",
]  # fmt: skip
SIZES: Any = {"vocab_size": 128, "max_position_embeddings": 16, "num_labels": 2}
SMALL = gpt_config("gpt-tiny", **SIZES)


def case_of(store: Store, batch_size: int, length: int, size: str = "gpt-tiny") -> Case:
    return Case("any", "any", store, size, batch_size, length, CPU)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """One run of everything at tiny size: the record, what was printed, the folder."""
    folder = tmp_path_factory.mktemp("bench")
    result = bench(*TINY, "--json", str(folder / "b.json"), "--chart", str(folder / "b.svg"))
    assert result.exit_code == 0, result.output
    return json.loads((folder / "b.json").read_text()), result.stdout, folder


def test_every_work_is_in_the_record_with_all_that_is_promised(
    done: tuple[dict[str, Any], str, Path],
) -> None:
    record, _, _ = done
    assert {case["work"] for case in record["cases"]} == set(cases.WORKS)
    assert record["environment"]["packages"]["torch"]
    assert {"commit", "cpu", "device"} <= set(record["environment"])
    for case in record["cases"]:
        wanted = {
            "classification": {"ours", "hf-trainer", "original"},
            "lm": {"ours", "hf-lm", "nanogpt"},
            "freezing": {"baseline", "oelm", "oelm-value-only"},
        }.get(case["work"])
        names = {arm["name"] for arm in case["arms"]}
        assert wanted is None or names == wanted
        assert case["model"] == {"name": "gpt-tiny", "architecture": "gpt", "layers": 2, "d_model": 128}
        assert case["matmul"]["operations_per_s"] > 0
        for arm in case["arms"]:
            assert arm["failed"] is None, arm
            assert len(arm["windows"]) == 2
            assert min(arm[key] for key in ("texts_per_s", "tokens_per_s", "step_s", "share_of_peak")) > 0
            assert arm["gradients_bytes"] > 0 and arm["optimizer_bytes"] == 2 * arm["gradients_bytes"]
            assert arm["peak_memory_bytes"] is None  # not separable on a CPU


def test_large_models_are_measured_at_doubled_lengths_with_and_without_checkpointing(tmp_path: Path) -> None:
    made = tmp_path / "b.json"
    result = bench(*TINY, "--work", "large", "--max-length", "64", "--rounds", "1", "--json", str(made))
    assert result.exit_code == 0, result.output
    found = json.loads(made.read_text())["cases"]
    names = [f"language model, T={length}{how}" for length in (64, 128) for how in ("", ", checkpointed")]
    assert [case["name"] for case in found] == names  # a window of 256 does not fit 128 tokens
    assert [case["checkpointing"] for case in found] == [False, True] * 2
    assert [case["batch_size"] for case in found] == [2, 2, 1, 1]
    for case in found:
        assert [(arm["name"], arm["failed"]) for arm in case["arms"]] == [("baseline", None), ("oelm", None)]
        saved = 2 * 2 * 128 * 128 * 3 * 4  # two layers' Q and K: gradients and two moments
        assert case["savings"][0]["held_bytes_saved"] == saved
        assert case["arms"][0]["operations_per_s"] > 0


@pytest.mark.slow
def test_freezing_is_measured_in_both_kinds_of_work_and_in_other_models(
    done: tuple[dict[str, Any], str, Path], tmp_path: Path
) -> None:
    kinds = {case["name"]: case["kind"] for case in done[0]["cases"] if case["work"] == "freezing"}
    expected = {"classifier, T=16": "classification", "classifier, T=64": "classification"}
    assert kinds == expected | {"language model, T=16": "lm"}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=300, **shape)).save_pretrained(tmp_path / "bert")
    made = tmp_path / "b.json"
    result = bench(
        *TINY, "--size", str(tmp_path / "bert"), "--work", "freezing", "--json", str(made)
    )  # the last --size counts
    assert result.exit_code == 0, result.output
    for case in json.loads(made.read_text())["cases"]:
        assert case["model"] == {"name": "bert", "architecture": "bert", "layers": 2, "d_model": 32}
        assert [arm["name"] for arm in case["arms"]] == ["baseline", "oelm"]
        assert [arm["failed"] for arm in case["arms"]] == [None, None]
        assert "language" not in case["name"]


def test_medians_and_ratios_follow_from_the_windows(done: tuple[dict[str, Any], str, Path]) -> None:
    record, printed, _ = done
    for case in record["cases"]:
        arms = {arm["name"]: arm for arm in case["arms"]}
        for arm in arms.values():
            rates = [window["tokens"] / window["seconds"] for window in arm["windows"]]
            assert arm["tokens_per_s"] == pytest.approx(statistics.median(rates))
            done_per_s = statistics.median(w["operations"] / w["seconds"] for w in arm["windows"])
            assert arm["share_of_peak"] == pytest.approx(done_per_s / case["matmul"]["operations_per_s"])
        assert len(case["ratios"]) == len(arms) - 1
        for found in case["ratios"]:
            of, to = (arms[found[key]][found["quantity"]] for key in ("of", "to"))
            assert found["ratio"] == pytest.approx(of / to)
            assert found["low"] <= found["ratio"] * (1 + 1e-12) and found["ratio"] <= found["high"] * (
                1 + 1e-12
            )
            assert f"{found['ratio']:.3f}" in printed
        for found in case.get("savings", []):
            saved = arms["baseline"]["step_s"] - arms[found["method"]]["step_s"]
            assert found["saved_s"] == pytest.approx(saved)
            assert statistics.median(found["saved_s_rounds"]) == pytest.approx(saved)
            assert found["saved_of_omitted"] == pytest.approx(saved / found["omitted_product_s"])


def test_a_step_of_every_arm_is_the_same_texts(done: tuple[dict[str, Any], str, Path]) -> None:
    record, _, _ = done
    for case in record["cases"]:
        per_step = {
            arm["name"]: {(w["texts"] / w["steps"], w["tokens"]) for w in arm["windows"]}
            for arm in case["arms"]
            if arm["name"] != "original"  # padded to the same length whatever they are: timed on some of them
        }
        assert len(set(map(frozenset, per_step.values()))) == 1, per_step


def test_a_record_is_shown_again_and_drawn(done: tuple[dict[str, Any], str, Path], tmp_path: Path) -> None:
    _, printed, folder = done
    again = bench("--read", str(folder / "b.json"), "--chart", str(tmp_path / "again.svg"))
    assert again.exit_code == 0
    assert again.stdout == printed
    drawn = (folder / "b.svg").read_text()
    assert (tmp_path / "again.svg").read_text() == drawn
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert "ours / hf-trainer" in drawn and "oelm / baseline" in drawn


def test_prepared_data_is_what_is_trained_on(tmp_path: Path) -> None:
    folder = make_store(tmp_path)
    out = tmp_path / "b.json"
    result = bench(
        *TINY,
        "--work",
        "classification",
        "--data",
        str(folder),
        "--leave-out",
        "original",
        "--json",
        str(out),
    )
    assert result.exit_code == 0, result.output
    (case,) = json.loads(out.read_text())["cases"]
    store = open_store(folder)
    assert case["name"] == store.task and case["data"] == store.fingerprint
    assert [arm["name"] for arm in case["arms"]] == ["ours", "hf-trainer"]
    taken = sample_texts(store, 20)
    window = case["arms"][0]["windows"][0]
    assert (window["texts"], window["tokens"]) == (20, int(taken["train"].lengths.sum()))
    # The texts are the store's own, whole, with their labels.
    whole = store["train"]
    for i, row in enumerate(taken["train"].ids):
        k = int(np.flatnonzero(whole.ids == row)[0])
        mine = taken["train"].tokens[taken["train"].offsets[i] : taken["train"].offsets[i + 1]]
        assert mine.tolist() == whole.tokens[whole.offsets[k] : whole.offsets[k + 1]].tolist()
        assert taken["train"].labels[i] == whole.labels[k]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--work", "sleep"], "no such work"),
        (["--leave-out", "nanoGPT"], "no such arm"),
        (["--tokens-per-step", "8"], "is less than one text of --max-length 16"),
        (["--size", "nowhere"], "other models take --work freezing"),
        (
            ["--size", "nowhere", "--work", "freezing"],
            "neither a size of the reference GPT nor a model's folder",
        ),
        (["--chart", "x.png"], "SVG"),
        (["--json", "nowhere/b.json"], "no folder nowhere"),
        (["--data", "nowhere"], "nowhere is not a prepared dataset"),
        (["--read", __file__], "cannot be read"),
    ],
)
def test_a_users_mistake_is_said_in_one_line(arguments: list[str], message: str) -> None:
    result = bench(*TINY, *arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception) and "\n" not in str(result.exception)


# ---- what is counted


def operations_of(model: Any, **inputs: Any) -> int:
    """Every product of a step, as PyTorch counts them; SDPA in its plain form, which is products too."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**inputs).loss.backward()
    return counter.get_total_flops()


def test_the_classifiers_operations_are_those_torch_counts() -> None:
    texts, length = 3, 8
    ids = torch.randint(1, 128, (texts, length))
    # The mean of all positions: of the last one alone, the last block computes less than is counted.
    model = OelmGPTForSequenceClassification(gpt_config("gpt-tiny", **SIZES, pooling="mean")).train()
    counted = operations_of(model, input_ids=ids, labels=torch.zeros(texts, dtype=torch.long))
    load = Load.of([length] * texts)
    assert load.operations(SMALL, "classification", causal=False) == counted


def test_the_language_models_operations_are_those_torch_counts_with_attention_halved() -> None:
    texts, length = 3, 8
    ids = torch.randint(1, 128, (texts, length))
    model = OelmGPTForCausalLM(SMALL).train()
    counted = operations_of(model, input_ids=ids, shift_labels=ids, skip_logits=False)
    attention = 12 * SMALL.num_layers * SMALL.d_model * texts * length**2
    load = Load.of([length] * texts)
    assert load.operations(SMALL, "lm", causal=True) == counted - attention / 2


def test_operations_by_hand() -> None:
    """Two texts of 3 and 5 tokens, gpt-tiny: 2 layers of width 128, 12 x 128^2 weights each."""
    blocks = 2 * 12 * 128 * 128
    head = 2 * 128 * 2  # two labels, once per text
    attention = 12 * 2 * 128 * (3 * 3 + 5 * 5)
    assert Load.of([3, 5]).operations(SMALL, "classification", causal=False) == (
        6 * (blocks * 8 + head) + attention
    )


def test_the_omitted_product_is_the_weight_gradient_of_two_projections() -> None:
    """Against torch's count of a backward pass with and without Q/K's weights."""
    ids = torch.randint(1, 128, (2, 8))
    counts = {}
    for method in ("baseline", "oelm"):
        arm = Ours(case_of(made_texts("t", [8, 8], 128, 16), 2, 16), method)
        counts[method] = operations_of(arm.model, input_ids=ids, labels=torch.tensor([0, 1]))
    product = omitted_product(CPU, layers=2, d_model=128, tokens=16)
    pooled = 2 * 2 * 128 * 128  # the last block's queries, of two texts
    assert counts["baseline"] - counts["oelm"] == product.operations / product.steps + pooled


def test_gradients_and_optimizer_state_of_medium_512_differ_by_exactly_the_frozen_projections() -> None:
    """6 layers x 2 projections x 512^2 weights, with a gradient and two moments of 4 bytes each."""
    held = {}
    for method in ("baseline", "oelm"):
        arm = Ours(case_of(made_texts("t", [4, 4], 50257, 512), 2, 512, "gpt-medium-512"), method)
        arm.warm_up()
        assert arm.held is not None
        held[method] = arm.held
        assert arm.held[1] == 2 * arm.held[0]
    saved = [ours - less for ours, less in zip(held["baseline"], held["oelm"], strict=True)]
    assert saved == [12_582_912, 25_165_824]
    assert sum(saved) == 37_748_736 == 3_145_728 * 12


# ---- the peers are what they are said to be


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def test_peers_have_our_parameters_but_for_the_biases_of_their_attention() -> None:
    """GPT-2's attention has four biases of width d a layer, ours none; its classifier has no bias, ours has.
    nanoGPT's vocabulary is padded. The original recipe's model has exactly ours."""
    config = gpt_config("gpt-tiny", vocab_size=300, num_labels=3)
    biases = config.num_layers * 4 * config.d_model
    classifier = parameters(OelmGPTForSequenceClassification(config))
    assert parameters(OriginalClassifier(config)) == classifier
    assert (
        parameters(GPT2ForSequenceClassification(gpt2_config(config, num_labels=3)))
        == classifier + biases - 3
    )
    language = parameters(OelmGPTForCausalLM(config))
    assert parameters(GPT2LMHeadModel(gpt2_config(config))) == language + biases
    assert parameters(CompactGPT(config)) == language + (320 - 300) * config.d_model


def test_the_original_recipe_computes_the_reference_architecture() -> None:
    torch.manual_seed(0)
    ours, plain = OelmGPTForSequenceClassification(SMALL).eval(), OriginalClassifier(SMALL).eval()
    copy_weights(ours.transformer, plain)
    plain.classifier.load_state_dict(ours.classifier.state_dict())
    ids, mask = torch.randint(1, 128, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad():
        torch.testing.assert_close(plain(ids, mask), ours(ids, mask).logits, rtol=0, atol=1e-5)


def test_the_nanogpt_style_model_computes_the_reference_architecture() -> None:
    torch.manual_seed(0)
    ours, compact = OelmGPTForCausalLM(SMALL).eval(), CompactGPT(SMALL).eval()
    copy_weights(ours.transformer, compact)
    ids = torch.randint(1, 128, (2, 10))
    with torch.no_grad():
        targets = ids[:, 1:].contiguous()
        expected = ours(ids[:, :-1], shift_labels=targets).loss
        torch.testing.assert_close(compact(ids[:, :-1], targets), expected)


def copy_weights(ours: Any, plain: Any) -> None:
    plain.tokens.load_state_dict(ours.wte.state_dict())
    plain.positions.load_state_dict(ours.wpe.state_dict())
    plain.norm.load_state_dict(ours.ln_f.state_dict())
    for theirs, mine in zip(plain.blocks, ours.h, strict=True):
        parts = (mine.attn.q_proj, mine.attn.k_proj, mine.attn.v_proj)
        theirs.qkv.weight.data = torch.cat([part.weight.data for part in parts])
        pairs = [(theirs.out, mine.attn.o_proj), (theirs.norm_1, mine.ln_1), (theirs.norm_2, mine.ln_2)]
        for module, source in [*pairs, (theirs.wide, mine.mlp.fc_in), (theirs.narrow, mine.mlp.fc_out)]:
            module.load_state_dict(source.state_dict())


class Noted(list[Any]):
    """A list that notes what is read of it."""

    def __init__(self, entries: Any) -> None:
        super().__init__(entries)
        self.calls: list[Any] = []

    def __getitem__(self, i: Any) -> Any:
        self.calls.append(i)
        return super().__getitem__(i)


def test_a_window_of_the_trainer_is_every_text_once_in_batches_of_similar_length() -> None:
    store = made_texts("t", made_lengths("reviews", 64, 64), 300, 64)
    arm = HuggingFaceTrainer(case_of(store, 4, 64), compiled=False)
    arm.warm_up()
    texts = arm.trainer.train_dataset = Noted(arm.trainer.train_dataset)
    window = arm.window()
    assert (window.steps, window.texts) == (16, 64)
    assert window.tokens == int(store["train"].lengths.sum())
    seen = texts.calls[-64:]
    assert sorted(seen) == list(range(64))
    lengths = store["train"].lengths[seen].reshape(16, 4)
    shuffled = np.random.default_rng(0).permutation(lengths.ravel()).reshape(16, 4)
    assert np.ptp(lengths, axis=1).mean() < 0.7 * np.ptp(shuffled, axis=1).mean()


def test_our_arm_takes_training_steps() -> None:
    arm = Ours(case_of(made_stream(64, 300, 16), 2, 16), "oelm")
    before = {name: value.clone() for name, value in arm.model.state_dict().items()}
    arm.window()
    moved = {name for name, value in arm.model.state_dict().items() if not torch.equal(value, before[name])}
    frozen = {name for name in before if "q_proj" in name or "k_proj" in name}
    assert arm.taken == 2 and moved == set(before) - frozen


# ---- the harness


class Scripted(Arm):
    """An arm whose windows take as long as it says, or fail."""

    about = "scripted"

    def __init__(self, name: str, log: list[str], seconds: list[float], fails_at: int | None = None) -> None:
        self.name, self.log, self.seconds, self.fails_at = name, log, iter(seconds), fails_at
        self.count = itertools.count()

    def warm_up(self) -> None:
        self.log.append(f"{self.name} settles")

    def window(self) -> Window:
        self.log.append(self.name)
        if next(self.count) == self.fails_at:
            raise RuntimeError("no memory\nleft")
        return Window(next(self.seconds), 1, 1, 1, 1.0)


def test_only_ours_keeps_off_cudnns_attention() -> None:
    """A switch of the whole process: each arm must find it as it is for those who use it."""
    seen: dict[str, set[bool]] = {"a": set(), "b": set()}

    class Looking(Scripted):
        def window(self) -> Window:
            seen[self.name].add(torch.backends.cuda.cudnn_sdp_enabled())
            return super().window()

    class OursLooking(Looking):
        cudnn_attention = Ours.cudnn_attention

    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        makers = {"a": lambda: Looking("a", [], [1.0] * 9), "b": lambda: OursLooking("b", [], [1.0] * 9)}
        measure(makers, 3, CPU, lambda: True, lambda text: None)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert seen == {"a": {True}, "b": {False}}


def run_scripted(rounds: int, log: list[str], time_left: Callable[[], bool] = lambda: True) -> Any:
    def broken() -> Arm:
        raise ImportError("no compiler")

    makers = {
        "a": lambda: Scripted("a", log, [1.0] * 9),
        "broken": broken,
        "b": lambda: Scripted("b", log, [2.0] * 9),
        "late": lambda: Scripted("late", log, [3.0] * 9, fails_at=2),
    }
    return measure(makers, rounds, CPU, time_left, lambda text: None)


def test_arms_take_turns_in_alternating_order_after_their_warm_up() -> None:
    log: list[str] = []
    run_scripted(3, log)
    warm = [f"{name} {word}".strip() for name in ("a", "b", "late") for word in ("settles", "")]
    assert log[:6] == warm
    assert log[6:] == ["a", "b", "late", "late", "b", "a", "a", "b"]


def test_a_failing_arm_says_why_and_the_others_go_on() -> None:
    found = run_scripted(3, [])
    assert found["broken"].failed == "ImportError: no compiler" and not found["broken"].windows
    assert found["late"].failed == "RuntimeError: no memory" and len(found["late"].windows) == 1
    for name in ("a", "b"):
        assert found[name].failed is None and len(found[name].windows) == 3
    # The rounds that both have are compared.
    assert ratio(found["late"].windows, found["a"].windows, "step_s")["ratio"] == 3.0


def test_nothing_is_begun_once_the_time_is_up() -> None:
    log: list[str] = []
    answers = iter([True, True, True, False, False])
    found = run_scripted(3, log, lambda: next(answers))
    assert "late settles" not in log
    assert found["late"].failed == "not run: the time was up"
    assert len(found["a"].windows) == 1  # the first round is always made


def test_no_number_of_a_record_is_cut() -> None:
    path = RECORDS / "h200-freezing.json"
    shown, cases = bench("--read", str(path)).output, json.loads(path.read_text())["cases"]
    savings = [saving for case in cases for saving in case["savings"]]
    assert len(cases) == 2 and len(savings) == 4
    for saving in savings:
        for key in ("held_bytes_saved", "peak_memory_bytes_saved"):
            assert f"{saving[key]:,}" in shown
    for arm in (arm for case in cases for arm in case["arms"]):
        rate = statistics.median(window["tokens"] / window["seconds"] for window in arm["windows"])
        assert f"{rate:,.0f}" in shown
    assert "…" not in shown


def test_rounds_that_disagree_are_said_to() -> None:
    shown = bench("--read", str(RECORDS / "h200-freezing.json")).output
    assert "T=512, oelm: single rounds disagree" in shown and "T=2048, oelm: single" not in shown
    assert "disagree" not in bench("--read", str(RECORDS / "h200-freezing-long.json")).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--work", ""], "no such work"),
        (["--read", str(RECORDS / "h200.json"), "--json", "b.json"], "keep one of them"),
        (["--json", str(RECORDS)], "is a folder; name a file"),
        ([*TINY, "--work", "lm", "--leave-out", "ours,hf-lm,hf-lm-compiled,nanogpt"], "nothing to measure"),
        (["--data", str(RECORDS / "h200.json")], "is not a prepared dataset"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert isinstance(result.exception, UserError) and message in str(result.exception)


def test_a_gpus_clock_and_power_are_read_from_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is NVIDIA's; here one stands in for it that prints what it prints."""
    program = tmp_path / "nvidia-smi"
    lines = "1980, 300.00\n[N/A], 1.0\n1700, 690.50\n1710, 700.00\n"
    program.write_text(f"#!/bin/sh\ntest $1 = --id=GPU-7 && printf '{lines}' && exec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("oelm.bench.measure.gpu_name", lambda device: "GPU-7")
    began = time.perf_counter()
    with GpuClock(torch.device("cuda")) as seen:
        while len(seen.samples) < 3 and time.perf_counter() < began + 20:
            time.sleep(0.01)
        assert seen.since(began) == (1710.0, 690.5)
        assert seen.since(time.perf_counter()) == (None, None)
    assert seen.process is not None and seen.process.returncode is not None
    with GpuClock(CPU) as unseen:
        assert unseen.process is None and unseen.since(0.0) == (None, None)


def test_some_steps_are_taken_before_a_window_and_not_timed() -> None:
    taken: list[int] = []

    class Counting(StepArm):
        about = "counts"

        def step(self, k: int) -> None:
            taken.append(k)
            time.sleep(0.5 if len(taken) <= 2 else 0.01)

    window = Counting(CPU, 6, Load(6, 60, 600), 1.0).window()
    assert taken == [0, 1, 0, 1, 2, 3, 4, 5] and window.steps == 6
    assert 0.06 <= window.seconds < 1.0


@pytest.mark.parametrize("flag", ["--rounds", "--steps", "--batch-size", "--max-length", "--vocab-size"])
def test_sizes_are_at_least_one(flag: str) -> None:
    result = bench(flag, "0")
    assert result.exit_code == 2 and flag in result.output


def test_made_lengths_are_those_of_reviews_and_of_sentence_pairs() -> None:
    """Sixteen reviews had 4,734 tokens and sixteen pairs 608, cut at 512."""
    for kind, mean in (("reviews", 4734 / 16), ("pairs", 608 / 16)):
        lengths = made_lengths(kind, 20000, 512)
        assert lengths.max() <= 512
        assert lengths.mean() == pytest.approx(mean, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(RECORDS.glob("*.py")), ids=lambda path: path.name)
def test_scripts_beside_the_records_start(script: Path) -> None:
    """Their folder comes first where Python looks for modules: a name of theirs may hide another's."""
    if script.name == "our_kernels.py":
        pytest.importorskip("triton")
    child = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert child.returncode == 0 and "usage" in child.stdout, child.stderr
