"""What a step costs, in time and memory, from parameters, tokens and bandwidth: checked, then extrapolated.

    python benchmarks/cost_model.py            # both tables: predicted against measured, and 8 to 1,024 GPUs
    python benchmarks/cost_model.py --write    # into docs/clusters.md

One GPU. time = operations / (efficiency x rate) + layers x latency + optimizer's bytes / memory bandwidth.
`rate` is that of a large matrix product, measured beside each record; what `operations` are says
`oelm.bench.load.Load.operations`. memory = bytes per parameter x parameters + bytes per activation x tokens x
layers x width + a language model's logits. Efficiency, latency and bytes per activation are fitted on the
records that FITTED names; the others check them.

Several GPUs. DDP reduces the gradients of what trains; FSDP2 gathers all weights, those of blocks twice, and
reduces and scatters the gradients of what trains: tests/training/test_communication.py counts these bytes.
Processes exchange float32. In a ring a GPU sends (n - 1) / n of the bytes that are gathered or scattered, and
twice that for a reduction that all get. Latencies of the network are left out. No cluster was measured.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oelm import OelmGPTConfig
from oelm.bench.load import Load
from oelm.models.gpt_sizes import SIZES
from oelm.models.lm_loss import CHUNK_LOGITS
from oelm.system.files import write_text

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "clusters.md"

# Data sheets, bytes a second: an H200's memory, and in one direction NVLink (900 GB/s both ways together) and
# an InfiniBand card of 400 Gbit/s. Rings through all cards of a node share its GPUs' data among them.
MEMORY, NVLINK, CARD = 4.8e12, 450e9, 50e9
ADAMW = 28  # bytes of memory traffic per trained parameter: 4 numbers are read, 3 written
FLOAT = 4
# Bytes held per trained parameter: weight, gradient, two moments in float32; a copy and its gradient in bf16.
HELD = 4 * FLOAT + 2 * 2
VOCABULARY = 50257

# Record, case, arm. What is fitted, on which: all other records are predicted.
FITTED = {
    "efficiency on a GPU, with latency": [("h200-lm", "wikitext-2", "ours"), ("h200", "xnli", "ours")],
    "latency of a layer of BERT": [("h200-bert", "sst2", "ours")],
    "bytes per activation": [("h200-freezing", "classifier, T=512", "baseline")],
    "efficiency on a CPU": [("cpu", "sst2", "ours")],
}
# In the order of their parameters; layers and width are those of the model's size.
RECORDS = {
    "gpt-tiny with 4,096 tokens, classifier, 2 CPU cores": ("cpu-1m", "sst2", "ours", 2, 128),
    "gpt-tiny, classifier, 2 CPU cores": ("cpu", "sst2", "ours", 2, 128),
    "MiniLM's shape, classifier": ("h200-minilm", "sst2", "ours", 6, 384),
    "Medium-512, classifier of pairs": ("h200", "xnli", "ours", 6, 512),
    "Medium-512, classifier of reviews": ("h200", "imdb", "ours", 6, 512),
    "Medium-512, classifier, T = 512": ("h200-freezing", "classifier, T=512", "baseline", 6, 512),
    "Medium-512, classifier, T = 2,048": ("h200-freezing", "classifier, T=2048", "baseline", 6, 512),
    "Medium-512, language model": ("h200-lm", "wikitext-2", "ours", 6, 512),
    "BERT-base's shape, classifier": ("h200-bert", "sst2", "ours", 12, 768),
    "gpt2-xl, language model": ("h200-xl", "made-stream", "ours", 48, 1600),
}
BERTS = ("h200-bert", "h200-minilm")


@dataclass(frozen=True)
class Measured:
    """A step as a record has it, and what a prediction needs."""

    parameters: int  # that are held; of an embedding, the rows in use
    tokens: float
    operations: float
    rate: float  # of a large matrix product there
    moments: int  # bytes of the optimizer's state
    layers: int
    width: int
    step_s: float
    memory: int | None
    cpu: bool = False
    bert: bool = False
    predicts_tokens: bool = False

    @property
    def compute(self) -> float:
        """Seconds at the matrix product's rate."""
        return self.operations / self.rate

    @property
    def update(self) -> float:
        return 0.0 if self.cpu else self.moments / 8 * ADAMW / MEMORY

    @property
    def logits(self) -> float:
        """Bytes of a language model's logits, in bf16: of a chunk of the rows, and of the one before."""
        return 2 * min(self.tokens * VOCABULARY, 2 * CHUNK_LOGITS["cuda"]) if self.predicts_tokens else 0.0


