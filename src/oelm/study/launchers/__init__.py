"""Launchers: where a study's runs are trained. A new one is a module, here or in a plugin, and its entry."""

from oelm.study.launchers.interface import EndedRun, Launcher, RunJob
from oelm.study.launchers.local import LocalLauncher
from oelm.system.plugins import Registry

__all__ = ["LAUNCHERS", "EndedRun", "Launcher", "RunJob"]

# The values of `study.launcher`. A launcher is made from the study's table, the memory that one run needs
# (bytes) and a folder for logs.
LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher",
    {
        "local": LocalLauncher,
        "workers": "oelm.study.launchers.workers:WorkersLauncher",
        "slurm": "oelm.study.launchers.slurm:SlurmLauncher",
    },
)
