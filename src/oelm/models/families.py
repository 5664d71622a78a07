"""Where Q, K, V, O and the feed-forward network live in each architecture: a table, and its reader.

To support another architecture, add a row under its `config.model_type`:

    oelm.FAMILIES["my-bert"] = oelm.Family(
        attentions=(oelm.Attention("encoder.layer.*.attn", q="query", k="key", v="value", o="out"),),
        ffn_in=("encoder.layer.*.up",),
        ffn_out=("encoder.layer.*.down",),
    )

`*` stands for the layer's number; paths are relative to the base model. No code needs to change.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oelm.errors import UserError
from oelm.method import Method, only_below, select_layers
from oelm.models.fused import PARTS, SplitQKV, as_linear, part_view


@dataclass(frozen=True)
class Attention:
    """One attention of every layer of a stack: `at` is the layer, the others are paths below it."""

    at: str
    q: str = ""
    k: str = ""
    v: str = ""
    o: str = ""
    qkv: str = ""  # a fused matrix instead of q, k and v
    layout: str = "concat"  # how it is fused: see fused.part_view
    heads: str = "num_attention_heads"  # fields of the model's config
    kv_heads: str = ""


@dataclass(frozen=True)
class Family:
    """One architecture. `score_scale` is what its attention multiplies q.k by; None: read it off the
    attention module, or 1/sqrt(head_dim) where that has no `scaling`."""

    attentions: tuple[Attention, ...]
    ffn_in: tuple[str, ...]
    ffn_out: tuple[str, ...]
    score_scale: float | None = None
    below: tuple[str, ...] = ("embeddings",)  # modules below all layers: the embeddings and a norm of theirs
    head: tuple[str, ...] = ("pooler",)  # modules of the base model that belong to the task's head


def _bert_attention(at: str) -> Attention:
    return Attention(at, q="self.query", k="self.key", v="self.value", o="output.dense")


def _bart_attention(at: str, stack: str) -> Attention:
    return Attention(at, q="q_proj", k="k_proj", v="v_proj", o="out_proj", heads=f"{stack}_attention_heads")


_BERT = Family(
    attentions=(
        _bert_attention("encoder.layer.*.attention"),
        _bert_attention("encoder.layer.*.crossattention"),
    ),
    ffn_in=("encoder.layer.*.intermediate.dense",),
    ffn_out=("encoder.layer.*.output.dense",),
)
_LLAMA = Family(
    attentions=(
        Attention(
            "layers.*.self_attn",
            q="q_proj",
            k="k_proj",
            v="v_proj",
            o="o_proj",
            kv_heads="num_key_value_heads",
        ),
    ),
    ffn_in=("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
    ffn_out=("layers.*.mlp.down_proj",),
)

FAMILIES: dict[str, Family] = {
    "oelm-gpt": Family(
        attentions=(Attention("h.*.attn", q="q_proj", k="k_proj", v="v_proj", o="o_proj"),),
        ffn_in=("h.*.mlp.fc_in",),
        ffn_out=("h.*.mlp.fc_out",),
    ),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "distilbert": Family(
        attentions=(
            Attention("transformer.layer.*.attention", q="q_lin", k="k_lin", v="v_lin", o="out_lin"),
        ),
        ffn_in=("transformer.layer.*.ffn.lin1",),
        ffn_out=("transformer.layer.*.ffn.lin2",),
    ),
    "modernbert": Family(
        attentions=(Attention("layers.*.attn", qkv="Wqkv", o="Wo"),),
        ffn_in=("layers.*.mlp.Wi",),
        ffn_out=("layers.*.mlp.Wo",),
    ),
    "gpt2": Family(
        attentions=(Attention("h.*.attn", qkv="c_attn", o="c_proj"),),
        ffn_in=("h.*.mlp.c_fc",),
        ffn_out=("h.*.mlp.c_proj",),
    ),
    "gpt_neox": Family(
        attentions=(Attention("layers.*.attention", qkv="query_key_value", layout="per-head", o="dense"),),
        ffn_in=("layers.*.mlp.dense_h_to_4h",),
        ffn_out=("layers.*.mlp.dense_4h_to_h",),
    ),
    "t5": Family(
        attentions=(
            Attention("encoder.block.*.layer.0.SelfAttention", q="q", k="k", v="v", o="o"),
            Attention("decoder.block.*.layer.0.SelfAttention", q="q", k="k", v="v", o="o"),
            Attention("decoder.block.*.layer.1.EncDecAttention", q="q", k="k", v="v", o="o"),
        ),
        ffn_in=(
            "encoder.block.*.layer.1.DenseReluDense.wi",
            "encoder.block.*.layer.1.DenseReluDense.wi_0",
            "encoder.block.*.layer.1.DenseReluDense.wi_1",
            "decoder.block.*.layer.2.DenseReluDense.wi",
            "decoder.block.*.layer.2.DenseReluDense.wi_0",
            "decoder.block.*.layer.2.DenseReluDense.wi_1",
        ),
        ffn_out=(
            "encoder.block.*.layer.1.DenseReluDense.wo",
            "decoder.block.*.layer.2.DenseReluDense.wo",
        ),
        score_scale=1.0,
    ),
    "bart": Family(
        attentions=(
            _bart_attention("encoder.layers.*.self_attn", "encoder"),
            _bart_attention("decoder.layers.*.self_attn", "decoder"),
            _bart_attention("decoder.layers.*.encoder_attn", "decoder"),
        ),
        ffn_in=("encoder.layers.*.fc1", "decoder.layers.*.fc1"),
        ffn_out=("encoder.layers.*.fc2", "decoder.layers.*.fc2"),
        below=("encoder.layernorm_embedding", "decoder.layernorm_embedding"),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


@dataclass
class Site:
    """One projection of one layer, found in a model. A fused matrix that is not split makes three sites."""

    role: str
    layer: int
    num_layers: int
    path: str  # the module's full name in this model
    name: str  # its weight's name relative to the base model: what random draws are keyed by
    module: nn.Module
    heads: int = 1
    part: int | None = None  # of a fused, unsplit matrix
    split: bool = False  # a part of one that was fused
    layout: str = "concat"
    score_scale: float = 1.0

    @property
    def weight(self) -> Tensor:
        """The weight in `nn.Linear`'s layout, (out, in); for a fused part, a copy-free view or a copy."""
        view = self._view(as_linear(self.module))
        return view.reshape(-1, view.shape[-1])

    @property
    def bias(self) -> Tensor | None:
        bias = getattr(self.module, "bias", None)
        return None if bias is None else self._view(bias).reshape(-1)

    @property
    def attention(self) -> str:
        """The module that calls this projection: the same for q and k of one attention."""
        holder = self.path.removesuffix(".base_layer").rpartition(".")[0]
        return holder.rpartition(".")[0] if self.split else holder

    @property
    def head_dim(self) -> int:
        return self.weight.shape[0] // self.heads

    @property
    def parameters(self) -> int:
        weight = self.weight
        return weight.numel() + (weight.shape[0] if getattr(self.module, "bias", None) is not None else 0)

    def write(self, weight: Tensor) -> None:
        view = self._view(as_linear(self.module).data)
        view.copy_(weight.reshape(view.shape))

    def zero_bias(self) -> None:
        bias = getattr(self.module, "bias", None)
        if bias is not None:
            self._view(bias.data).zero_()  # not `self.bias`, which may be a copy

    def _view(self, tensor: Tensor) -> Tensor:
        return tensor if self.part is None else part_view(tensor, self.part, self.heads, self.layout)


