"""The requests of `oelm study` or `oelm.study`, and of `oelm report`: plan, conduct, report.

Nothing heavy is imported here, as `import oelm` imports this module.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.config import ALTERNATIVES, flag_keys, merge, overrides, read_toml
from oelm.errors import UserError
from oelm.system.plugins import load_plugins
from oelm.system.terminal import say
from oelm.training.folder import flat
from oelm.training.request import (
    Assignments,
    PathLike,
    as_list,
    normalized_options,
    split_assignments,
    takes_options,
)

if TYPE_CHECKING:
    from oelm.study.design import Study
    from oelm.study.study_result import StudyResult

Names = str | Iterable[Any]  # a list, or text with commas
OF_A_RUN = ("method", "lr", "seed")  # a study has several
LISTS = ("tasks", "methods", "lrs")


@takes_options(*OF_A_RUN)
def study(
    name: PathLike | None = None,
    *,
    task: Names | None = None,
    methods: Names | None = None,
    lrs: Iterable[float] | str | None = None,
    seeds: int | None = None,
    until_decided: bool | None = None,
    max_seeds: int | None = None,
    margin: float | None = None,
    jobs: int | None = None,
    launcher: str | None = None,
    slurm: bool = False,
    profile: PathLike | None = None,
    set: Assignments = (),
    out: PathLike | None = None,
    stop_after: float | None = None,
    lang: str = "en",
    plugin: str | Iterable[str] = (),
    show: bool = True,
    **options: Any,
) -> "StudyResult":
    """Compare methods fairly and write the report: `oelm study`, whose options have the same names here.

    `oelm.study(data="d.csv", text="body", label="topic", methods=["baseline", "oelm"], lrs=[3e-4, 1e-3],
    seeds=5, out="s")`. Any other key: `set={"study.widen": 0}`. An unfinished study in `out` goes on.
    """
    from oelm.study.report.view import Words

    Words(lang)  # an unknown language is refused before the study runs, not after it
    table: dict[str, Any] = {"tasks": task, "methods": methods, "lrs": lrs, "seeds": seeds}
    table |= {"until_decided": until_decided, "max_seeds": max_seeds, "margin": margin, "jobs": jobs}
    table |= {"launcher": "slurm" if slurm else launcher}
    planned, folder = plan_study(name, out, options, table, set, plugin, profile)
    if show:
        note_few_seeds(planned, err=False)  # which a notebook would show as an error
    return conduct_study(planned, folder, stop_after, lang, show)


def plan_study(
    name: PathLike | None,
    out: PathLike | None,
    options: Mapping[str, Any],
    table: Mapping[str, Any],
    set: Assignments = (),
    plugin: str | Iterable[str] = (),
    profile: PathLike | None = None,
) -> tuple["Study", Path]:
    """The study a user asks for, and its folder: one by name or the one in the folder `out`, overridden by
    the file `profile`, options of its runs and keys of its [study] `table`. Nothing is prepared yet."""
    from oelm.study.design import make_study, read_study
    from oelm.study.folder import StudyFolder
    from oelm.study.launchers import LAUNCHERS

    if wrong := [key for key in OF_A_RUN if key in options]:
        raise TypeError(f"a study has no option {wrong[0]!r}; it has task, methods, lrs and seeds")
    given = normalized_options(options)
    table = {
        key: as_list(value) if key in LISTS else value for key, value in table.items() if value is not None
    }
    title = str(name or given.get("data") or "-".join(table.get("tasks") or ["study"]))
    folder = Path(out or Path("studies", Path(title).stem.strip(".") or "study"))
    if "data" in given:
        table = {"tasks": []} | table  # the file replaces the tasks that a study names
    keys = flag_keys(given) | {f"study.{key}": value for key, value in table.items()}
    flags, assignments = split_assignments(keys, set)
    values: dict[str, Any] = {}
    if name is not None:
        values = read_study(str(name))
    elif out is not None and (folder / "study.toml").is_file():
        load_plugins(_plugins_of(read_toml(folder / "study.toml")))
        values = StudyFolder(folder).read().to_dict()
    elif not flags:
        raise UserError("name a study, a task (--task) or a file (--data); see oelm study --help")
    else:
        values = {"training": {"eval_every": "auto"}}
    if profile is not None:
        values = merge(values, read_toml(Path(profile)))
    if "study.methods" in flags and isinstance(values.get("study"), dict):
        values["study"].pop("arms", None)
    if plugins := [*dict.fromkeys([*_plugins_of(values), *as_list(plugin)])]:
        values["plugins"] = plugins
        load_plugins(plugins)
    requested = overrides(flags, assignments)
    _merge_per_task(values, requested)
    planned = make_study(merge(values, requested), str(name or "options"))
    LAUNCHERS.find(planned.table.launcher)  # before anything is prepared
    StudyFolder(folder).check(planned)  # before anything is imported or prepared
    return planned, folder


def _plugins_of(values: Mapping[str, Any]) -> list[str]:
    """The plugins that a study's file names: they are imported before the rest of it is checked."""
    names = values.get("plugins", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'plugins must be a list of names, such as ["my_plugin"], got {names!r}')
    return names


def _merge_per_task(values: dict[str, Any], requested: Mapping[str, Any]) -> None:
    """Override the study's tables of single tasks in place, so that steps replace a task's epochs; print a
    note where such a table keeps its value although an option for all tasks sets another."""
    changed = requested.get("per_task")
    for task, tables in values["per_task"].items() if isinstance(values.get("per_task"), dict) else ():
        new = changed.get(task) if isinstance(changed, Mapping) else None
        new = new if isinstance(new, Mapping) else {}
        if not isinstance(tables, dict):
            continue  # refused later
        merge(tables, new)
        for key in [key for key in flat(tables) if key not in flat(new)]:
            table, _, name = key.partition(".")
            names = next((pair for pair in ALTERNATIVES if name in pair), (name,))
            given = requested[table] if isinstance(requested.get(table), Mapping) else {}
            for other in [other for other in names if other in given]:
                keeps = f"{task} keeps {name} {tables[table][name]}, which this study sets for it alone"
                say(f"note: {keeps}; --set per_task.{task}.{table}.{other}=... changes it", err=True)


def note_few_seeds(planned: "Study", err: bool = True) -> None:
    """Print a note if a study plans fewer seeds than a verdict needs."""
    from oelm.study.decide import fewest_seeds

    comparisons = len(planned.contrasts) * len(planned.tasks)
    if planned.looks[-1] < (fewest := fewest_seeds(comparisons)):
        count = f"{comparisons} comparison{'s' * (comparisons != 1)}"
        seeds = planned.looks[-1]
        say(f"note: a verdict on {count} needs {fewest} seeds; planned: {seeds}", err=err)


def conduct_study(
    planned: "Study", folder: Path, stop_after: float | None, lang: str, show: bool = True
) -> "StudyResult":
    """Make the runs of a study that are missing, and write its report."""
    from oelm.study.conduct import ProgressView, conduct

    with ProgressView(show) as view:
        progress = conduct(planned, folder, stop_after, view.show)
    result = report(folder, lang=lang)
    result.failed.update({name: str(reason) for name, reason in progress.failed.items()})
    result.measured = any(setting.tests for setting in progress.settings)
    return result


def report(folder: PathLike, *, lang: str = "en") -> "StudyResult":
    """Report on a study, or on any folder with runs, as `oelm report`: report.md and report.html in it."""
    from oelm.study.report import write_report
    from oelm.study.study_result import StudyResult

    return StudyResult(Path(folder), write_report(Path(folder), lang), lang)
