"""The trained models that a study kept, and the best of them by validation."""

from dataclasses import dataclass
from pathlib import Path

from oelm.config import read_toml
from oelm.errors import UserError
from oelm.system.files import read_object
from oelm.system.messages import notice
from oelm.training.predictions import larger_is_better


@dataclass(frozen=True)
class KeptModel:
    run: Path
    task: str
    method: str
    metric: str
    value: float  # on validation

    def __str__(self) -> str:
        return f"{self.run} ({self.method} on {self.task}, validation {self.metric} {self.value:.4g})"


def kept_models(study: Path) -> list[KeptModel]:
    """The kept models of a study, those of a task together and the best first."""
    table = read_toml(study / "study.toml").get("study")
    chosen_by = table.get("metric") if isinstance(table, dict) else None
    models = [_read(folder.parent, chosen_by) for folder in sorted(study.glob("runs/*/*/*/model"))]
    return sorted(models, key=lambda m: (m.task, -m.value if larger_is_better(m.metric) else m.value))


def _read(run: Path, metric: str | None) -> KeptModel:
    path = run / "results.json"
    results = read_object(path)
    try:
        metric = metric or results["metric"]
        value = float(results["best"]["metrics"][metric])
        task, method = results["task"], results["method"]
    except (KeyError, TypeError, ValueError):
        raise UserError(notice("file.damaged", path=path, problem=notice("value.no_score"))) from None
    return KeptModel(run, str(task), str(method), str(metric), value)


def best_model(study: Path) -> KeptModel:
    """The best kept model of a study of one task; of several tasks, all are named."""
    models = kept_models(study)
    if not models:
        raise UserError(
            f"{study} holds no model: none is trained yet, study.models says to keep none, or its records "
            "were imported or published, and models stay where they were trained; name a folder with one"
        )
    if len({model.task for model in models}) > 1:
        listed = "; ".join(map(str, models))
        raise UserError(f"{study} is a study of several tasks; name the run of one model: {listed}")
    return models[0]