def family_of(model: nn.Module) -> Family:
    """The table's row for a model, or an error that says which rows there are and how to add one."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None or isinstance(model, nn.DataParallel) or "_orig_mod" in model._modules:
        raise UserError(
            f"{type(model).__name__} is not a plain Hugging Face model; "
            "if it is wrapped (DDP, torch.compile, PEFT), convert it before wrapping"
        )
    return family_row(model_type)


def family_row(model_type: str) -> Family:
    """The table's row for a `config.model_type`."""
    if model_type not in FAMILIES:
        raise UserError(
            f"no table row for architecture {model_type!r}; supported: {', '.join(FAMILIES)}. To add one: "
            f'oelm.FAMILIES["{model_type}"] = oelm.Family(...), as described in oelm/families.py'
        )
    return FAMILIES[model_type]


def find_sites(model: nn.Module) -> list[Site]:
    """Every projection the table names, in the order of the table."""
    family = family_of(model)
    modules = {_relative(model, path): (path, module) for path, module in model.named_modules()}
    sites: list[Site] = []
    for attention in family.attentions:
        sites += _attention_sites(model, family, attention, modules)
    for role, patterns in (("ffn_in", family.ffn_in), ("ffn_out", family.ffn_out)):
        for pattern in patterns:
            found = _match(pattern, modules)
            sites += [
                Site(role, layer, len(found), modules[key][0], f"{key}.weight", modules[key][1])
                for layer, key in found
            ]
    roles = {site.role for site in sites}
    if not {"q", "k"} <= roles:
        raise UserError(
            f"found no query and key projections in this {type(model).__name__}: its row does not fit"
        )
    for site in sites:
        if not isinstance(site.module, nn.Linear | Conv1D):
            raise UserError(f"{site.path} is a {type(site.module).__name__}, not a plain linear layer")
    return sites


