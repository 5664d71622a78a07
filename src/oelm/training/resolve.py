"""Resolve a user's config to a run with nothing left open: first `prepare_data`, then `resolve_run`.

Both return new frozen objects, which nothing changes afterwards.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oelm.config import RunConfig, TaskConfig
from oelm.data import Choice, Plan, Store
from oelm.data.catalogue import get_task
from oelm.data.tasks import make_objective, task_kind
from oelm.data.tasks.base import Objective, TaskKind
from oelm.data.tokenizer import load_tokenizer
from oelm.errors import UserError
from oelm.method import Method
from oelm.models.build import check_gpt, default_model
from oelm.models.gpt_sizes import PRESETS, SIZES
from oelm.models.pretrained import check_checkpoint
from oelm.models.starts import any_start, model_folder
from oelm.system.files import read_object
from oelm.system.messages import Notice, notice
from oelm.system.terminal import say
from oelm.training.folder import read_config

# GPT-2's vocabulary is 93 % of the smallest model, and on a CPU nearly all of a language model's step.
SMALL, SMALL_TOKENIZER = "gpt-tiny", "train:8192"
EVALUATIONS = 10  # evaluations of a run by default, on the command line and in Python
UNBALANCED = 5  # ratio of the largest to the smallest class in training at which a note is made
LARGEST_SHARE = 0.75  # share of a language model's parameters in token embeddings, above which it gets a note
LARGEST_READ_SHARE = 0.9  # the same for a model that does not predict tokens
# Keys of a file's rows and columns, which a prepared dataset no longer has.
OF_PREPARATION = ("text", "text_pair", "label", "target", "train_size", "train_on", "test_file", "split_seed")


@dataclass(frozen=True)
class ResolvedRun:
    """A run with nothing left open, from which a step, a benchmark or an estimate is made."""

    config: RunConfig  # all defaults filled in
    device: torch.device
    processes: int
    precision: str  # fp32, bf16 or fp16
    plan: Plan  # the training batches
    total_steps: int
    warmup_steps: int
    warnings: tuple[Notice, ...]

    @property
    def eval_every(self) -> int:
        """Steps between evaluations; 0: at the end of every epoch."""
        return int(self.config.training.eval_every)


def resolve_run(
    config: RunConfig, objective: Objective, device: torch.device, processes: int = 1
) -> ResolvedRun:
    """Resolve a config for a prepared dataset (that of `objective`), a device and a number of processes.
    Raises UserError if it cannot run."""
    config = _with_model(config, device)
    training, store = config.training, objective.store
    precision, warning = resolve_precision(training.precision, device)
    plan = objective.plan("train", training.batch_size, training.batch_tokens, training.seed)
    plan.check(processes * training.accumulate)
    total = training.steps
    if total is None:  # a fraction of an epoch is a fraction of its batches
        full, rest = divmod(training.epochs or 0, 1)
        total = max(1, plan.steps(int(full)) + (round(rest * len(plan.epoch(int(full)))) if rest else 0))
    if any(not first < second for first, second in pairwise((0, *training.extended_from, total))):
        ends = ", ".join(f"{end:,}" for end in training.extended_from)
        raise UserError(f"training.extended_from: {ends} must be growing numbers of steps below {total:,}")
    if training.extended_from and Method.from_dict(config.method.overrides()).freeze_schedule:
        raise UserError(
            "a run whose method has a freeze_schedule cannot go on with more steps: what was frozen when "
            "would change; train it anew"
        )
    if training.eval_every == "auto":
        config = replace(
            config, training=replace(training, eval_every=_eval_interval(objective, plan, total))
        )
        training = config.training
    warmup = warmup_steps(training.warmup, total)
    warnings = [warning, *store.warnings, large_vocabulary(str(config.model.name), objective)]
    if training.fsdp and processes == 1:
        warnings.append(notice("training.one_process"))
    if 2 * warmup > total:
        warnings.append(notice("training.long_warmup", warmup=warmup, steps=total))
    if config.task.data:
        warnings.append(unbalanced(store))
    if training.extended_from:
        warnings.append(notice("training.extended", ends=list(training.extended_from), steps=total))
    warnings += start_warnings(str(config.model.name), objective.kind, config.task.max_length)
    if training.choose_on == "test":
        warnings.append(notice("training.chosen_on_test"))
    given_warnings = tuple(filter(None, warnings))
    return ResolvedRun(config, device, processes, precision, plan, total, warmup, given_warnings)


def _eval_interval(objective: Objective, plan: Plan, total: int) -> int:
    """Steps between evaluations: EVALUATIONS over the run, or fewer, so that they read at most twice as many
    items as training does; 0, once per epoch, for models that generate text at each evaluation."""
    if objective.kind.writes:
        return 0
    split = objective.plan("validation", 1, None, None) if "validation" in objective.store.splits else None
    share = len(split.lengths) / max(1, len(plan.lengths)) if split is not None else 0.0
    return max(1, math.ceil(total / EVALUATIONS), math.ceil(share * len(plan.epoch(0)) / 2))


def warmup_steps(warmup: float, total: int) -> int:
    """The number of warm-up steps: `training.warmup` or, if it is below 1, that share of all steps."""
    return int(warmup * total) if warmup < 1 else int(warmup)


def objective_of(config: RunConfig, store: Store) -> Objective:
    """The objective of a run on its prepared dataset."""
    training = config.training
    return make_objective(store, config.task.max_length, training.label_smoothing, training.class_weights)


def resolve_precision(wanted: str, device: torch.device) -> tuple[str, Notice | None]:
    """The precision that a run uses, and a warning if it is not the one in the config."""
    if wanted == "auto":
        return ("bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"), None
    if wanted == "fp16" and device.type != "cuda":
        return "fp32", notice("training.fp16_on_cpu")
    return wanted, None


def large_vocabulary(model: str, objective: Objective) -> Notice | None:
    """A note on a reference GPT whose parameters are mostly token embeddings: a language model then computes
    little else, and a classifier learns few of them from a small dataset."""
    if model not in SIZES:
        return None
    layers, width, _, positions = SIZES[model]
    tokens = objective.store.vocab_size
    share = tokens / (tokens + positions + 12 * layers * width)  # both times `width`; norms left out
    predicts = objective.kind.predicts_tokens
    if share <= (LARGEST_SHARE if predicts else LARGEST_READ_SHARE):
        return None
    code = "training.large_vocabulary" if predicts else "training.large_embedding"
    return notice(code, model=model, vocabulary=tokens, percent=round(100 * share))


def unbalanced(store: Store) -> Notice | None:
    """A note on classes so unbalanced that accuracy says little about the rare ones."""
    counts = store["train"].meta.get("class_counts") or [1]
    if store.metric != "accuracy" or max(counts) < UNBALANCED * min(counts):
        return None
    most, least = (store.label_names[int(at)] for at in (np.argmax(counts), np.argmin(counts)))
    return notice("training.unbalanced", most=most, least=least, largest=max(counts), smallest=min(counts))


def _with_model(config: RunConfig, device: torch.device) -> RunConfig:
    """The config with the name of its model: by default the device's, and of a run its model folder."""
    name = model_folder(config.model.name or default_model(device))
    return replace(config, model=replace(config.model, name=name))


