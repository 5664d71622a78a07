"""What a prepared data set looks like: the report behind `oelm data inspect`, from the store alone."""

from typing import Any

import numpy as np

from oelm.data.catalogue import CLASSIFICATION, LM
from oelm.data.store import Split, Store

BAR = 30  # characters of the longest bar in a histogram


def describe(store: Store) -> dict[str, Any]:
    """Sizes, class balance, lengths, truncation, duplicates, dropped rows and warnings, as plain data."""
    return {
        "task": store.task,
        "kind": store.kind,
        "folder": str(store.folder),
        "fingerprint": store.fingerprint,
        "tokenizer": store.meta["tokenizer"],
        "max_length": store.max_length,
        "label_names": store.label_names,
        "splits": {name: _describe_split(store, split) for name, split in store.splits.items()},
        "duplicates": store.meta["duplicates"],
        "dropped": store.meta["dropped"],
        "warnings": store.warnings,
    }


def _describe_split(store: Store, split: Split) -> dict[str, Any]:
    found: dict[str, Any] = {key: split.meta[key] for key in ("items", "tokens", "bytes")}
    if store.kind == LM:
        return found | {"bytes_per_token": split.bytes / max(1, len(split.tokens))}
    found |= {"truncated_share": split.meta["truncated"] / len(split), "lengths": histogram(split.lengths)}
    found |= {f"length_{q}": int(np.quantile(split.lengths, q / 100)) for q in (50, 90, 100)}
    if "class_counts" in split.meta:
        found["class_counts"] = dict(zip(store.label_names, split.meta["class_counts"], strict=True))
    if store.kind == CLASSIFICATION:
        found["majority_share"] = max(split.meta["class_counts"]) / len(split)
    return found


def histogram(lengths: np.ndarray) -> list[tuple[int, int]]:
    """(upper bound, items) for bins that double: up to 8, 16, 32, ... tokens, to the longest."""
    longest = int(lengths.max())
    bounds = [8]
    while bounds[-1] < longest:
        bounds.append(bounds[-1] * 2)
    counts = np.bincount(np.searchsorted(bounds, lengths), minlength=len(bounds))
    return [(bound, int(count)) for bound, count in zip(bounds, counts, strict=True)]


def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    tokenizer = report["tokenizer"]
    vocabulary = f"{tokenizer['name']} ({tokenizer['vocab_size']:,} tokens)"
    lines = [f"{report['task']} ({report['kind']}), tokenizer {vocabulary}"]
    for name, split in report["splits"].items():
        lines += ["", *_render_split(name, split, report["max_length"])]
    twice = [f"{pair} {count:,}" for pair, count in report["duplicates"].items()]
    if twice:
        lines += ["", f"duplicates between splits: {', '.join(twice)}"]
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    return "\n".join([*lines, f"prepared in {report['folder']}"])


def _render_split(name: str, split: dict[str, Any], max_length: int) -> list[str]:
    unit = "items" if "lengths" in split else "rows"
    size = f"{split['items']:,} {unit}, {split['tokens']:,} tokens, {split['bytes']:,} bytes of text"
    if "lengths" not in split:
        return [f"{name}: {size}, {split['bytes_per_token']:.2f} bytes a token"]
    lines = [
        f"{name}: {size}",
        f"  tokens an item: median {split['length_50']}, 90 % up to {split['length_90']}, longest "
        f"{split['length_100']}; {split['truncated_share']:.1%} cut at {max_length}",
    ]
    most = max(count for _, count in split["lengths"])
    for bound, count in split["lengths"]:
        lines.append(f"  {'up to ' + str(bound):>12} {count:>9,} {'#' * round(BAR * count / most)}")
    total = sum(split.get("class_counts", {}).values())
    for label, count in split.get("class_counts", {}).items():
        lines.append(f"  {label[:30]:>30} {count:>9,} {count / total:6.1%}")
    return lines
