"""The unstable part of Accelerate that this package uses: its table of trackers."""

from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

# The argument by which a tracker names a run. Accelerate gives these the name of a project first, the others
# that of a run.
RUN_NAMES = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}


def tracker_classes() -> dict[str, Any]:
    """Every tracker that Accelerate knows, by its name."""
    return dict(LOGGER_TYPE_TO_CLASS)


def lacks_package(tracker: str) -> bool:
    """Whether this is one of Accelerate's own trackers, and the package it needs is not installed."""
    return tracker in map(str, LoggerType) and tracker not in map(str, get_available_trackers())
