"""The records of a study, or of a folder of runs, in a compact form: for a repository or a paper's appendix.

A published folder is read like any other (`oelm report DIR`) and gives the same numbers. Evaluations,
results, environments and times stay as they are. Paths of data and models are cut to their names, training
curves are thinned, the audit is reduced to counts, and of the predictions only what a report needs stays;
labels, ids and groups of the test items are stored once per folder instead of in every run.
"""

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.config import to_toml
from oelm.errors import UserError
from oelm.study.folder import StudyFolder, check_folder, no_runs, records_below
from oelm.study.records import LAST_POINTS, Record, cut_path, read_record
from oelm.system.files import folder_beside, read_json, sync_folder, write_json, write_text
from oelm.system.messages import Notice
from oelm.training.predictions import publish_predictions

CURVE = 50  # training lines kept of each run, evenly spread, the last one among them
CURVE_KEYS = ("kind", "step", "loss", "lr", "grad_norm")


@dataclass(frozen=True)
class Published:
    """What was written, and the problems of records that cannot be read."""

    runs: int
    bytes: int
    left_out: list[Notice]


def publish(source: Path, folder: Path) -> Published:
    """Write the records below `source` to a new folder, all of them or none."""
    check_folder(source)
    if folder.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{folder} lies in {source}, whose report would count its runs twice; name another")
    if folder.exists():
        raise UserError(f"{folder} exists already; name a new folder")
    records, _, damaged = records_below(source)
    if not records:
        raise no_runs(source, damaged)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(folder) as beside:
            _write(source, records, beside)
            size = sum(path.stat().st_size for path in beside.rglob("*") if path.is_file())
            beside.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    return Published(len(records), size, damaged)


def _write(source: Path, records: list[Record], to: Path) -> None:
    study = StudyFolder(source).read() if (source / "study.toml").is_file() else None
    settings: dict[str, str] = {}  # a record's setting -> the same with paths cut
    keys = set()
    for record in records:
        folder = to / record.folder.relative_to(source)
        folder.mkdir(parents=True, exist_ok=True)
        _write_run(record, source, folder)
        if (arrays := record.predictions()) is not None:
            publish_predictions(folder, arrays, to, record.task)
        cut = read_record(folder)
        assert cut is not None
        if study is not None:
            cut = cut.with_differing_keys(study.differs_in)
        settings[record.identity.setting] = cut.identity.setting
        keys.add((cut.identity.key, cut.method))
    if len(keys) < len({(record.identity.key, record.method) for record in records}):
        raise UserError(
            f"{source} holds runs that differ only in the folder of their model, and published records name "
            "no folders; give the models different names, or publish the runs separately"
        )
    if study is not None:
        values = _cut_paths(study.as_written())
        if "per_task" in values:
            values["per_task"] = {task: _cut_paths(more) for task, more in values["per_task"].items()}
        write_text(to / "study.toml", to_toml(values))
        known = read_json(source / "study.json")
        for name in ("made", "imported"):
            if name in known:
                known[name] = sorted({settings.get(key, key) for key in known[name]})
        write_json(to / "study.json", _shorten_paths(known, [str(source.resolve())]))


def _write_run(record: Record, source: Path, to: Path) -> None:
    """Write all files of a run but its predictions."""
    task, model = record.config.task, record.config.model
    write_text(to / "config.toml", to_toml(_cut_paths(record.config.to_dict())))
    given = (source.resolve(), task.data, task.test_file, task.data_dir, task.tokenizer, model.name)
    absolute = [str(path) for path in given if path is not None and Path(path).is_absolute()]
    results = record.results | {"model": cut_path(str(record.results["model"]))}
    write_json(to / "results.json", _shorten_paths(results, absolute))
    write_json(to / "environment.json", _shorten_paths(record.environment, absolute))
    if (path := record.folder / "timing_stats.json").exists():
        write_json(to / path.name, read_json(path))
    if (path := record.folder / "freeze_audit.json").exists():
        audit = {"passed": True, **read_json(path)}  # a run writes its audit only if it passed
        if audit.pop("fingerprint", None) is not None:
            audit["tensors"] = dict(record.parameter_roots)
        write_json(to / path.name, audit)
    if (record.folder / "metrics.jsonl").exists():
        lines = _thinned(record.metric_lines())
        write_text(to / "metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))


def _cut_paths(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the names of files and folders in place of their paths."""
    values = deepcopy(values)
    task, model = values.get("task", {}), values.get("model", {})
    task.pop("data_dir", None)
    for name in {"data", "test_file"} & task.keys():
        task[name] = Path(task[name]).name
    for table, name in ((task, "tokenizer"), (model, "name")):
        if name in table:
            table[name] = cut_path(table[name])
    return values


def _shorten_paths(value: Any, paths: Iterable[str]) -> Any:
    """The value with the paths in its texts (reasons, warnings) cut to their last part."""
    if isinstance(value, dict):
        return {key: _shorten_paths(entry, paths) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shorten_paths(entry, paths) for entry in value]
    if isinstance(value, str):
        for path in sorted(paths, key=len, reverse=True):  # one may lie in another
            value = value.replace(path, Path(path).name)
    return value


def _thinned(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All evaluations; of the training lines CURVE and the last, with the keys that a curve needs. Entries
    that were thinned before are returned as they are."""
    training = [index for index, entry in enumerate(entries) if entry.get("kind") == "train"]
    if len(training) <= CURVE + LAST_POINTS:
        return entries
    last = {*training[-LAST_POINTS:]}  # a report shows these: they stay exact
    kept = {*training[::-1][:: -(-len(training) // CURVE)]} | last
    for index in kept:
        values = {key: entries[index][key] for key in CURVE_KEYS if key in entries[index]}
        short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}
        entries[index] = values if index in last else short
    return [entry for index, entry in enumerate(entries) if entry.get("kind") != "train" or index in kept]
