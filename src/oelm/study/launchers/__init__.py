"""Launchers: where a study's runs are trained. A new one is a module here and an entry of LAUNCHERS."""

from oelm.study.launchers.interface import EndedRun, Launcher, RunJob
from oelm.study.launchers.local import LocalLauncher

__all__ = ["LAUNCHERS", "EndedRun", "Launcher", "RunJob"]

# The values of `study.launcher`. A launcher is made from the study's table, the memory that one run needs
# (bytes) and a folder for logs.
LAUNCHERS: dict[str, type[Launcher]] = {"local": LocalLauncher}