def prepare_data(config: RunConfig, device: torch.device, show: bool) -> tuple[RunConfig, Store]:
    """The run's prepared dataset, and the config that names it, its tokenizer and its model."""
    config = _with_model(config, device)
    task, model = config.task, any_start(str(config.model.name))
    choice = choice_of(task, model)
    if show and model == SMALL and task.name and choice.tokenizer != task.tokenizer:
        say(f"note: {notice('training.small_tokenizer', model=model, tokenizer=choice.tokenizer)}", err=True)
    if config.training.choose_on != "test" and not choice.has_validation:
        raise UserError(
            f"{choice.data} has no validation split: it needs task.hold_out = true or, to repeat a published "
            "row, training.choose_on = 'test'"
        )
    if model not in PRESETS:
        try:
            check_checkpoint(model)  # before any data is prepared
        except UserError as error:
            if Path(model).exists():
                raise
            hint = "without a network, name a folder that holds the model and its tokenizer with --model"
            raise UserError(f"{str(error).rstrip('.')}; {hint}") from None
    store = choice.store(show_progress=show)
    if Path(choice.data) == store.folder:
        check_prepared(store, task)
        if model not in PRESETS:
            check_tokenizer(store, load_tokenizer(model), model)
        if not task_kind(store.kind).stream:
            task = replace(task, max_length=store.max_length)
    return replace(config, task=replace(task, tokenizer=store.meta["tokenizer"]["name"])), store