def read(file: str, case_name: str, arm_name: str, layers: int, width: int) -> Measured:
    """The step of an arm of a record in this folder."""
    record = json.loads((HERE / f"{file}.json").read_text())
    case = next(case for case in record["cases"] if case["name"] == case_name)
    arm = next(arm for arm in case["arms"] if arm["name"] == arm_name)
    window, cpu = arm["windows"][0], record["environment"]["device"] == "cpu"
    return Measured(
        arm["parameters"], window["tokens"] / window["steps"], window["operations"] / window["steps"],
        case["matmul"]["operations_per_s"], arm["optimizer_bytes"], layers, width, arm["step_s"],
        arm["peak_memory_bytes"], cpu, file in BERTS, case["kind"] == "lm",
    )  # fmt: skip


def _config(size: str) -> OelmGPTConfig:
    layers, width, heads, positions = SIZES[size]
    return OelmGPTConfig(
        d_model=width, num_layers=layers, num_heads=heads, d_ff=4 * width, num_labels=2,
        max_position_embeddings=positions,
    )  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """What was fitted, on the records of FITTED."""

    gpu: float  # share of the matrix product's rate
    cpu: float
    latency: float  # seconds per layer of the reference GPT, forward and backward
    bert_latency: float
    activation: float  # bytes per token, layer and unit of width

    def seconds(self, step: Measured) -> float:
        """Of one step on one device."""
        if step.cpu:
            return step.compute / self.cpu
        latency = self.bert_latency if step.bert else self.latency
        return step.compute / self.gpu + step.layers * latency + step.update

    def memory(self, step: Measured) -> float:
        """Bytes at the peak of a step on one GPU."""
        activations = self.activation * step.tokens * step.layers * step.width
        return HELD * step.parameters + activations + step.logits


def fit() -> Fit:
    by_record = {place[:3]: place for place in RECORDS.values()}
    used = {name: [read(*by_record[place]) for place in places] for name, places in FITTED.items()}
    both = used["efficiency on a GPU, with latency"]
    slopes = np.array([[step.compute, step.layers] for step in both])
    inverse, latency = np.linalg.solve(slopes, np.array([step.step_s - step.update for step in both]))
    (bert,), (large,), (cpu,) = (used[name] for name in [*FITTED][1:])
    of_bert = (bert.step_s - bert.update - bert.compute * inverse) / bert.layers
    assert large.memory is not None
    activations = large.memory - HELD * large.parameters
    per_activation = activations / (large.tokens * large.layers * large.width)
    return Fit(1 / inverse, cpu.compute / cpu.step_s, latency, of_bert, per_activation)


