"""Collects the evidence for the claims: every study, run and benchmark record below some paths."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from oelm.bench.show import read_record
from oelm.claims.data import claim_data
from oelm.claims.speed import Benchmark
from oelm.errors import UserError
from oelm.study.analysis import analyse, analyse_records
from oelm.study.records import Record, find_records
from oelm.study.result_types import Analysis
from oelm.system.messages import Notice


@dataclass
class Collection:
    """Studies (runs outside of one count as a study without a plan) and benchmark records."""

    analyses: list[Analysis] = field(default_factory=list)
    benchmarks: list[Benchmark] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # messages on what cannot be used

    def add(self, benchmark: Benchmark) -> None:
        """Add a benchmark, unless it is a copy of another."""
        if all(benchmark.record != other.record for other in self.benchmarks):
            self.benchmarks.append(benchmark)

    @property
    def ages(self) -> dict[str, int]:
        return ages(record for analysis in self.analyses for record in analysis.records)


def ages(records: Iterable[Record]) -> dict[str, int]:
    """The numbers of runs that ended before and after the rules were fixed, or are undated; copies count
    once."""
    runs = {(record.identity.key, record.method): record for record in records}
    counts = Counter(_age(record.results.get("ended")) for record in runs.values())
    return {age: counts[age] for age in ("before", "after", "undated")}


def _age(ended: str | None) -> str:
    try:
        when = datetime.fromisoformat(ended or "")
        return "before" if when < claim_data()["rules"]["date"] else "after"
    except (TypeError, ValueError):  # no date, or one without a time zone
        return "undated"


def collect(paths: Sequence[Path]) -> Collection:
    """Read folders, searched for studies, runs and benchmark records, and files of `oelm bench --json`."""
    collection, seen = Collection(), set[Path]()
    for path in paths:
        if path.is_dir():
            _search(path, collection, seen)
        elif not path.exists():
            raise UserError(f"{path}: no such file or folder")
        elif path.resolve() not in seen:
            seen.add(path.resolve())
            collection.add(Benchmark(path.name, read_record(path)))
    if not collection.analyses and not collection.benchmarks:
        why = f" ({collection.left_out[0]})" if collection.left_out else ""
        names = ", ".join(map(str, paths))
        raise UserError(f"no study, run or record of oelm bench that can be used in {names}{why}")
    return collection


def _search(folder: Path, collection: Collection, seen: set[Path]) -> None:
    """Add the studies, runs and records below a folder; `seen` are paths that were read before."""
    studies = [path.parent.resolve() for path in sorted(folder.rglob("study.toml"))]
    for study in dict.fromkeys(studies):
        if study not in seen and any(study.rglob("results.json")):
            try:
                collection.analyses.append(analyse(study))
                collection.left_out += map(str, collection.analyses[-1].damaged)
            except UserError as error:
                collection.left_out.append(str(error))
    seen.update(studies)
    damaged: list[Notice] = []
    records = [record for record in find_records(folder, damaged) if not _read(record.folder, seen)]
    if records:
        collection.analyses.append(analyse_records(records, None, title=folder.resolve().name))
    if not studies:  # or they have been named above
        collection.left_out += map(str, damaged)
    seen.update(record.folder.resolve() for record in records)
    for path in sorted(folder.rglob("*.json")):
        if not _read(path, seen):
            with contextlib.suppress(UserError):  # some other JSON file
                collection.add(Benchmark(path.name, read_record(path)))
            seen.add(path.resolve())


def _read(path: Path, seen: set[Path]) -> bool:
    return not seen.isdisjoint((path.resolve(), *path.resolve().parents))
