"""The figures in the docs and in results/README.md are those of the records."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from oelm.study.analysis import analyse
from oelm.study.report.summary import summary

ROOT = Path(__file__).parents[1]


def record(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))


def case(name: str, number: int = 0) -> Any:
    """A case of a record of `oelm bench`: its arms by their names, its ratios by what is compared."""
    found = record(name)["cases"][number]
    arms = {arm["name"]: arm for arm in found["arms"]}
    return found | {"arms": arms, "ratios": {(r["of"], r["to"]): r for r in found["ratios"]}}


def ratio(found: Any, digits: int, of: str, to: str) -> str:
    values = found["ratios"][of, to]
    middle, low, high = (f"{values[key]:.{digits}f}" for key in ("ratio", "low", "high"))
    return f"{middle} ({low} to {high})"


def ms(arm: Any) -> str:
    return f"{1e3 * arm['step_s']:.2f} ms"


def texts(arm: Any) -> str:
    return f"{arm['texts_per_s']:,.0f}"


def classification() -> list[str]:
    lines = []
    for number, name in enumerate(("xnli pairs", "imdb")):
        found = case("h200.json", number)
        arms = found["arms"]
        lines += [
            f"| classifier, {name}, batch 16 | {texts(arms['ours'])} texts/s |"
            f" original recipe {texts(arms['original'])} | {ratio(found, 1, 'ours', 'original')} |",
            f"| Hugging Face Trainer {texts(arms['hf-trainer'])} | {ratio(found, 1, 'ours', 'hf-trainer')} |",
            f"| the same, compiled, {texts(arms['hf-trainer-compiled'])} |"
            f" {ratio(found, 1, 'ours', 'hf-trainer-compiled')} |",
        ]
    pairs = case("h200.json")["matmul"]["operations_per_s"] / 1e12
    language = case("h200-lm.json")["matmul"]["operations_per_s"] / 1e12
    return [*lines, f"{language:.0f} TFLOP/s beside the language models", f"{pairs:.0f} beside the pairs"]


def language_model() -> list[str]:
    found = case("h200-lm.json")
    ours, gpt2, nano = (found["arms"][name] for name in ("ours", "hf-lm-compiled", "nanogpt"))
    return [
        f"| {ours['tokens_per_s']:,.0f} tokens/s, {100 * ours['share_of_peak']:.0f} % of the matmul rate |"
        f" Hugging Face GPT-2, compiled, {gpt2['tokens_per_s']:,.0f} |"
        f" {ratio(found, 2, 'ours', 'hf-lm-compiled')} |",
        f"| nanoGPT's style, compiled, {nano['tokens_per_s']:,.0f} | {ratio(found, 2, 'ours', 'nanogpt')} |",
        f"runs at {100 * nano['share_of_peak']:.0f} % of the matmul rate itself; 1.4 times that is"
        f" {140 * nano['share_of_peak']:.0f} %",
        f"ours at {ours['clock_mhz']:,.0f} MHz, nanoGPT's at {nano['clock_mhz']:,.0f}",
    ]


def freezing() -> list[str]:
    def row(work: str, found: Any, method: str = "oelm") -> str:
        ours, theirs = (ms(found["arms"][name]) for name in (method, "baseline"))
        return f"| {work} | {ours} | {theirs} | {ratio(found, 3, method, 'baseline')} |"

    long, rested = case("h200-freezing-long.json"), case("h200-freezing-rested.json")
    short, lengthy = case("h200-freezing.json"), case("h200-freezing.json", 1)
    fine, fine_lengthy = case("h200-freezing-fine.json"), case("h200-freezing-fine.json", 1)
    step = "step of `oelm` / `baseline`, classifier, 65,536 tokens, T = 512, at the power limit"
    (saving,), (rest,) = long["savings"], rested["savings"]
    first, last = ([1e3 * s for s in saving["saved_s_rounds"][part]] for part in (slice(3), slice(-3, None)))
    rounds = [1e3 * value for value in short["savings"][0]["saved_s_rounds"]]
    return [
        row(step, long),
        row("the same after a rest", rested),
        row("T = 2048, at the power limit, short windows", lengthy),
        row("step of `oelm-value-only` / `baseline`, T = 512", short, "oelm-value-only"),
        row("the same, T = 2048", lengthy, "oelm-value-only"),
        f"smaller by exactly {saving['held_bytes_saved']:,} bytes; the peak by"
        f" {saving['peak_memory_bytes_saved']:,} at T = 512 and"
        f" {lengthy['savings'][0]['peak_memory_bytes_saved']:,} at T = 2048",
        f"{saving['peak_requested_bytes_saved']:,} and"
        f" {lengthy['savings'][0]['peak_requested_bytes_saved']:,}",
        f"{1e3 * saving['saved_s']:.2f} ms of {1e3 * long['arms']['baseline']['step_s']:.2f} at T = 512",
        f"({statistics.fmean(first):.2f} in the first three rounds,"
        f" {statistics.fmean(last):.2f} in the last three)",
        f"{100 * saving['saved_of_omitted']:.0f} % of what the omitted product takes alone"
        f" ({1e3 * saving['omitted_product_s']:.2f} ms",
        f"saved {1e3 * rest['saved_s']:.2f} ms of {1e3 * rested['arms']['baseline']['step_s']:.2f}"
        f" (the product: {1e3 * rest['omitted_product_s']:.2f})",
        f"between {-min(rounds):.1f} ms lost and {max(rounds):.1f} won"
        f" ({short['ratios']['oelm', 'baseline']['ratio']:.3f} in the median,"
        f" {100 * short['savings'][0]['saved_of_omitted']:.0f} % of the product)",
        f"ones of 0.1 s say {fine['ratios']['oelm', 'baseline']['ratio']:.3f}",
        f"they say {lengthy['ratios']['oelm', 'baseline']['ratio']:.3f} and"
        f" {fine_lengthy['ratios']['oelm', 'baseline']['ratio']:.3f}",
    ]


ABLATION = {
    "packed texts": "packed texts",
    "bf16 copies": "bf16 copies",
    "AdamW as one kernel": "AdamW kernel",
    "row windows": "row windows",
    "rows in use, and row windows": "rows in use (with row windows)",
    "attention kernel": "attention kernel",
    "norm kernel": "norm kernel",
    "kernel for the embedding's gradient": "kernel for the embedding's gradient",
    "last block of pooled tokens only": "last block of pooled tokens only",
    "cross-entropy kernel": "cross-entropy kernel",
}


def ablation() -> list[str]:
    cases = [
        record("h200-ablation.json")["cases"][name]
        for name in ("xnli", "imdb", "language model", "BERT-base shape")
    ]

    def row(shown: str, path: str, digits: int = 2) -> str:
        cells = [found["paths"].get(path) for found in cases]
        return f"| {shown} |" + "".join(f" {cell['ratio']:.{digits}f} |" if cell else " |" for cell in cells)

    graphs = [
        found["paths"]["CUDA graphs (with bf16 copies and the AdamW kernel)"]["ratio"] for found in cases
    ]
    last = " | ".join(f"{value:.1f}" if value > 2 else f"{value:.2f}" for value in graphs)
    rows = [row(shown, path) for shown, path in ABLATION.items()]
    return [*rows, f"| CUDA graphs, and with them bf16 copies and the AdamW kernel | {last} |"]


def pretrained() -> list[str]:
    lines = []
    for name, shape in (("h200-bert.json", "BERT-base shape"), ("h200-minilm.json", "MiniLM shape")):
        found = case(name)
        arms = found["arms"]
        ours, oelm, trainer, compiled = (
            arms[arm] for arm in ("ours", "oelm", "hf-trainer", "hf-trainer-compiled")
        )
        frozen = (
            "step of `oelm` / `baseline`, BERT-base shape" if "bert" in name else "the same, MiniLM shape"
        )
        lines += [
            f"| {shape} | {texts(ours)} texts/s, {ms(ours)} a step | Hugging Face Trainer {texts(trainer)} |"
            f" {ratio(found, 1, 'ours', 'hf-trainer')} |",
            f"| the same, compiled, {texts(compiled)} | {ratio(found, 1, 'ours', 'hf-trainer-compiled')} |",
            f"| {frozen} | {ms(oelm)} | {ms(ours)} | {ratio(found, 3, 'ours', 'oelm')} |",
        ]
    (arm,) = (found := case("h200-xl.json"))["arms"].values()
    return [
        *lines,
        f"{arm['tokens_per_s']:,.0f} tokens/s, {100 * arm['share_of_peak']:.0f} % of the matmul rate measured"
        f" beside it ({found['matmul']['operations_per_s'] / 1e12:.0f} TFLOP/s),"
        f" {arm['peak_memory_bytes'] / 1e9:.1f} GB at its peak",
    ]


def two_cores() -> list[str]:
    found = case("cpu.json")
    ours, trainer, compiled = (found["arms"][arm] for arm in ("ours", "hf-trainer", "hf-trainer-compiled"))
    values = found["ratios"]["ours", "hf-trainer"]
    return [
        f"medians of {len(ours['windows'])} rounds: ours {texts(ours)} texts/s, Hugging Face's Trainer"
        f" {texts(trainer)}, a ratio of {values['ratio']:.2f} (single rounds"
        f" {values['low']:.2f} to {values['high']:.2f})",
        f"Compiled, the Trainer makes {texts(compiled)}: a ratio of"
        f" {ratio(found, 2, 'ours', 'hf-trainer-compiled')}",
    ]


def kernels() -> list[str]:
    cases = record("kernels.json")["cases"]

    def shares(other: str, *names: str) -> list[str]:
        return [f"{cases[name][other]['ours_of_it']:.2f}" for name in names]

    batches = ("classifier, 128 texts of 512", "classifier, 32 texts of 2048")
    windows = tuple(f"language model, {n} windows of {t}" for n, t in ((128, 512), (32, 2048), (16, 4096)))
    short, long = shares("varlen_attn", *batches)
    few = {*shares("varlen_attn", "classifier, 16 reviews", "classifier, 16 pairs of sentences")}
    flash, cudnn = shares("SDPA, flash", *windows), shares("SDPA, cuDNN", *batches, *windows)
    entropy = shares("torch.compile", "cross-entropy and its gradient, 16384 rows of 50257 words")
    norms = shares("torch.compile", *(f"a sum and its norm, {rows} x 512" for rows in (640, 4352, 65536)))
    adamw = shares("PyTorch's, fused", "clipping, AdamW and half-precision copies, 18.9 million weights")
    return [
        f"attention {short} of PyTorch's for texts end to end at 128 texts of 512, {long} at 32 of 2,048,"
        f" {' or '.join(sorted(few))} at 16 reviews or 16 pairs",
        f"in causal windows of 512, 2,048 and 4,096 tokens {flash[0]}, {flash[1]} and {flash[2]} of its",
        f"{cudnn[0]} and {cudnn[1]} for the texts, {cudnn[2]}, {cudnn[3]} and {cudnn[4]} for the windows",
        f"Cross-entropy with its gradient takes {entropy[0]} of what torch.compile makes of it, a sum with"
        f" its norm {norms[0]} (640 tokens), {norms[1]} (4,352) and {norms[2]} (65,536)",
        f"Clipping, AdamW and the bf16 copies of 18.9 million weights take {adamw[0]} of what",
    ]


def same_numbers() -> list[str]:
    found = record("h200-oracle.json")["compared"]["arms"]
    fast, plain = (found[arm]["final_training_loss"]["less_trainer"] for arm in ("fast", "plain"))
    bits = record("h200-determinism.json")
    cases = [values["ratio"] for values in bits["cases"].values()]
    rows = {entry["tokens"]: entry for entry in bits["gradient_of_rows_us"]}
    curves = []
    for name in ("h200-minilm-curves.json", "h200-minilm-curves-0.json"):
        arm = record(name)["compared"]["arms"]["fast"]
        for measure in ("final_training_loss", "validation_loss"):
            less = arm[measure]["less_plain"]
            curves.append((f"{less['mean']:+.4f}", f"{less['low']:+.4f} to {less['high']:+.4f}"))
    (one, one_range), (two, two_range), (three, three_range), (four, four_range) = curves
    return [
        f"{one} (90 % interval {one_range}) and {two} ({two_range})",
        f"{three} ({three_range}) and {four} ({four_range})",
        f"{fast['mean']:.4f} (90 % interval {fast['low']:.4f} to {fast['high']:+.4f}) with the fast paths",
        f"by {plain['mean']:.4f} ({plain['low']:.4f} to {plain['high']:+.4f}) without,"
        f" of {found['trainer']['final_training_loss']['mean']:.2f}",
        f"takes {cases[0]:.3f} of its time without (16 pairs), {cases[1]:.3f} (16 reviews),"
        f" {cases[2]:.3f} (language model, 64 x 512;",
        f"{cases[3]:.3f} (BERT-base shape) and {cases[4]:.3f} (16 reviews, plain;",
        f"{rows[608]['ours']:.1f} us for 608 tokens where PyTorch's unordered `index_add_` takes"
        f" {rows[608]['index_add']:.1f}",
        f"{rows[4734]['ours']:.1f} for 4,734 ({rows[4734]['index_add']:.1f})",
        f"{rows[32768]['ours']:.0f} for 32,768 ({rows[32768]['index_add']:.0f})",
    ]


def time_to_result() -> list[str]:
    runs: dict[str, list[Any]] = {}
    for run in record("h200-time.json")["runs"]:
        runs.setdefault(run["arm"], []).append(run)
    ((cold,), warm, (trainer,)) = runs["cold"], runs["warm"], runs["trainer"]

    def middle(*names: str) -> str:
        return f"{statistics.median(sum(run['phases'][name] for name in names) for run in warm):.1f} s"

    names = ("imports, data, model", "steps", "evaluations", "best state and test")
    seconds = [run["seconds"] for run in warm]
    script = trainer["phases"]
    (study,) = record("h200-study.json")["studies"]
    assert len({run["test_accuracy"] for run in [cold, *warm]}) == 1
    return [
        f"| 1 | {cold['seconds']:.1f} s | " + " | ".join(f"{cold['phases'][name]:.1f} s" for name in names),
        f"| {len(warm)} | {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f}) | "
        + " | ".join(middle(name) for name in names),
        f"| Trainer's script | 1 | {trainer['seconds']:.1f} s |"
        f" {script['imports'] + script['data and model']:.1f} s |"
        f" {script['training with evaluations']:.1f} s with evaluations | | {script['test']:.1f} s |",
        f"The script takes {trainer['seconds'] / statistics.median(seconds):.1f} times as long",
        f"{study['runs']} runs of three epochs of imdb, eight side by side as the study chose:"
        f" {study['seconds']:.0f} s",
    ]


def claims() -> list[str]:
    found = record("run_claims.json")
    every, first, lists = found["claim_ms"], found["first_claim_ms"], found["list_ms"]
    return [
        f"planning 10,000 runs took {found['planning_s']:.1f} s, queueing all of them"
        f" {found['queueing_s']:.0f} s",
        f"a claim took {every['median']:.1f} ms (median of {every['n']:,}), {every['p95']:.1f} ms at the 95th"
        f" percentile and {every['largest']:.0f} ms at most; the first of each worker"
        f" {first['median']:.1f} ms (median of {first['n']}), {first['p95']:.1f} ms and"
        f" {first['largest']:.0f} ms",
        f"more than {found['claim_cpu_ms']['largest']:.1f} ms of processor time",
        f"with {lists['n']} such lists beside them, of {lists['median']:.0f} ms (median),"
        f" {found['list_cpu_ms']['median']:.1f} ms of them processor time",
    ]


def data() -> list[str]:
    middle = record("data.json")["medians"]
    ours, peers = middle["oelm"], [values for name, values in middle.items() if name != "oelm"]
    fastest, smallest, quickest = (
        pick(peer[key] for peer in peers)
        for pick, key in ((max, "batches_per_s"), (min, "peak_bytes"), (min, "tokenise_s"))
    )
    return [
        f"{round(ours['batches_per_s'], -2):,.0f} against {fastest:.0f} batches of 16 a second,"
        f" {ours['peak_bytes'] / 1e6:.0f} against {smallest / 1e6:.0f} MB above the imports, and"
        f" {ours['tokenise_s']:.1f} against {quickest:.1f} s for tokenising"
    ]


def minilm() -> list[str]:
    """The table as `oelm report` prints it, a method in two lines, in one row."""
    text = summary(analyse(ROOT / "results" / "minilm-sst2"))
    found = re.findall(
        r"^(\S+) +(\S+) +(?:reference arm|(\S+) no verdict)\n  lr (\S+), n = 5 +(.+)$", text, re.M
    )
    assert len(found) == 7
    rows = []
    for method, mean, difference, rate, intervals in found:
        inner, _, outer = (part.strip() for part in re.sub("  +", "  ", intervals).partition("  "))
        rate = {"0.00015": "1.5e-4"}.get(rate, rate)
        rows.append(
            f"| `{method}` | {rate} | {mean} ({inner}) | " + (f"{difference} ({outer})" * bool(outer))
        )
    return rows


def plain_path() -> list[str]:
    """Validation of the trials at high rates, by the plain path and by the fast one."""

    def scores(runs: str) -> str:
        found = sorted((ROOT / "results").glob(runs))
        values = [
            json.loads((run / "results.json").read_text())["best"]["metrics"]["accuracy"] for run in found
        ]
        assert len(values) == 3
        return ", ".join(f"{100 * value:.1f}" for value in values)

    fast = "fair-classification/runs/imdb/baseline/choice-lr{}-s100[123]-*"
    return [
        f"| {rate} | {scores(f'imdb-plain-path/imdb-{rate}-*')} | {scores(fast.format(float(rate)))} |"
        for rate in ("1e-3", "3e-3")
    ]


def one_rate() -> list[str]:
    text = summary(analyse(ROOT / "results" / "imdb-one-rate")).replace("−", "-")
    baseline, oelm = (re.search(rf"^{method} +([\d.]+)", text, re.M)[1] for method in ("baseline", "oelm"))  # type: ignore[index]
    answer = r"difference (\S+) points,\s95 % interval (\S+) to (\S+), n = 5 seeds"
    difference, low, high = re.search(answer, " ".join(text.split())).groups()  # type: ignore[union-attr]
    linear = re.search(r"^TF-IDF \+ logistic regression +([\d.]+)", text, re.M)[1]  # type: ignore[index]
    return [
        f"`baseline` {baseline}, `oelm` {oelm}, difference {difference} (95 % interval over seeds and"
        f" test items {low} to {high}, n = 5 pairs of seeds), equivalent within 1 point",
        f"majority class 50.0, TF-IDF + logistic regression {linear}",
    ]


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        ("docs/speed.md", classification),
        ("docs/speed.md", language_model),
        ("docs/speed.md", freezing),
        ("docs/speed.md", ablation),
        ("docs/speed.md", pretrained),
        ("docs/speed.md", two_cores),
        ("docs/speed.md", kernels),
        ("docs/speed.md", same_numbers),
        ("docs/speed.md", time_to_result),
        ("docs/clusters.md", claims),
        ("docs/data.md", data),
        ("docs/pretrained.md", minilm),
        ("results/README.md", plain_path),
        ("results/README.md", one_rate),
    ],
)
def test_the_page_says_what_the_records_say(page: str, lines: Any) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    missing = [line for line in lines() if " ".join(line.split()) not in text]
    assert not missing, "\n".join(missing)