def measured_table(fitted: Fit) -> str:
    """Predicted against measured, a line per record."""
    lines = [
        "| model and work | parameters | tokens a step | step: predicted | measured | error "
        "| memory: predicted | measured | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    memories = FITTED["bytes per activation"]
    times = [place for places in FITTED.values() for place in places if places != memories]
    for name, place in RECORDS.items():
        step = read(*place)
        seconds, held = fitted.seconds(step), fitted.memory(step)
        time = f"{_ms(seconds)} | {_ms(step.step_s)} | {_error(seconds, step.step_s, place[:3] in times)}"
        memory = "– | – | –"
        if step.memory:
            error = _error(held, step.memory, place[:3] in memories)
            memory = f"{held / 1e9:.2f} GB | {step.memory / 1e9:.2f} GB | {error}"
        lines.append(f"| {name} | {_millions(step.parameters)} | {step.tokens:,.0f} | {time} | {memory} |")
    constants = (
        f"Fitted: {fitted.gpu:.0%} of the rate of a large matrix product and {fitted.latency * 1e6:.0f} µs "
        f"per layer (two records), {fitted.bert_latency * 1e6:.0f} µs per layer of BERT, "
        f"{fitted.activation:.1f} bytes per token, layer and unit of width; on the CPU {fitted.cpu:.0%} of "
        "the rate."
    ).replace("%", " %")
    return "\n".join(lines) + f"\n\n{constants}\n"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _millions(number: float) -> str:
    return f"{number / 1e6:,.1f}M"


def _error(predicted: float, measured: float, was_fitted: bool) -> str:
    return "fitted" if was_fitted else f"{round(100 * (predicted / measured - 1)):+d} %".replace("-", "−")


@dataclass(frozen=True)
class Shape:
    """How many parameters a reference GPT has, and where."""

    total: int
    blocks: int
    qk: int

    @classmethod
    def of(cls, size: str, vocabulary: int = VOCABULARY) -> "Shape":
        layers, width, _, positions = SIZES[size]
        blocks = layers * (12 * width * width + 9 * width)
        return cls(blocks + (vocabulary + positions + 2) * width, blocks, 2 * layers * width * width)


def reduced_bytes(trained: int) -> int:
    """Bytes of gradients that go into the reductions of a step, by DDP and by FSDP2."""
    return FLOAT * trained


def gathered_bytes(total: int, blocks: int) -> int:
    """Bytes of weights that FSDP2 gathers in a step: blocks in the forward and in the backward pass."""
    return FLOAT * (total + blocks)


def sent_bytes(shape: Shape, trained: int, gpus: int, fsdp: bool) -> float:
    """Bytes that a GPU sends in a step."""
    share = (gpus - 1) / gpus
    if fsdp:
        return share * (gathered_bytes(shape.total, shape.blocks) + reduced_bytes(trained))
    return 2 * share * reduced_bytes(trained)


def bandwidth(gpus: int, cards: int) -> float:
    """Bytes a second and GPU of a ring through nodes of 8 GPUs with so many network cards."""
    return NVLINK if gpus <= 8 else min(NVLINK, cards * CARD)


def held_bytes(size: str, trained: int, gpus: int, fsdp: bool, activations: float) -> float:
    """Bytes that a GPU holds. Autocast keeps a bf16 copy of every weight from its forward to its backward
    pass. DDP copies gradients into buckets; FSDP2 holds what is outside the blocks and two blocks whole, and
    the gradients of one."""
    shape, layers = Shape.of(size), SIZES[size][0]
    copies = 2 * shape.total
    if not fsdp:
        return FLOAT * (shape.total + 4 * trained) + copies + activations
    whole = shape.total - shape.blocks + 3 * shape.blocks / layers
    return FLOAT * ((shape.total + 3 * trained) / gpus + whole) + copies + activations


SIZE, TOKENS, LENGTH = "gpt2-xl", 16_384, 1024
FABRICS = ((8, 0, "NVLink"), (64, 8, "8 cards a node"), (64, 1, "1 card a node"), (1024, 8, "8 cards a node"),
           (1024, 1, "1 card a node"))  # fmt: skip


def extrapolated_table(fitted: Fit) -> str:
    """gpt2-xl on many GPUs, with and without frozen Q and K."""
    shape, layers, width = Shape.of(SIZE), *SIZES[SIZE][:2]
    texts = TOKENS // LENGTH
    operations = Load(texts, TOKENS, texts * LENGTH**2).operations(_config(SIZE), "lm", causal=True)
    beside = read(*RECORDS["gpt2-xl, language model"])
    alone = Measured(
        shape.total,
        TOKENS,
        operations,
        beside.rate,
        8 * shape.total,
        layers,
        width,
        0.0,
        None,
        predicts_tokens=True,
    )
    compute = fitted.seconds(alone)
    activations = fitted.memory(alone) - HELD * shape.total
    lines = [
        "| | GPUs | network | memory of a GPU | with `oelm` | sent by a GPU | with `oelm` | takes "
        "| with `oelm` | saved of a step, no overlap |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for way, fsdp in (("DDP", False), ("FSDP2", True)):
        for gpus, cards, network in FABRICS:
            trained = (shape.total, shape.total - shape.qk)
            sent = [sent_bytes(shape, n, gpus, fsdp) for n in trained]
            takes = [one / bandwidth(gpus, cards) for one in sent]
            held = [held_bytes(SIZE, n, gpus, fsdp, activations) for n in trained]
            update = ADAMW * shape.total / MEMORY * (1 - 1 / gpus) if fsdp else 0.0
            saved = (takes[0] - takes[1]) / (compute - update + takes[0])
            cells = [f"{one / 1e9:.1f} GB" for one in (*held, *sent)] + [_ms(one) for one in takes]
            lines.append(
                f"| {way} | {gpus:,} | {network} | {' | '.join(cells)} | {saved:.1%} |".replace("%", " %")
            )
    lines.append(
        f"\nAll of it is extrapolated: {SIZE}, {_millions(shape.total)} parameters, Q and K "
        f"{_millions(shape.qk)}, {TOKENS:,} tokens on each GPU, {_ms(compute)} of computing a step."
    )
    return "\n".join(lines) + "\n"


def tables() -> dict[str, str]:
    fitted = fit()
    return {"measured": measured_table(fitted), "extrapolated": extrapolated_table(fitted)}


def written(page: str, made: dict[str, str]) -> str:
    """The page with these tables between their marks."""
    for name, table in made.items():
        begin, end = (f"<!-- cost model, {name}: {which} -->\n" for which in ("begin", "end"))
        before, rest = page.split(begin)
        page = f"{before}{begin}{table}{end}{rest.split(end)[1]}"
    return page


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/clusters.md")
    given: Any = parser.parse_args(words)
    made = tables()
    print("\n".join(made.values()))
    if given.write:
        write_text(PAGE, written(PAGE.read_text(), made))


if __name__ == "__main__":
    main()
