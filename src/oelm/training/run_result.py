"""The return value of `oelm.train`: the run's folder and its results."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.config import RunConfig

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run. `results` holds the values of results.json; it is empty in all processes but the
    first."""

    folder: Path
    results: dict[str, Any]
    config: RunConfig  # as requested, before it was resolved

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics on the test split or, if the run was not tested, of its best evaluation."""
        return dict((self.results["test"] or self.results["best"])["metrics"])

    def to_pandas(self) -> "pandas.DataFrame":
        """metrics.jsonl: a row for every logged step and every evaluation."""
        import pandas

        entries = []
        for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            metrics = entry.pop("metrics", {})
            entries.append(entry | metrics)
        return pandas.DataFrame(entries)

    def __repr__(self) -> str:
        if not self.results:
            return f"RunResult({str(self.folder)!r})"
        metric, split = self.results["metric"], "test" if self.results["test"] else "validation"
        what = f"{self.results['method']} on {self.results['task']}"
        return f"RunResult({str(self.folder)!r}: {what}, {split} {metric} {self.metrics[metric]:.4f})"
