"""Where Q, K, V, O and the feed-forward network are in each architecture: a table, and its reader.

To support another architecture, add a row under its `config.model_type`, in a plugin or in your own script:

    oelm.FAMILIES["my-bert"] = oelm.Family(
        attentions=(oelm.Attention("encoder.layer.*.attn", q="query", k="key", v="value", o="out"),),
        ffn_in=("encoder.layer.*.up",),
        ffn_out=("encoder.layer.*.down",),
        embedding_norms=("embeddings.norm",),
    )

`*` stands for the layer's number; paths are relative to the base model. No code needs to change.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import Conv1D

from oelm.errors import UserError
from oelm.method import HEAD_ROLES, Method, freezes_only_embeddings, select_layers
from oelm.models.fused import PARTS, SplitQKV, as_linear, part_view
from oelm.system.plugins import Registry
from oelm.system.private_peft import BASE_LAYER, base_layer
from oelm.system.private_torch import unwrap


@dataclass(frozen=True)
class Attention:
    """One attention of every layer of a stack: `at` is its path, the others are paths below that."""

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
    """One architecture.

    embedding_norms  norms that belong to the embeddings and not to a layer.
    positions        "absolute": a text has at most `config.max_position_embeddings` tokens; "after padding":
                     positions are numbered from the padding token's id on; "relative": there is no limit.
    score_scale      the factor of q.k in its attention; None: the `scaling` of the attention module, or
                     1/sqrt(head_dim) if it has none.
    """

    attentions: tuple[Attention, ...]
    ffn_in: tuple[str, ...]
    ffn_out: tuple[str, ...]
    embedding_norms: tuple[str, ...] = ()
    positions: str = "absolute"
    score_scale: float | None = None


_BERT_PARTS = ("self.query", "self.key", "self.value", "output.dense")
_PARTS = ("q_proj", "k_proj", "v_proj")
_DECODER = "decoder_attention_heads"

_BERT = Family(
    attentions=(
        Attention("encoder.layer.*.attention", *_BERT_PARTS),
        Attention("encoder.layer.*.crossattention", *_BERT_PARTS),
    ),
    ffn_in=("encoder.layer.*.intermediate.dense",),
    ffn_out=("encoder.layer.*.output.dense",),
    embedding_norms=("embeddings.LayerNorm",),
)
_ROBERTA = replace(_BERT, positions="after padding")
_LLAMA = Family(
    attentions=(Attention("layers.*.self_attn", *_PARTS, "o_proj", kv_heads="num_key_value_heads"),),
    ffn_in=("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
    ffn_out=("layers.*.mlp.down_proj",),
)
_T5_FFN = ("encoder.block.*.layer.1.DenseReluDense", "decoder.block.*.layer.2.DenseReluDense")

_FAMILIES = {
    "oelm-gpt": Family(
        attentions=(Attention("h.*.attn", *_PARTS, "o_proj"),),
        ffn_in=("h.*.mlp.fc_in",),
        ffn_out=("h.*.mlp.fc_out",),
    ),
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(
        attentions=(Attention("transformer.layer.*.attention", "q_lin", "k_lin", "v_lin", "out_lin"),),
        ffn_in=("transformer.layer.*.ffn.lin1",),
        ffn_out=("transformer.layer.*.ffn.lin2",),
        embedding_norms=("embeddings.LayerNorm",),
    ),
    "modernbert": Family(
        attentions=(Attention("layers.*.attn", qkv="Wqkv", o="Wo"),),
        ffn_in=("layers.*.mlp.Wi",),
        ffn_out=("layers.*.mlp.Wo",),
        embedding_norms=("embeddings.norm",),
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
        ffn_in=tuple(f"{ffn}.{name}" for ffn in _T5_FFN for name in ("wi", "wi_0", "wi_1")),
        ffn_out=tuple(f"{ffn}.wo" for ffn in _T5_FFN),
        positions="relative",
        score_scale=1.0,
    ),
    "bart": Family(
        attentions=(
            Attention("encoder.layers.*.self_attn", *_PARTS, "out_proj", heads="encoder_attention_heads"),
            Attention("decoder.layers.*.self_attn", *_PARTS, "out_proj", heads=_DECODER),
            Attention("decoder.layers.*.encoder_attn", *_PARTS, "out_proj", heads=_DECODER),
        ),
        ffn_in=("encoder.layers.*.fc1", "decoder.layers.*.fc1"),
        ffn_out=("encoder.layers.*.fc2", "decoder.layers.*.fc2"),
        embedding_norms=("encoder.layernorm_embedding", "decoder.layernorm_embedding"),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}
FAMILIES: Registry[Family] = Registry("family", _FAMILIES)


@dataclass
class Site:
    """One projection in one layer of a model. A fused matrix that is not split has three: q, k and v."""

    role: str
    layer: int
    num_layers: int
    path: str  # the module's full name in this model
    name: str  # its weight's name relative to the base model, which keys its random draws
    module: nn.Module
    heads: int = 1
    part: int | None = None  # its index (q 0, k 1, v 2) in a fused matrix that is not split
    split: bool = False  # whether it was split off a fused matrix
    layout: str = "concat"
    score_scale: float = 1.0

    @property
    def weight(self) -> Tensor:
        """The weight in `nn.Linear`'s layout, (out, in); of a fused matrix its part, which may be a copy."""
        view = self._view(as_linear(self.module))
        return view.reshape(-1, view.shape[-1])

    @property
    def bias(self) -> Tensor | None:
        bias = getattr(self.module, "bias", None)
        return None if bias is None else self._view(bias).reshape(-1)

    @property
    def attention(self) -> str:
        """The path of the attention module, equal for q and k of one attention."""
        parent = self.path.removesuffix(f".{BASE_LAYER}").rpartition(".")[0]
        return parent.rpartition(".")[0] if self.split else parent

    @property
    def head_dim(self) -> int:
        return self.weight.shape[0] // self.heads

    @property
    def parameters(self) -> int:
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())

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
    """The table's row for a model."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None or unwrap(model) is not model:
        raise UserError(
            f"{type(model).__name__} is not a plain Hugging Face model; "
            "if it is wrapped (DDP, torch.compile, PEFT), convert it before wrapping"
        )
    return family_row(model_type)


def family_row(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise UserError(
            f"no table row for architecture {model_type!r}; supported: {', '.join(FAMILIES)}. To add one: "
            f'oelm.FAMILIES["{model_type}"] = oelm.Family(...), as described in oelm/models/families.py'
        )
    return FAMILIES[model_type]


def find_sites(model: nn.Module) -> list[Site]:
    """Every projection the table names, in the order of the table."""
    family = family_of(model)
    modules = {relative_name(model, path): (path, module) for path, module in model.named_modules()}
    sites: list[Site] = []
    for attention in family.attentions:
        sites += _attention_sites(model, family, attention, modules)
    for role in ("ffn_in", "ffn_out"):
        for pattern in getattr(family, role):
            matches = _match(pattern, modules)
            for layer, key in matches:
                path, module = modules[key]
                sites.append(Site(role, layer, len(matches), path, f"{key}.weight", module))
    if not {"q", "k"} <= {site.role for site in sites}:
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
        matches = _match(f"{attention.at}.{attention.qkv if fused else getattr(attention, role)}", modules)
        if not matches:
            continue
        heads = getattr(config, attention.heads)
        if role in ("k", "v") and attention.kv_heads:
            heads = getattr(config, attention.kv_heads) or heads
            if fused and heads != getattr(config, attention.heads):
                raise UserError(
                    f"{matches[0][1]} fuses queries with fewer key heads, which the table cannot describe"
                )
        for layer, key in matches:
            projection, module = modules[key]
            path, name, part, split = projection, f"{key}.weight", None, False
            if (base := base_layer(module)) is not None:
                path, module = f"{path}.{BASE_LAYER}", base
            if fused:
                name = f"{key}.{role}.weight"
                if split := isinstance(module, SplitQKV):
                    path, module = f"{path}.{role}", getattr(module, role)
                else:
                    part = PARTS.index(role)
            site = Site(role, layer, len(matches), path, name, module, heads, part, split, attention.layout)
            if role in ("q", "k"):
                scale = family.score_scale
                if scale is None:
                    scale = getattr(model.get_submodule(projection.rpartition(".")[0]), "scaling", None)
                site.score_scale = float(scale) if isinstance(scale, int | float) else site.head_dim**-0.5
            yield site


def relative_name(model: nn.Module, path: str) -> str:
    """A parameter's or module's name without the base model's prefix, equal for all task heads."""
    return path.removeprefix(getattr(model, "base_model_prefix", "") + ".")


