"""A record as tables for people, and as a chart of its ratios."""

import io
from pathlib import Path
from typing import Any

from oelm.errors import UserError
from oelm.system.files import read_json, write_text
from oelm.system.terminal import console

SCHEMA = 1  # of the record

WIDTH = 1000  # columns; a narrower terminal wraps lines, but no number is cut
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito's, for colour-blind readers
WORDS = {"texts_per_s": "texts/s", "tokens_per_s": "tokens/s", "step_s": "step time"}


def read_record(path: Path) -> dict[str, Any]:
    """A record written by `--json`."""
    record = read_json(path)
    complete = isinstance(record, dict) and {"cases", "environment", "command"} <= set(record)
    if not complete or record.get("schema") != SCHEMA:
        raise UserError(f"{path} is not a record of oelm bench; such a file is written with --json")
    return record


def print_record(record: dict[str, Any]) -> None:
    """The arms, the ratios and what freezing saves, on standard output."""
    screen, environment = console(width=WIDTH), record["environment"]
    where = environment.get("gpu") or environment["cpu"]
    versions = ", ".join(f"{name} {environment['packages'].get(name)}" for name in ("torch", "transformers"))
    lines = [f"{where}; {versions}; commit {environment['commit'] or 'unknown'}", record["command"]]
    lines += [
        f"{arm['name']}: {arm['about']}" for case in record["cases"] for arm in case["arms"] if arm["about"]
    ]
    for line in dict.fromkeys(lines):
        screen.print(line, soft_wrap=True)
    for table in (_arms(record), _ratios(record), _savings(record)):
        if table.row_count:
            screen.print()
            screen.print(table)
    for case in record["cases"]:
        for saving in case.get("savings", []):
            if min(saving["saved_s_rounds"]) < 0 < max(saving["saved_s_rounds"]):
                screen.print(
                    f"\n{case['name']}, {saving['method']}: single rounds disagree on whether time is saved. "
                    "Longer windows (--steps; 1250 on a GPU at its power limit) or more --rounds say more.",
                    soft_wrap=True,
                )


def _table(title: str, left: list[str], right: list[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", min_width=len(title), box=None, pad_edge=False)
    table.padding = (0, 2, 0, 0)
    for name in left + right:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def _arms(record: dict[str, Any]) -> Any:
    watched = any(arm.get("clock_mhz") for case in record["cases"] for arm in case["arms"])
    state = ["MHz", "W"] if watched else []
    columns = ["texts/s", "tokens/s", "ms/step", "of peak", *state, "peak MiB", "held MiB"]
    title = "Medians of the rounds; real tokens; of peak: omitted work counts; held: gradients and moments"
    table = _table(title, ["work", "on", "arm"], columns)
    table.add_column("note")
    for case in record["cases"]:
        rate = case["matmul"]["operations_per_s"]
        peak = "-" if rate is None else f"{rate / 1e12:.3g} TFLOP/s"
        empty = [""] * (2 + len(state))
        table.add_row(case["work"], case["name"], "matmul", "", "", "", peak, *empty, case["matmul"]["about"])
        for arm in case["arms"]:
            held = None if arm["optimizer_bytes"] is None else arm["gradients_bytes"] + arm["optimizer_bytes"]
            table.add_row(
                "", "", arm["name"], _number(arm["texts_per_s"]), _number(arm["tokens_per_s"]),
                _number(arm["step_s"], 1e3, 2), _percent(arm["share_of_peak"]),
                *([_number(arm["clock_mhz"]), _number(arm["power_w"])] if watched else []),
                _number(arm["peak_memory_bytes"], 2**-20), _number(held, 2**-20, 1), arm["failed"] or "",
            )  # fmt: skip
    return table


def _ratios(record: dict[str, Any]) -> Any:
    table = _table("Ratios of the medians", ["work", "on", "of / to", "in"], ["ratio", "rounds"])
    for case in record["cases"]:
        for ratio in case["ratios"]:
            table.add_row(
                case["work"], case["name"], f"{ratio['of']} / {ratio['to']}", WORDS[ratio["quantity"]],
                f"{ratio['ratio']:.3f}", f"{ratio['low']:.3f} .. {ratio['high']:.3f}",
            )  # fmt: skip
    return table


def _savings(record: dict[str, Any]) -> Any:
    columns = [
        "saved ms", "rounds", "of step", "omitted alone ms", "saved/omitted", "omitted/work", "held B",
        "peak B",
    ]  # fmt: skip
    title = "What freezing saves, beside the Q/K weight-gradient product that it omits"
    table = _table(title, ["on", "method"], columns)
    for case in record["cases"]:
        for saving in case.get("savings", []):
            table.add_row(
                case["name"], saving["method"], _number(saving["saved_s"], 1e3, 3),
                " .. ".join(_number(end(saving["saved_s_rounds"]), 1e3, 3) for end in (min, max)),
                _percent(saving["saved_share"]), _number(saving["omitted_product_s"], 1e3, 3),
                _percent(saving["saved_of_omitted"]), _percent(saving["omitted_share_of_operations"]),
                _number(saving["held_bytes_saved"]), _number(saving["peak_memory_bytes_saved"]),
            )  # fmt: skip
    return table


def _number(value: float | None, scale: float = 1.0, digits: int = 0) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def draw_chart(record: dict[str, Any], path: Path) -> None:
    """The ratios as bars with the rounds' spread, as SVG: rates above, step times below."""
    import matplotlib
    from matplotlib.figure import Figure

    panels: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for case in sorted(record["cases"], key=lambda case: "savings" in case):
        for entry in case["ratios"]:
            times = entry["quantity"] == "step_s"
            title = "step time, as a share of the baseline's" if times else "times as fast as the peer"
            panels.setdefault(title, []).append((case, entry))
    rows = [len(pairs) + 1.5 for pairs in panels.values()] or [1.0]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oelm", "text.parse_math": False}):
        figure = Figure(figsize=(8, 0.32 * sum(rows) + 0.5), layout="constrained")
        axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
        for axis, (title, pairs) in zip(axes, panels.items(), strict=False):
            _draw_bars(axis, pairs)
            axis.set_title(title, fontsize=9.5, loc="left")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    write_text(path, text.getvalue())


def _draw_bars(axis: Any, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    works = list(dict.fromkeys(case["work"] for case, _ in pairs))
    for row, (case, entry) in enumerate(pairs):
        value, low, high = entry["ratio"], entry["low"], entry["high"]
        colour = PALETTE[works.index(case["work"]) % len(PALETTE)]
        spread = [[value - low], [high - value]]
        axis.barh(row, value, xerr=spread, color=colour, error_kw={"lw": 1}, height=0.7)
        near = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axis.annotate(f"{value:.3g}", (high, row), **near)
    names = [f"{case['name']}: {entry['of']} / {entry['to']}" for case, entry in pairs]
    axis.set_yticks(range(len(pairs)), names)
    axis.axvline(1, color="#666", lw=0.8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
