"""Methods: how the projections are initialised, and which parameters are frozen when. Presets are data; this
module needs no model."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from oelm.errors import UserError
from oelm.models.freeze_schedule import FreezeSchedule
from oelm.orthogonal import KINDS
from oelm.system.plugins import Registry

PROJECTIONS = ("q", "k", "v", "o", "ffn_in", "ffn_out")
BLOCKS = (*PROJECTIONS, "norms")  # the roles in a layer, together "blocks" in `freeze`
ROLES = (*BLOCKS, "embeddings")
HEAD_ROLES = ("q", "k")  # initialised head by head; the others as one block
START_ROLES = (*HEAD_ROLES, "ffn_in", "ffn_out")
INITS = ("auto", "fresh", "own")
SCORES = ("differentiable", "constant")
GAINS = ("family", "own")  # besides numbers
QK_SCALES = {"none": "", "head": "head", "dimension": "head dimension"}  # the unit that has its own factor
# The whole of which freeze_ratio is a share.
RATIO_OF = {"all": "all parameters", "blocks": "the layers' weight matrices"}


@dataclass(frozen=True)
class Method:
    """How a model is prepared for training.

    start   role -> kind of block it starts from: one of `orthogonal.KINDS`, or "polar", the polar factor of
            the weight it has. A role that is not named keeps its weight.
    init    where "orthogonal" blocks come from: "fresh" draws them, "own" takes the Q factor of each head's
            own block, and "auto" is "fresh" for a reference GPT from scratch, "own" for every other model.
    gain    multiplies unit-scale blocks of q and k. "family" gives scores of standard deviation 1
            in the architecture's own attention: 1 nearly everywhere, 1/sqrt(head_dim) on T5's queries.
            "own" gives each head the spectral norm its block had.
    freeze  role -> the layers whose parameters are frozen, throughout or as `freeze_schedule` says: "all",
            "first:4", "last:2", "even" (the layers 0, 2, ...), "odd", a list such as "0,3,5" or [0, 3, 5], or
            a slice as in Python: ":-2" (all but the last two). "blocks" stands for every role of a layer that
            is not named itself.
    scores  "differentiable": gradients flow through the attention scores, even of frozen q and k, to the
            layers below. "constant": none flows.
    lora    the rank of low-rank adapters beside frozen q and v, by PEFT; 0: none.

    What is learned beside q and k where they are frozen (see `oelm.models.learned`):
    qk_scale  "head": a factor of each head's scores, the inverse of a temperature; "dimension": a factor of
              each head dimension, W_Q diag(s) W_K'; "none". Factors start at 1 and are never decayed.
    qk_lora   the rank of low-rank adapters on q and k; 0: none.

    freeze_ratio     in place of `freeze`: at most this share of `freeze_ratio_of` is frozen, q and k first,
                     then the feed-forward weights (see `oelm.models.freeze_ratio`). Only what is frozen
                     starts as `start` says, by default orthonormal. `convert` fills in `freeze` and `start`.
    freeze_ratio_of  "all" parameters, or "blocks": the layers' weight matrices.
    freeze_schedule  when what `freeze` names is frozen, a table: see `oelm.models.freeze_schedule`. Empty:
                     from the start to the end.
    """

    name: str = "custom"
    start: Mapping[str, str] = field(default_factory=dict)
    init: str = "auto"
    gain: float | str = "family"
    freeze: Mapping[str, str] = field(default_factory=dict)
    scores: str = "differentiable"
    lora: int = 0
    qk_scale: str = "none"
    qk_lora: int = 0
    freeze_ratio: float | None = None
    freeze_ratio_of: str = "all"
    freeze_schedule: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "freeze", spell_layers(self.freeze))
        for name in ("start", "freeze"):
            table = getattr(self, name)
            if not isinstance(table, Mapping) or not all(isinstance(v, str) for v in table.values()):
                raise UserError(f"{name} maps roles to words, for example {{'q': 'all'}}, not {table!r}")
        if "blocks" in self.freeze:
            rest = {role: layers for role, layers in self.freeze.items() if role != "blocks"}
            object.__setattr__(self, "freeze", dict.fromkeys(BLOCKS, self.freeze["blocks"]) | rest)
        for role, kind in self.start.items():
            _known(role, START_ROLES, "role that can be initialised")
            _known(kind, (*KINDS, "polar"), "kind of block")
            if role not in HEAD_ROLES and kind != "orthogonal":
                raise UserError(f"{role} can start as 'orthogonal' only, not {kind!r}")
        for role, layers in self.freeze.items():
            _known(role, (*ROLES, "blocks"), "role")
            select_layers(layers, 1)
            if role == "embeddings" and layers != "all":
                raise UserError(f"{role} belong to no layer: use 'all', not {layers!r}")
        _known(self.init, INITS, "init")
        _known(self.scores, SCORES, "kind of scores")
        if self.scores == "constant" and any(self.freeze.get(role) != "all" for role in HEAD_ROLES):
            raise UserError("scores = 'constant' gives q and k no gradient: freeze both in all layers")
        for name in ("lora", "qk_lora"):
            rank = getattr(self, name)
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                raise UserError(
                    f"{name} is the rank of the adapters, a whole number of at least 0, not {rank!r}"
                )
        if self.lora and any(self.freeze.get(role) != "all" for role in ("q", "k", "v")):
            raise UserError("lora adapts frozen projections: freeze q, k and v in all layers")
        if "polar" in self.start.values() and self.init == "fresh":
            raise UserError("'polar' uses the weights that the model has, which init = 'fresh' contradicts")
        if self.gain not in GAINS and not _is_positive(self.gain):
            raise UserError(f"gain must be a positive number, 'family' or 'own', not {self.gain!r}")
        self._check_learned()
        self._check_ratio()
        self._check_schedule()

    @cached_property
    def schedule(self) -> FreezeSchedule | None:
        """When what `freeze` names is frozen; None: from the start to the end."""
        return FreezeSchedule.from_dict(self.freeze_schedule) if self.freeze_schedule else None

    def _check_schedule(self) -> None:
        if not isinstance(self.freeze_schedule, Mapping):
            example = "for example {'unfreeze_at': 0.8}"
            raise UserError(f"freeze_schedule is a table, {example}, not {self.freeze_schedule!r}")
        if self.schedule is None:
            return
        if not self.freeze and self.freeze_ratio is None:
            raise UserError(f"freeze_schedule needs freeze: method {self.name} names nothing to freeze")
        if self.lora or self.learns or self.scores == "constant":
            raise UserError("freeze_schedule does not go with lora, qk_scale, qk_lora or scores = 'constant'")
        if self.schedule.polar and self.freeze_ratio is None and not {*HEAD_ROLES} & {*self.freeze}:
            raise UserError("freeze_schedule.polar makes q and k orthonormal: freeze one of them")

    def _check_learned(self) -> None:
        _known(self.qk_scale, tuple(QK_SCALES), "qk_scale")
        for name in ("qk_scale", "qk_lora"):
            if getattr(self, name) == getattr(Method, name):
                continue
            if "q" not in self.freeze and (name == "qk_scale" or "k" not in self.freeze):
                raise UserError(f"{name} is learned beside frozen projections: freeze q and k")
            if self.scores == "constant":
                raise UserError(f"{name} gets no gradient where scores = 'constant'")
            if self.lora:
                raise UserError(f"{name} and lora are both given; keep one")

    def _check_ratio(self) -> None:
        _known(self.freeze_ratio_of, tuple(RATIO_OF), "freeze_ratio_of")
        if self.freeze_ratio is None:
            if self.freeze_ratio_of != Method.freeze_ratio_of:
                raise UserError(f"freeze_ratio_of = {self.freeze_ratio_of!r} needs a freeze_ratio")
            return
        if not _is_positive(self.freeze_ratio) or self.freeze_ratio > 1:
            raise UserError(f"freeze_ratio must be above 0 and at most 1, not {self.freeze_ratio!r}")
        if others := [role for role in self.freeze if role not in START_ROLES]:
            raise UserError(
                f"freeze_ratio freezes {', '.join(START_ROLES)} only, but method {self.name} also freezes "
                f"{', '.join(others)}"
            )

    @property
    def learns(self) -> bool:
        """Whether anything is learned beside frozen q and k."""
        return self.qk_scale != "none" or self.qk_lora > 0

    def freezes(self, role: str, layer: int, num_layers: int) -> bool:
        """Whether a role's parameters in this layer of a stack of `num_layers` are frozen."""
        return role in self.freeze and layer in select_layers(self.freeze[role], num_layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, the inverse of `from_dict`. Keys added later are left out while they have their
        default, so that older records keep their identity."""
        values = {**asdict(self), "start": dict(self.start), "freeze": dict(self.freeze)}
        for name in ("scores", "lora", "qk_scale", "qk_lora", "freeze_ratio", "freeze_ratio_of"):
            if values[name] == getattr(Method, name):
                del values[name]
        if not self.freeze_schedule:
            del values["freeze_schedule"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Method":
        """A Method from its JSON form. With a preset's name the other keys override that preset, and the new
        method's name lists them."""
        for key in values:
            _known(key, tuple(f.name for f in fields(cls)), "field of a method")
        rest = {key: value for key, value in values.items() if key != "name"}
        if "freeze" in rest:
            rest["freeze"] = spell_layers(rest["freeze"])
        name = values.get("name", "custom")
        if rest and _canonical(name) not in PRESETS:
            return cls(**values)
        preset = get_method(name)
        changes = {key: value for key, value in rest.items() if value != getattr(preset, key)}
        if not changes:
            return preset
        words = ", ".join(f"{key}={_brief(value)}" for key, value in changes.items())
        return replace(preset, name=f"{preset.name} ({words})", **changes)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _known(value: Any, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise UserError(f"unknown {what} {value!r}; known: {', '.join(known)}")


def spell_layers(freeze: Any) -> Any:
    """`Method.freeze` with lists of layer numbers as words: [0, 3] is "0,3"."""
    if not isinstance(freeze, Mapping):
        return freeze
    return {
        role: ",".join(map(str, layers)) if isinstance(layers, list | tuple) and layers else layers
        for role, layers in freeze.items()
    }


def select_layers(selection: str, num_layers: int) -> set[int]:
    """The numbers of the selected layers in a stack of `num_layers`."""
    every = range(num_layers)
    selection = selection.replace(" ", "")
    if selection in (named := {"all": every, "even": every[::2], "odd": every[1::2]}):
        return set(named[selection])
    if match := re.fullmatch(r"(first|last):(\d+)", selection):
        count = int(match[2])
        return set(every[:count] if match[1] == "first" else every[max(0, num_layers - count) :])
    if re.fullmatch(r"(-?\d+)?:(-?\d+)?", selection) and selection != ":":
        start, stop = (int(part) if part else None for part in selection.split(":"))
        return set(every[start:stop])
    if re.fullmatch(r"-?\d+(,-?\d+)*", selection):
        # A number beyond the stack selects nothing, as a slice does.
        return {i % num_layers for i in map(int, selection.split(",")) if -num_layers <= i < num_layers}
    known = "'all', 'first:4', 'last:2', 'even', 'odd', '0,3,5' or ':-2'"
    raise UserError(f"{selection!r} does not select layers; use {known}")


def freezes_only_embeddings(selection: str, num_layers: int) -> bool:
    """Whether a selection is ":-n" in a model of n layers, which freezes only the embeddings."""
    return selection.replace(" ", "") == f":-{num_layers}"


_QK = {"q": "all", "k": "all"}
_FFN = {"ffn_in": "all", "ffn_out": "all"}
_PROJECTIONS = dict.fromkeys(PROJECTIONS, "all")
_TOP_DOWN = {"unfreeze_at": 0.8, "order": "top-down"}


def _start(kind: str, *roles: str) -> dict[str, str]:
    return dict.fromkeys(roles, kind)


_PRESETS = {
    method.name: method
    for method in (
        Method("baseline"),
        Method("frozen", freeze=_QK),
        Method("oelm", start=_start("orthogonal", "q", "k"), freeze=_QK),
        Method("oelm-fresh", start=_start("orthogonal", "q", "k"), init="fresh", freeze=_QK),
        Method("oelm-polar", start=_start("polar", "q", "k"), freeze=_QK),
        Method("oelm-polar-scaled", start=_start("polar", "q", "k"), gain="own", freeze=_QK),
        Method("oelm-value-only", start=_start("orthogonal", "q", "k"), freeze=_QK, scores="constant"),
        Method("oelm-temperature", start=_start("orthogonal", "q", "k"), freeze=_QK, qk_scale="head"),
        Method("oelm-scale", start=_start("orthogonal", "q", "k"), freeze=_QK, qk_scale="dimension"),
        Method("oelm-lora", start=_start("orthogonal", "q", "k"), freeze=_QK, qk_lora=8),
        Method("oelm-random", start=_start("normal", "q", "k"), freeze=_QK),
        Method("random-trainable", start=_start("normal", "q", "k")),
        Method("oelm-global", start=_start("global", "q", "k"), freeze=_QK),
        Method("oelm-global-trainable", start=_start("global", "q", "k")),
        Method("oelm-gaussian", start=_start("gaussian", "q", "k"), freeze=_QK),
        Method("gaussian-trainable", start=_start("gaussian", "q", "k")),
        Method("oelm-hadamard", start=_start("hadamard", "q", "k"), freeze=_QK),
        Method("oelm-trainable", start=_start("orthogonal", "q", "k")),
        Method("oelm-q-only", start=_start("orthogonal", "q"), freeze={"q": "all"}),
        Method("oelm-k-only", start=_start("orthogonal", "k"), freeze={"k": "all"}),
        Method("oelm-qk-ffn", start=_start("orthogonal", "q", "k", "ffn_in", "ffn_out"), freeze=_QK | _FFN),
        Method("oelm-ffn-only", start=_start("orthogonal", "ffn_in", "ffn_out"), freeze=_FFN),
        Method("linear-probe", freeze=_PROJECTIONS | {"embeddings": "all", "norms": "all"}),
        Method("norms-only", freeze=_PROJECTIONS | {"embeddings": "all"}),
        Method("lora", freeze=_PROJECTIONS | {"embeddings": "all", "norms": "all"}, lora=8),
        Method("oelm-unfreeze", start=_start("orthogonal", "q", "k"), freeze=_QK, freeze_schedule=_TOP_DOWN),
        Method("train-then-freeze", freeze=_QK, freeze_schedule={"freeze_at": 0.2, "polar": True}),
        Method("train-then-freeze-plain", freeze=_QK, freeze_schedule={"freeze_at": 0.2}),
        Method("top-1", freeze={"blocks": ":-1", "embeddings": "all"}),
        Method("top-2", freeze={"blocks": ":-2", "embeddings": "all"}),
    )
}
PRESETS: Registry[Method] = Registry("method", _PRESETS)

# The reports' names, in lower case and with '-' for '_' and ' '.
ALIASES = {
    "gpt": "baseline",
    "oelm-v2": "oelm",
    "oelm-freeze": "oelm",
    "oelm-qk": "oelm",
    "oelm-(old)": "oelm-global",
    "oelm-old": "oelm-global",
}


def _canonical(name: str) -> str:
    name = re.sub(r"[_\s]+", "-", str(name).strip().lower())
    return ALIASES.get(name, name)


def _brief(value: Any) -> str:
    return " ".join(f"{k}:{v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def get_method(method: "str | Method") -> Method:
    """A preset by its name or by a name the reports use; a Method is returned as it is."""
    if isinstance(method, Method):
        return method
    name = _canonical(method)
    if name not in PRESETS:
        raise UserError(f"unknown method {method!r}; known: {', '.join(PRESETS)}; also {', '.join(ALIASES)}")
    return PRESETS[name]