def _match(pattern: str, modules: dict[str, tuple[str, nn.Module]]) -> list[tuple[int, str]]:
    regex = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    return sorted((int(match[1]), key) for key in modules if (match := regex.fullmatch(key)))


def whole_model_roles(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Role -> path -> module: the embeddings and norms of a model, recognised by their classes."""
    modules = {path: m for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
    return {
        "embeddings": {path: m for path, m in modules.items() if isinstance(m, nn.Embedding)},
        "norms": {path: m for path, m in modules.items() if "norm" in type(m).__name__.lower()},
    }


def frozen_names(model: nn.Module, method: Method) -> set[str]:
    """The full names of the parameters this method freezes in this model (fused matrices already split)."""
    frozen: list[Any] = []
    for site in find_sites(model):
        if method.freezes(site.role, site.layer, site.num_layers):
            weight_only = method.freeze_ratio is not None and site.role not in HEAD_ROLES
            frozen += [site.module.weight] if weight_only else [site.module.weight, site.module.bias]
    for role, modules in whole_model_roles(model).items():
        selected: Iterable[nn.Module] = ()
        if method.freeze.get(role) == "all":
            selected = modules.values()
        elif role in method.freeze:
            selected = _norms_of_layers(model, modules, method.freeze[role])
        frozen += [p for module in selected for p in module.parameters(recurse=False)]
    # A tied parameter has several names; `named_parameters` reports it under the first.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in frozen if parameter is not None}


def _norms_of_layers(model: nn.Module, norms: dict[str, nn.Module], selection: str) -> list[nn.Module]:
    """The norms of the selected layers of each stack. Those of the embeddings go with the first layer, or
    with ":-n" in a stack of n layers; others outside the layers are never selected."""
    layers = layers_of(model, norms)
    selected = {count: select_layers(selection, count) for _, count in layers.values()}
    embeddings = any(0 in numbers or freezes_only_embeddings(selection, n) for n, numbers in selected.items())
    embedding_norms = family_of(model).embedding_norms if embeddings else ()
    return [
        norm
        for path, norm in norms.items()
        if (path in layers and layers[path][0] in selected[layers[path][1]])
        or relative_name(model, path) in embedding_norms
    ]


def layers_of(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Name -> (layer, number of layers in its stack), for those modules or parameters that are in a layer."""
    stacks = {attention.at.partition(".*")[0] for attention in family_of(model).attentions}
    layer = re.compile(rf"({'|'.join(map(re.escape, stacks))})\.(\d+)\.")
    matches = {name: match for name in names if (match := layer.match(relative_name(model, name)))}
    depths: dict[str, int] = {}
    for match in matches.values():
        depths[match[1]] = max(depths.get(match[1], 0), int(match[2]) + 1)
    return {name: (int(match[2]), depths[match[1]]) for name, match in matches.items()}


def depths_from_top(model: nn.Module) -> dict[str, int]:
    """The distance of each parameter from the task's head: 0 for the head, 1 for the top layer, 2 for the one
    below, and so on down to the embeddings and their norms. A final norm counts as part of the top layer, a
    pooler as part of the head. Layers of an encoder and of a decoder are counted separately, from the top of
    each."""
    embedding_norms = family_of(model).embedding_norms
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = layers_of(model, [name for name, _ in model.named_parameters()])
    bodies = {name.partition(".")[0] for name in layers}  # T5 has two besides its head, others one
    deepest = max((count for _, count in layers.values()), default=0)
    depths = {}
    for name, parameter in model.named_parameters():
        module = relative_name(model, name).rpartition(".")[0]
        if id(parameter) in embeddings or module in embedding_norms:
            depths[name] = deepest + 1
        elif name in layers:
            layer, count = layers[name]
            depths[name] = count - layer
        else:
            depths[name] = 1 if name.partition(".")[0] in bodies and ".pooler." not in name else 0
    return depths


def block_gain(site: Site, method: Method, blocks: np.ndarray) -> np.ndarray:
    """The factor of each head's unit-scale block of q or k, (heads,).

    "own" is the spectral norm of the head's block in `blocks`, so that a head keeps its scale. With "family"
    the queries have all of the gain, as in T5's own initialisation, so that a method that sets only q or only
    k still gives scores of standard deviation 1.
    """
    if method.gain == "own":
        return np.linalg.norm(blocks, ord=2, axis=(1, 2))
    gain = method.gain
    if gain == "family":
        gain = 1.0 / (site.score_scale * site.head_dim**0.5) if site.role == "q" else 1.0
    return np.full(len(blocks), float(gain))
