"""What a prepared data set looks like: the report behind `oelm data inspect`, from the store alone."""

from typing import Any

import numpy as np

from oelm.data.store import Split, Store
from oelm.system.messages import read_notice


def describe(store: Store) -> dict[str, Any]:
    """Sizes, class balance, lengths, truncation, duplicates, dropped rows and warnings, as plain data."""
    return {
        "task": store.task,
        "kind": store.kind,
        "folder": str(store.folder),
        "fingerprint": store.fingerprint,
        "tokenizer": store.meta["tokenizer"],
        "max_length": store.max_length,
        **({"max_target_length": store.max_target_length} if store.max_target_length is not None else {}),
        "label_names": store.label_names,
        "splits": {name: _describe_split(store, split) for name, split in store.splits.items()},
        "duplicates": store.meta["duplicates"],
        "dropped": store.meta["dropped"],
        "warnings": [warning.to_dict() for warning in store.warnings],
    }


def _describe_split(store: Store, split: Split) -> dict[str, Any]:
    found: dict[str, Any] = {key: split.meta[key] for key in ("items", "tokens", "bytes")}
    if not split.has("offsets"):  # a stream
        return found | {"bytes_per_token": split.bytes / max(1, len(split.tokens))}
    found |= _describe_lengths(split, "", split.lengths)
    if split.has("target_tokens"):
        found |= {f"target_{key}": split.meta[f"target_{key}"] for key in ("tokens", "bytes")}
        found |= _describe_lengths(split, "target_", split.target_lengths)
    if "class_counts" in split.meta:
        found["class_counts"] = dict(zip(store.label_names, split.meta["class_counts"], strict=True))
    found |= {key: value for key, value in split.meta.items() if key.startswith("label_")}
    if split.has("labels"):
        found["majority_share"] = max(split.meta["class_counts"]) / len(split)
    return found


def _describe_lengths(split: Split, prefix: str, lengths: np.ndarray) -> dict[str, Any]:
    quantiles = {f"{prefix}length_{q}": int(np.quantile(lengths, q / 100)) for q in (50, 90, 100)}
    cut = split.meta[f"{prefix}truncated"] / len(split)
    return {f"{prefix}truncated_share": cut, **quantiles}


def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    tokenizer = report["tokenizer"]
    vocabulary = f"{tokenizer['name']} ({tokenizer['vocab_size']:,} tokens)"
    lines = [f"{report['task']} ({report['kind']}), tokenizer {vocabulary}"]
    for name, split in report["splits"].items():
        lines += ["", *_render_split(name, split, report["max_length"], report.get("max_target_length"))]
    twice = [f"{pair} {count:,}" for pair, count in report["duplicates"].items()]
    if twice:
        lines += ["", f"duplicates between splits: {', '.join(twice)}"]
    lines += [f"warning: {read_notice(warning)}" for warning in report["warnings"]]
    return "\n".join([*lines, f"prepared in {report['folder']}"])


def _render_split(
    name: str, split: dict[str, Any], max_length: int, max_target_length: int | None
) -> list[str]:
    unit = "items" if "length_50" in split else "rows"
    size = f"{split['items']:,} {unit}, {split['tokens']:,} tokens, {split['bytes']:,} bytes of text"
    if "length_50" not in split:
        return [f"{name}: {size}, {split['bytes_per_token']:.2f} bytes a token"]
    if max_target_length is None:
        lines = [f"{name}: {size}", _render_lengths(split, "", "an item", max_length)]
    else:
        written = f"{split['target_tokens']:,} tokens, {split['target_bytes']:,} bytes of targets"
        lines = [f"{name}: {size}; {written}", _render_lengths(split, "", "a source", max_length)]
        lines.append(_render_lengths(split, "target_", "a target", max_target_length))
    if numbers := [f"{key[6:]} {value:.4g}" for key, value in split.items() if key.startswith("label_")]:
        lines.append(f"  labels: {', '.join(numbers)}")
    total = sum(split.get("class_counts", {}).values())
    for label, count in split.get("class_counts", {}).items():
        lines.append(f"  {label[:30]:>30} {count:>9,} {count / total:6.1%}")
    return lines


def _render_lengths(split: dict[str, Any], prefix: str, what: str, limit: int) -> str:
    median, most_of, longest = (split[f"{prefix}length_{q}"] for q in (50, 90, 100))
    return (
        f"  tokens {what}: median {median}, 90 % up to {most_of}, longest {longest}; "
        f"{split[f'{prefix}truncated_share']:.1%} cut at {limit}"
    )