def start_warnings(name: str, kind: TaskKind, max_length: int) -> list[Notice]:
    """Warnings about the model that a run starts from, if this package trained it."""
    model = Path(any_start(name))
    config = model / "config.json"
    values = read_object(config) if config.is_file() else {}
    notes: list[Notice] = []
    if values.get("model_type") != "oelm-gpt":
        return notes
    if "OelmGPTForCausalLM" in (values.get("architectures") or []) and not kind.stream:
        notes.append(notice("training.was_causal", model=name))
    if values.get("positions", "learned") == "learned" and (model.parent / "config.toml").is_file():
        trained = read_config(model.parent).task.max_length
        if trained < max_length:
            values = {"model": name, "trained": trained, "max_length": max_length}
            notes.append(notice("training.new_positions", **values))
    return notes


def default_folder(config: RunConfig) -> Path:
    """The folder of a run for which none is given."""
    task, model = Path(str(config.task.name or config.task.data)), Path(config.model.name or "gpt")
    if model.name == "model" and (model.parent / "config.toml").is_file():
        model = model.parent  # the model of a run is named after the run
    parts = (task.stem, model.name, config.method.name, f"lr{config.training.lr:g}")
    return Path("runs", config.experiment or "-".join([*parts, f"s{config.training.seed}"]))


def choice_of(task: TaskConfig, model: str | None) -> Choice:
    """A run's `[task]` table as a choice of data. A pretrained model has its own tokenizer."""
    if bool(task.name) == bool(task.data):
        raise UserError("name one of task.name (--task) and task.data (--data)")
    if task.name:
        get_task(task.name)
    if model and model.startswith("gpt-") and model not in PRESETS and not Path(model).exists():
        raise UserError(f"unknown model {model!r}; known sizes: {', '.join(PRESETS)}")  # no hub id looks so
    if task.target and model in PRESETS:  # known before anything is prepared
        check_gpt(model, task_kind("seq2seq"))
    values = {key: value for key, value in vars(task).items() if key not in ("name", "data", "tokenizer")}
    tokenizer = task.tokenizer or (model if model and model not in PRESETS else None)
    if tokenizer is None and model == SMALL and task.name and task_kind(get_task(task.name).kind).stream:
        tokenizer = SMALL_TOKENIZER
    return Choice(str(task.name or task.data), **values, tokenizer=tokenizer)


def check_tokenizer(store: Store, tokenizer: Any, model: str) -> None:
    """Refuse a prepared dataset whose tokenizer is not the model's."""
    if store.tokenizer().get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{store.folder} was prepared with another tokenizer than that of {model}; prepare it again with "
            f"--tokenizer {model}"
        )


def check_prepared(store: Store, task: TaskConfig) -> None:
    """Refuse a config that does not fit the prepared dataset it names."""
    late = [name for name in OF_PREPARATION if getattr(task, name) != getattr(TaskConfig, name)]
    if not task.hold_out and "validation" in store.splits:
        late.append("hold_out")
    if late:
        raise UserError(
            f"{task.data} is prepared already: {' and '.join(late)} come{'s' * (len(late) == 1)} too late; "
            "leave out here what belongs to `oelm data prepare`"
        )
    stream = task_kind(store.kind).stream
    for what, has, wanted, default in (
        ("kind", store.kind, task.kind, None),
        ("metric", store.metric, task.metric, None),
        ("the tokenizer", store.meta["tokenizer"]["name"], task.tokenizer, None),
        ("max_length", store.max_length, None if stream else task.max_length, TaskConfig.max_length),
        ("max_target_length", store.max_target_length, task.max_target_length, None),
    ):
        if wanted not in (None, default, has):
            raise UserError(
                f"{task.data} was prepared with {what} {has}, not {wanted}; prepare it again, or leave it out"
            )
