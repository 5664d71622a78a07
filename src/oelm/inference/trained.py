"""A trained model, from a run's folder or any saved model: predict, evaluate, generate, audit."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from oelm.audit import Audit, Fingerprint, audit
from oelm.config import RunConfig, TaskConfig
from oelm.convert import load
from oelm.data import TASKS, Store
from oelm.data.assemble import Layout
from oelm.data.tasks import KINDS, make_objective, task_kind
from oelm.data.tasks.base import Reader
from oelm.data.tasks.language_modeling import check_language_model
from oelm.data.tasks.seq2seq import TargetReader, writes_targets
from oelm.data.tokenizer import Encoder, boundary_id, load_tokenizer, pad_id
from oelm.errors import UserError
from oelm.inference.generation_quality import Writing, generation_quality
from oelm.inference.prediction import Counts, predict
from oelm.inference.zero_shot import make_question, read_items, zero_shot
from oelm.models.fit import agree_on_padding, positions_of, takes_segments
from oelm.models.gpt_sizes import PRESETS
from oelm.models.pretrained import load_as_saved, load_config
from oelm.models.starts import is_study
from oelm.system.files import read_object
from oelm.system.progress import Display
from oelm.training.evaluate import evaluate
from oelm.training.folder import read_config
from oelm.training.parallel import autocast_of, process_state
from oelm.training.resolve import check_tokenizer, choice_of, resolve_precision
from oelm.training.step import fast_forward

LONGEST = 1024  # tokens of a text or window, for a model without a run's configuration


class Trained:
    """A trained model with its tokenizer and, from a run's folder, the run's configuration."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.config: RunConfig | None = read_config(path) if (path / "config.toml").is_file() else None
        self.folder = path / "model" if self.config is not None else path
        self.run = path if self.config is not None else None
        if not (self.folder / "config.json").is_file():
            what = _no_model(path, self.config) if self.config else "is neither a run nor a saved model"
            if is_study(path):
                what = f"is a study: name one of its runs, below {path / 'runs'}"
            raise UserError(f"{path} {what}")
        self.device = process_state().device
        disable_progress_bar()  # loading takes a moment only
        loads = load if getattr(load_config(str(self.folder)), "oelm", None) else load_as_saved
        self.model: Any = loads(str(self.folder), dtype=torch.float32).to(self.device).eval()
        self.tokenizer = load_tokenizer(str(self.folder))

    @property
    def max_length(self) -> int:
        if self.config is not None:
            return self.config.task.max_length
        positions = positions_of(self.model.config) or 512
        return min(LONGEST, positions, int(self.tokenizer.model_max_length))

    @property
    def precision(self) -> str:
        """The run's precision or, for a saved model, the best one for this device."""
        wanted = "auto" if self.config is None else self.config.training.precision
        return resolve_precision(wanted, self.device)[0]

    @property
    def writes(self) -> bool:
        """Whether the model is an encoder-decoder that generates a target for a source."""
        return writes_targets(self.model)

    @cached_property
    def reader(self) -> Reader:
        """The `Reader` by which this kind of model answers lines."""
        agree_on_padding(self.model, self.tokenizer)
        return reader_of(self.model)(self.model, self.tokenizer, self.max_length)

    def predict(
        self, lines: Iterable[str | None], say: Callable[[str], None] = lambda text: None
    ) -> Iterator[dict[str, Any]]:
        """For each line this kind of model's answer: a label, a number, tags, an answer or a target; None
        values for an empty line. For models of pairs, or questions, a line is two texts with a tab between.

        Lines are answered many at a time, and at once when the input pauses, which a None among the lines
        marks. If a line cannot be read, all before it are answered first. At the end `say` gets the numbers
        of empty lines and of lines that were cut.
        """
        counts = Counts()
        refused: UserError | None = None
        try:
            yield from predict(self.reader, lines, self.precision, counts)
        except UserError as error:
            refused = error
        if counts.empty:
            say(f"{counts.empty} of {counts.done} lines said nothing; their answers are null")
        if counts.cut:
            say(f"{counts.cut} of {counts.done} lines were cut: this model reads {self.max_length} tokens")
        if refused is not None:
            raise refused

    def store(self, changes: dict[str, Any]) -> Store:
        """The run's data, or other data read the same way, prepared with the model's own tokenizer."""
        task = self.config.task if self.config is not None else TaskConfig()
        if "name" in changes or "data" in changes:
            other = ("name", "data", "test_file", "train_size", "train_on")
            changes = dict.fromkeys(other) | {"hold_out": True} | changes
            known = getattr(self.model.config, "task_kind", None)
            if changes["data"] and not task.kind and known:
                changes = {"kind": known} | changes  # in training, the kind may have followed from the file
        if changes.get("name"):  # a task has its own columns
            own = ("text", "label", "text_pair", "target", "kind", "metric")
            changes = {name: getattr(TaskConfig, name) for name in own} | changes
        task = replace(task, **changes)
        store = replace(choice_of(task, None), tokenizer=str(self.folder)).store(show_progress=True)
        check_tokenizer(store, self.tokenizer, str(self.folder))
        return store

    def evaluate(self, split: str, show: bool = False, **changes: Any) -> dict[str, Any]:
        """The metrics of a split of the run's data, or of other data: `name=`, `data=`, `test_file=`.

        `show`: progress on stderr.
        """
        store = self.store(changes)
        items = len(store[split])
        task_kind(store.kind).check_model(self.model, str(self.folder), store.task)
        agree_on_padding(self.model, self.tokenizer)
        objective = make_objective(store, changes.get("max_length", self.max_length))
        if store.label_names:
            known = [self.model.config.id2label[i] for i in range(self.model.config.num_labels)]
            if store.label_names != known:
                raise UserError(f"the data has the labels {store.label_names}, the model {known}")
        autocast = autocast_of(self.precision, self.device)
        with (
            contextlib.closing(Display(split, 0, 0, show, unit="batch")) as display,
            fast_forward(self.model, self.precision) as packs,
        ):
            packed = packs and objective.kind.packable
            layout = Layout(packed=packed, segments=takes_segments(self.model))
            measured = evaluate(self.model, objective, split, autocast, layout, display.advance_to)
        answer = {"task": store.task, "split": split, "items": items, "metrics": measured.metrics}
        return answer | ({"labels": store.label_names} if store.label_names else {})

    def generation(self, split: str, writing: Writing, **changes: Any) -> dict[str, Any]:
        """`generation_quality` of a language model on the texts of a corpus."""
        store = self.store(changes)
        if not task_kind(store.kind).stream:
            raise UserError(f"--generation continues the texts of a corpus, and {store.task} is none")
        window = changes.get("max_length", self.max_length)
        return generation_quality(self.model, self.tokenizer, store[split], window, writing)

    def zero_shot(
        self, data: str, split: str, template: str, labels: str | None = None, limit: int | None = None,
        seed: int = 0, **columns: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """`zero_shot` classification by a language model. `data` is a task's name, or a file with `columns`
        (`text=`, `text_pair=`, `label=`)."""
        check_language_model(self.model, "--zero-shot")
        known = data in TASKS
        task = TaskConfig(name=data if known else None, data=None if known else data, **columns)
        items = read_items(choice_of(task, None), split, limit, seed)
        question = make_question(template, labels, items.names, "text_pair" in items.texts[0])
        return zero_shot(self.model, self.tokenizer, items, *question, self.max_length) | {"split": split}

    @torch.no_grad()
    def generate(self, prompt: str, new_tokens: int, temperature: float, top_k: int, seed: int) -> str:
        """The prompt's continuation, or the target generated for it; at temperature 0 by the most likely
        tokens."""
        if new_tokens < 1 or not 0 <= temperature < math.inf or top_k < 1:
            raise UserError("--tokens and --top-k must be at least 1, --temperature must not be negative")
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise UserError("the prompt is not text in UTF-8")
        if not self.model.can_generate():
            raise UserError(f"{self.folder} does not write text: it is of class {type(self.model).__name__}")
        chosen: dict[str, Any] = {"do_sample": False}
        if temperature:
            chosen = {"do_sample": True, "temperature": temperature, "top_k": top_k}
        if self.writes:
            torch.manual_seed(seed)
            chosen["max_new_tokens"] = min(new_tokens, self._positions() - 1)  # one is the decoder's start
            if not prompt.strip():
                raise UserError("the prompt is empty: there is nothing to write from")
            reader = TargetReader(self.model, self.tokenizer, self.max_length, **chosen)
            (answer,) = predict(reader, [prompt], "fp32", Counts())
            return str(answer["target"])
        ids = torch.tensor([self._prompt_ids(prompt)], device=self.device)
        room = self._positions() - ids.shape[1]
        if room < 1:
            raise UserError(
                f"the prompt of {ids.shape[1]} tokens leaves no room for new ones: "
                f"the model knows texts of up to {self._positions()}"
            )
        torch.manual_seed(seed)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(new_tokens, room),
            pad_token_id=pad_id(self.tokenizer),
            **chosen,
        )
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def _prompt_ids(self, prompt: str) -> list[int]:
        """A prompt encoded as a corpus is, without the special tokens that end a text, as text follows. If
        the tokenizer adds a beginning-of-text token (Llama), so does the prompt; an empty prompt always has
        one."""
        encoder, bos = Encoder(self.tokenizer, 1 << 30), self.tokenizer.bos_token_id
        ids = [*(i for i in encoder.single[0] if i == bos), *encoder.ids([prompt])[0]]
        return ids or [boundary_id(self.tokenizer) if bos is None else bos]

    def _positions(self) -> int:
        """The maximum length of a text. Learned positions beyond the training windows are still random."""
        most = positions_of(self.model.config) or 1 << 30
        started_here = self.config is not None and self.config.model.name in PRESETS
        if started_here and self.model.config.positions == "learned":
            return min(most, self.max_length)
        return most

    def audit(self) -> Audit:
        """Check the saved model against the fingerprint taken before the run's first step."""
        if self.run is None:
            return audit(self.model)
        path = self.run / "freeze_audit.json"
        try:
            recorded = Fingerprint.from_dict(read_object(path)["fingerprint"])
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{path} is damaged: it holds no fingerprint to compare with") from None
        return audit(self.model, recorded)


def _no_model(run: Path, config: RunConfig) -> str:
    """Why a run's folder has no model."""
    results = read_object(run / "results.json") if (run / "results.json").exists() else {}
    if results.get("status") == "failed":
        return "is a run that failed: it holds no model; oelm status says why"
    if results.get("status") != "completed":
        return "has not finished: it holds no model yet"
    if not config.training.test:
        return "is completed, but with training.test = false, as for the choice of a rate, no model is saved"
    return "is completed, but its model was not kept: study.models says which are (best, all or none)"


def reader_of(model: Any) -> type[Reader]:
    """The reader for a model: of the task kind in its config or, for a checkpoint that was not trained here,
    of the kind that its class fits."""
    name = getattr(model.config, "task_kind", None)
    kinds = [task_kind(name)] if name else [kind for kind in KINDS.values() if kind.fits(model)]
    for kind in kinds:
        if kind.reader is not None:
            return kind.reader
    raise UserError(f"{type(model).__name__} predicts nothing of texts; `oelm generate` lets a model write")
