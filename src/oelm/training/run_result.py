"""What `oelm.train` returns: where the run is, and its numbers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.config import RunConfig

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run. `results` is what results.json says; empty in all processes but the first."""

    folder: Path
    results: dict[str, Any]
    config: RunConfig  # as it was asked for

    @property
    def metrics(self) -> dict[str, Any]:
        """On the test split or, where that was left alone, on validation."""
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
