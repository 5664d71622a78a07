"""What `oelm.study` and `oelm.report` return: where the report is, and its numbers as tables."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.study.report import Written, as_plain
from oelm.study.report.summary import WIDTH, summary
from oelm.study.result_types import Analysis
from oelm.system.terminal import columns

if TYPE_CHECKING:
    import pandas


@dataclass(repr=False)
class StudyResult:
    """The report on a study, or on a folder of runs."""

    folder: Path
    written: Written
    lang: str = "en"
    failed: dict[str, str] = field(default_factory=dict)  # run -> why, of those that were made now
    measured: bool = True  # whether any run was tested

    @property
    def analysis(self) -> Analysis:
        return self.written.analysis

    @property
    def html(self) -> Path:
        return self.written.html

    def to_dict(self) -> dict[str, Any]:
        """Answer, arms, comparisons and warnings as plain values: `oelm report --json`."""
        return as_plain(self.analysis, self.lang)

    def to_pandas(self) -> "pandas.DataFrame":
        """A row for every run: its arm, learning rate, seed, and what it reached on validation and test."""
        import pandas

        rows = []
        for record in self.analysis.records:
            results = record.results
            best, test = ((results.get(name) or {}).get("metrics", {}) for name in ("best", "test"))
            row = {"task": record.task, "method": record.method, "lr": record.lr, "seed": record.seed}
            row |= {"trial": not record.config.training.test, "status": results.get("status")}
            for split, metrics in (("validation", best), ("test", test)):
                row |= {f"{split}_{name}": v for name, v in metrics.items() if isinstance(v, int | float)}
            rows.append(row | {"folder": str(record.folder)})
        return pandas.DataFrame(rows)

    def comparisons(self) -> "pandas.DataFrame":
        """A row for every comparison: the difference, its interval, the verdict."""
        import pandas

        return pandas.json_normalize(self.to_dict()["comparisons"], sep="_")

    def __repr__(self) -> str:
        return summary(self.analysis, self.lang, columns(WIDTH))
