"""The roles of every parameter, and the factors of learning rate and weight decay by role."""

import itertools

from torch import nn

from oelm.config import TrainingConfig
from oelm.errors import UserError
from oelm.models.families import find_sites, whole_model_roles
from oelm.system.private_peft import BASE_LAYER


def roles_of(model: nn.Module) -> dict[str, set[str]]:
    """The roles of each parameter, by its name: those of `oelm.method.ROLES`, and "head" for the rest.

    A fused matrix of q, k and v has all three. An adapter has those of its projection, a table of embeddings
    that is also the output matrix is an embedding.
    """
    projections: dict[str, set[str]] = {}
    for site in find_sites(model):
        projections.setdefault(site.path.removesuffix(f".{BASE_LAYER}"), set()).add(site.role)
    others: dict[int, set[str]] = {}
    for role, modules in whole_model_roles(model).items():
        for module in modules.values():
            others |= {id(parameter): {role} for parameter in module.parameters(recurse=False)}
    roles = {}
    for name, parameter in model.named_parameters():
        paths = itertools.accumulate(name.split("."), "{}.{}".format)
        projection = next((projections[path] for path in paths if path in projections), {"head"})
        roles[name] = others.get(id(parameter), projection)
    return roles


def role_scales(model: nn.Module, training: TrainingConfig, key: str) -> dict[str, float]:
    """The factor of each parameter by `key` of the configuration, "lr_scale" or "weight_decay_scale".

    A fused matrix that trains has one learning rate: different factors for its roles are refused.
    """
    scales = getattr(training, key)
    if not scales:
        return {name: 1.0 for name, _ in model.named_parameters()}
    record = getattr(model.config, "oelm", None) or {"method": {}}
    # With a schedule every frozen parameter trains at some time.
    scheduled = bool(record["method"].get("freeze_schedule"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad or scheduled}
    factor_of = {}
    for name, roles in roles_of(model).items():
        factors = {role: scales.get(role, 1.0) for role in sorted(roles)}
        if len({*factors.values()}) > 1 and name in trained:
            fused = f"{', '.join(factors)} are one matrix in this model ({name})"
            raise UserError(f"training.{key}: {fused}: give all of them the same value")
        factor_of[name] = max(factors.values())
    return factor_of
