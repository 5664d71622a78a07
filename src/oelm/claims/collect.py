"""What the claims are judged on: every study, run and benchmark record below some paths."""

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
from oelm.study.records import find_records
from oelm.study.result_types import Analysis


@dataclass
class Collection:
    """Studies (runs outside of one count as a study without a plan) and benchmark records."""

    analyses: list[Analysis] = field(default_factory=list)
    benchmarks: list[Benchmark] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what cannot be used, and why

    @property
    def ages(self) -> dict[str, int]:
        """Runs that ended before and after the rules were fixed, and runs that do not say when."""
        runs = [record for analysis in self.analyses for record in analysis.records]
        counts = Counter(_age(record.results.get("ended")) for record in runs)
        return {age: counts[age] for age in ("before", "after", "undated")}


def _age(ended: str | None) -> str:
    try:
        when = datetime.fromisoformat(ended or "")
        return "before" if when < claim_data()["rules"]["date"] else "after"
    except (TypeError, ValueError):  # no date, or one without a time zone
        return "undated"


def collect(paths: Sequence[Path]) -> Collection:
    """Read folders, searched for studies, runs and benchmark records, and files of `oelm bench --json`."""
    found, seen = Collection(), set[Path]()
    for path in paths:
        if path.is_file():
            if path.resolve() not in seen:
                found.benchmarks.append(Benchmark(path.name, read_record(path)))
            seen.add(path.resolve())
        elif path.is_dir():
            _search(path, found, seen)
        else:
            raise UserError(f"{path}: no such file or folder")
    if not found.analyses and not found.benchmarks:
        why = f" ({found.left_out[0]})" if found.left_out else ""
        names = ", ".join(map(str, paths))
        raise UserError(f"no study, run or record of oelm bench that can be used in {names}{why}")
    return found


def _search(folder: Path, found: Collection, seen: set[Path]) -> None:
    studies = [path.parent for path in sorted(folder.rglob("study.toml"))]
    for study in studies:
        if study.resolve() in seen or not any(study.rglob("results.json")):
            continue
        seen.add(study.resolve())
        try:
            found.analyses.append(analyse(study))
            found.left_out += map(str, found.analyses[-1].damaged)
        except UserError as error:
            found.left_out.append(str(error))
    damaged: list = []
    runs = [r for r in find_records(folder, damaged) if not _inside(r.folder, studies, seen)]
    seen.update(run.folder.resolve() for run in runs)
    found.left_out += [
        str(problem) for problem in damaged if not any(str(s) in str(problem) for s in studies)
    ]
    if runs:
        found.analyses.append(analyse_records(runs, None, title=folder.resolve().name))
    for path in sorted(folder.rglob("*.json")):
        if path.resolve() in seen or _inside(path, [*studies, *(run.folder for run in runs)], set()):
            continue
        try:
            record = read_record(path)
        except UserError:  # some other JSON file
            continue
        seen.add(path.resolve())
        found.benchmarks.append(Benchmark(path.name, record))


def _inside(path: Path, folders: Iterable[Path], seen: set[Path]) -> bool:
    """Whether a path lies in one of the folders, or was read before."""
    return path.resolve() in seen or any(path.is_relative_to(folder) for folder in folders)