def _attention_sites(
    model: nn.Module, family: Family, attention: Attention, modules: dict[str, tuple[str, nn.Module]]
) -> Iterator[Site]:
    config = model.config
    for role in ("q", "k", "v", "o"):
        fused = attention.qkv and role in PARTS
        found = _match(f"{attention.at}.{attention.qkv if fused else getattr(attention, role)}", modules)
        if not found:
            continue
        heads = getattr(config, attention.heads)
        if role in ("k", "v") and attention.kv_heads:
            heads = getattr(config, attention.kv_heads) or heads
            if fused and heads != getattr(config, attention.heads):
                raise UserError(
                    f"{found[0][1]} fuses queries with fewer key heads, which the table cannot describe"
                )
        for layer, key in found:
            projection, module = modules[key]
            path, name, part, split = projection, f"{key}.weight", None, False
            if isinstance(base := getattr(module, "base_layer", None), nn.Module):  # in an adapter: lora.py
                path, module = f"{path}.base_layer", base
            if fused:
                name = f"{key}.{role}.weight"
                if split := isinstance(module, SplitQKV):
                    path, module = f"{path}.{role}", getattr(module, role)
                else:
                    part = PARTS.index(role)
            site = Site(role, layer, len(found), path, name, module, heads, part, split, attention.layout)
            if role in ("q", "k"):
                site.score_scale = _score_scale(model, family, projection, site)
            yield site


def _score_scale(model: nn.Module, family: Family, projection: str, site: Site) -> float:
    if family.score_scale is not None:
        return family.score_scale
    scaling = getattr(model.get_submodule(projection.rpartition(".")[0]), "scaling", None)
    return float(scaling) if isinstance(scaling, int | float) else site.head_dim**-0.5


def _relative(model: nn.Module, path: str) -> str:
    prefix = getattr(model, "base_model_prefix", "") + "."
    return path.removeprefix(prefix)


def _match(pattern: str, modules: dict[str, tuple[str, nn.Module]]) -> list[tuple[int, str]]:
    regex = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    found = ((regex.fullmatch(key), key) for key in modules)
    return sorted((int(match[1]), key) for match, key in found if match)


def whole_model_roles(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Embeddings and norms by their paths, told by their class wherever they stand."""
    modules = {path: m for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
    return {
        "embeddings": {path: m for path, m in modules.items() if isinstance(m, nn.Embedding)},
        "norms": {path: m for path, m in modules.items() if "norm" in type(m).__name__.lower()},
    }


def frozen_names(model: nn.Module, method: Method) -> set[str]:
    """The full names of the parameters this method freezes in this model (fused matrices already split)."""
    frozen = [
        site.module
        for site in find_sites(model)
        if site.role in method.freeze
        and site.layer in select_layers(method.freeze[site.role], site.num_layers)
    ]
    for role, modules in whole_model_roles(model).items():
        if method.freeze.get(role) == "all":
            frozen += modules.values()
        elif role in method.freeze:
            frozen += _selected(model, modules, method.freeze[role])
    # A tied parameter has several names; `named_parameters` reports it under the first.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)] for module in frozen for p in module.parameters(recurse=False)}


def _selected(model: nn.Module, modules: dict[str, nn.Module], layers: str) -> list[nn.Module]:
    """The modules of these layers; those below all layers go with the first, and others without one train."""
    places = find_layers(model, modules)
    chosen = {depth: select_layers(layers, depth) for _, depth in places.values()}
    below = any(0 in chosen[depth] or only_below(layers, depth) for depth in chosen)
    return [
        module
        for path, module in modules.items()
        if ((place := places.get(path)) and place[0] in chosen[place[1]])
        or (not place and below and lies_in(model, path, family_of(model).below))
    ]


def find_layers(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Of every module or parameter in a layer: its number, and how many layers its stack has."""
    stacks = {attention.at.partition("*")[0] for attention in family_of(model).attentions}
    found = {}
    for name in names:
        path = _relative(model, name)
        for stack in stacks:
            if path.startswith(stack):
                found[name] = stack, int(path.removeprefix(stack).partition(".")[0])
    depths: dict[str, int] = {}
    for stack, layer in found.values():
        depths[stack] = max(depths.get(stack, 0), layer + 1)
    return {name: (layer, depths[stack]) for name, (stack, layer) in found.items()}


def lies_in(model: nn.Module, name: str, parts: tuple[str, ...]) -> bool:
    """Whether a module or parameter is, or belongs to, one of these modules of the base model."""
    return f"{_relative(model, name)}.".startswith(tuple(f"{part}." for part in parts))


def block_gain(site: Site, method: Method, blocks: np.ndarray) -> np.ndarray:
    """What each head's unit-scale block of q or k is multiplied by, (heads,).

    "own" is the spectral norm of the head's block in `blocks`, so that a head keeps the scale it had. For
    the family's gain the queries carry all of it, as T5's own start does, so that a method that sets only
    one of the two still gives scores of standard deviation 1.
    """
    if method.gain == "own":
        return np.linalg.norm(blocks, ord=2, axis=(1, 2))
    gain = method.gain
    if gain == "family":
        gain = 1.0 / (site.score_scale * site.head_dim**0.5) if site.role == "q" else 1.0
    return np.full(len(blocks), float(gain))
