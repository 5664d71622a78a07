"""A report on a prepared dataset, for `oelm data inspect`, from the store alone."""

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
    facts: dict[str, Any] = {key: split.meta[key] for key in ("items", "tokens", "bytes")}
    if not split.has("offsets"):  # a stream
        return facts | {"bytes_per_token": split.bytes / max(1, len(split.tokens))}
    lengths = {"": split.lengths}
    if split.has("target_tokens"):
        facts |= {f"target_{key}": split.meta[f"target_{key}"] for key in ("tokens", "bytes")}
        lengths["target_"] = split.target_lengths
    for prefix, values in lengths.items():
        facts[f"{prefix}truncated_share"] = split.meta[f"{prefix}truncated"] / len(split)
        facts |= {f"{prefix}length_{q}": int(np.quantile(values, q / 100)) for q in (50, 90, 100)}
    if "class_counts" in split.meta:
        facts["class_counts"] = dict(zip(store.label_names, split.meta["class_counts"], strict=True))
    facts |= {key: value for key, value in split.meta.items() if key.startswith("label_")}
    if split.has("labels"):
        facts["majority_share"] = max(split.meta["class_counts"]) / len(split)
    return facts


def render(report: dict[str, Any]) -> str:
    tokenizer = report["tokenizer"]
    vocabulary = f"{tokenizer['name']} ({tokenizer['vocab_size']:,} tokens)"
    lines = [f"{report['task']} ({report['kind']}), tokenizer {vocabulary}"]
    for name, split in report["splits"].items():
        lines += ["", *_render_split(name, split, report)]
    if twice := [f"{pair} {count:,}" for pair, count in report["duplicates"].items()]:
        lines += ["", f"duplicates between splits: {', '.join(twice)}"]
    lines += [f"warning: {read_notice(warning)}" for warning in report["warnings"]]
    return "\n".join([*lines, f"prepared in {report['folder']}"])


def _render_split(name: str, split: dict[str, Any], report: dict[str, Any]) -> list[str]:
    unit = "items" if "length_50" in split else "rows"
    size = f"{split['items']:,} {unit}, {split['tokens']:,} tokens, {split['bytes']:,} bytes of text"
    lines = [f"{name}: {size}"]
    if "length_50" not in split:
        return [f"{lines[0]}, {split['bytes_per_token']:.2f} bytes a token"]
    sides = {"": "an item"}
    if "target_tokens" in split:
        lines[0] += f"; {split['target_tokens']:,} tokens, {split['target_bytes']:,} bytes of targets"
        sides = {"": "a source", "target_": "a target"}
    for prefix, what in sides.items():
        median, most_of, longest = (split[f"{prefix}length_{q}"] for q in (50, 90, 100))
        cut = f"{split[f'{prefix}truncated_share']:.1%} cut at {report[f'max_{prefix}length']}"
        lines.append(f"  tokens {what}: median {median}, 90 % up to {most_of}, longest {longest}; {cut}")
    if numbers := [f"{key[6:]} {value:.4g}" for key, value in split.items() if key.startswith("label_")]:
        lines.append(f"  labels: {', '.join(numbers)}")
    counts = split.get("class_counts", {})
    for label, count in counts.items():
        lines.append(f"  {label[:30]:>30} {count:>9,} {count / sum(counts.values()):6.1%}")
    return lines
