"""What all parts of a report share: texts, names, colours, and the format of scores and differences."""

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from oelm.errors import UserError
from oelm.study.catalogue import Experiment, differences, list_experiments
from oelm.study.record_checks import is_number
from oelm.study.records import Record, mean_of
from oelm.study.report import numbers
from oelm.study.result_types import Analysis, ArmResult, Comparison, Group
from oelm.system.messages import LANGUAGES, fill, read_sentences, sentences


@cache
def table() -> dict[str, dict[str, str]]:
    """Key -> language -> text: the report's own words, and those of notices."""
    text = (files("oelm.study.report") / "words.toml").read_text(encoding="utf-8")
    return sentences() | read_sentences(text)


class Words:
    """The texts of one language. Values are inserted unescaped, as the templates escape them. `level` is that
    of a study's intervals."""

    def __init__(self, lang: str, level: float = 0.95) -> None:
        if lang not in LANGUAGES:
            raise UserError(f"there is no report in {lang!r}; languages: {', '.join(LANGUAGES)}")
        self.lang, self.level = lang, level

    def __call__(self, key: str, **values: Any) -> str:
        return fill(table()[key][self.lang], {"level": f"{100 * self.level:g} %", **values}, self.lang)

    def name(self, kind: str, raw: str) -> str:
        """What a metric, a trivial baseline or a split is called; itself where the table does not know it."""
        known = table().get(f"{kind}.{raw}")
        return known[self.lang] if known else raw

    def items(self, several: Iterable[str]) -> str:
        return self("list.comma").join(several)

    def range(self, low: str, high: str) -> str:
        return self("list.range", low=low, high=high)


class View:
    """An analysis in one language."""

    def __init__(self, analysis: Analysis, words: Words) -> None:
        self.analysis, self.words = analysis, Words(words.lang, analysis.level)

    @cached_property
    def colours(self) -> dict[str, int]:
        """Method -> the number of its colour in every figure and table."""
        names = dict.fromkeys(method for group in self.analysis.groups for method in group.arms)
        return {name: index for index, name in enumerate(names)}

    @cached_property
    def labels(self) -> dict[str, str]:
        """Setting -> its label: the task, and whatever distinguishes it from the others."""
        groups = self.analysis.groups
        several = len({group.model for group in groups}) > 1
        names = {g.setting: f"{task_name(g)}, {g.model}" if several else task_name(g) for g in groups}
        labels = {}
        for group in groups:
            name = names[group.setting]
            alike = [other for other in groups if names[other.setting] == name]
            if len(alike) > 1:
                name = f"{name} ({_distinction(group, alike, self.words)})"
            labels[group.setting] = name
        return labels

    def label(self, group: Group) -> str:
        return self.labels[group.setting]

    def title(self, group: Group) -> str:
        """The label, if there is another setting to tell it from."""
        return self.label(group) if len(self.analysis.groups) > 1 else ""

    def with_detail(self, text: str, detail: str) -> str:
        """The text with a detail in brackets, if there is one."""
        return self.words("list.with", name=text, detail=detail) if detail.strip(numbers.NOTHING) else text

    def metric(self, group: Group) -> str:
        return self.words.name("metric", group.metric)

    def unit(self, group: Group, amount: str = "") -> str:
        """The unit of differences: points or per cent."""
        if group.kind == "perplexity":
            return "%"
        return self.words("unit.point" if amount in ("1", "1.0") else "unit.points")

    def amount(self, group: Group, text: str) -> str:
        """A difference with its unit."""
        return self.words("unit.amount", amount=text, unit=self.unit(group, text))

    def value(self, group: Group, value: float | None, digits: int = 1) -> str:
        """A score in a table: per cent, or a perplexity."""
        if group.kind == "share":
            return numbers.fixed(None if value is None else 100 * value, digits)
        # Perplexities of early steps are large and need no decimals.
        return numbers.fixed(value, 0 if value is not None and value >= 1000 else digits + 1)

    def bits(self, records: Sequence[Record], part: str = "test") -> str:
        """Mean bits per byte on the test split ("test") or of the best evaluation ("best")."""
        return numbers.fixed(mean_of(records, part, "metrics", "bits_per_byte"), 3)

    def digits(self, comparison: Comparison) -> int:
        interval = comparison.combined and comparison.group.shown_interval(comparison.combined)
        return numbers.digits_for(interval.low, interval.high) if interval else 1

    def span(self, low: float | None, high: float | None, digits: int) -> str:
        """An interval of differences."""
        if low is None or high is None:
            return numbers.NOTHING
        return self.words.range(numbers.signed(low, digits), numbers.signed(high, digits))

    def differing(self, arm: ArmResult) -> str:
        """The settings of an arm in which the arms of the study differ besides their method."""
        study, run = self.analysis.study, next(iter((*arm.records, *arm.trials)), None)
        keys = [key.split(".") for key in study.differs_in] if study and run else []
        values = {name: getattr(getattr(run.config, table), name) for table, name in keys if run}
        texts = {name: f"{value:g}" if is_number(value) else str(value) for name, value in values.items()}
        return self.words.items(f"{name} {text}" for name, text in texts.items() if text != "None")

    def verdict(self, comparison: Comparison) -> str:
        text = self.words(f"verdict.{comparison.verdict}")
        return self.with_detail(text, self.words("verdict.small") if comparison.small_difference else "")

    def differs(self, experiment: Experiment, group: Group) -> list[str]:
        """The keys in which the setting's runs differ from a published recipe, apart from method and seed."""
        left_out = ("method", "training.seed", "training.test", "training.lr")
        record = next((r for arm in group.arms.values() for r in (*arm.records, *arm.trials)), None)
        keys = differences(experiment, record.config, record.results) if record else []
        return [key for key in keys if not key.startswith(left_out)]

    def published(self, group: Group) -> list[tuple[Experiment, float]]:
        """The published experiments on this task with this model, or that a run's config is made from, and
        their figure for the setting's metric."""
        pairs, ids = [], {record.results.get("experiment") for record in group.records}
        for experiment in list_experiments():
            config, figures = experiment.config, experiment.published
            value = figures.get(group.metric, figures.get(f"best_{group.metric}"))
            same = (config["task"]["name"], config["model"]["name"]) == (group.task, group.model)
            if value is not None and (experiment.id in ids or (same and experiment.variant_of is None)):
                pairs.append((experiment, float(value)))
        return pairs


def task_name(group: Group) -> str:
    """The task, or the name of a user's data file: `my.csv` is clearer than the task `my`."""
    data = group.records[0].config.task.data if group.records else None
    file = Path(data).name if data else ""
    return file if Path(file).stem == group.task else group.task


def _distinction(group: Group, alike: list[Group], words: Words) -> str:
    """The keys of the config that distinguish a group from others of its task: `dropout=0.1`."""
    configs, config = [_settings(other) for other in alike], _settings(group)
    keys = dict.fromkeys(key for values in configs for key in values)
    differing = [key for key in keys if len({str(values.get(key)) for values in configs}) > 1]
    texts = [f"{key.split('.')[-1]}={config.get(key, words('list.default'))}" for key in differing]
    return words.items(texts) or group.setting[:6]


def _settings(group: Group) -> dict[str, Any]:
    flat: dict[str, Any] = {"precision": group.precision}
    values = group.records[0].config.identity() if group.records else {}
    for section in ("task", "model", "training"):
        for key, value in values.get(section, {}).items():
            if key not in ("lr", "seed", "test", "precision", "data"):
                flat[f"{section}.{key}"] = value
    return flat
