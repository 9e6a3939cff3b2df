"""Param groups: parameters with the same learning rate, momentum, weight decay and damping."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from kfc._helpers import require_choice, require_number
from kfc.layers import Plan, find_layers

# The options of a group, and the bound that each must be below (all must be at least 0).
HYPER_PARAMETERS = {
    "lr": float("inf"),
    "momentum": 1.0,
    "betas": 1.0,  # of both
    "eps": float("inf"),
    "weight_decay": float("inf"),
    "damping": float("inf"),
}

# What an override may say besides these options.
PREFIX, TREATMENT = "prefix", "treatment"

# How parameters are treated: by their Fisher block, or without one, by the gradient divided by the
# square root of its second moment, or by the gradient as it is.
CURVATURE, SCALED, PLAIN = TREATMENTS = ("curvature", "scaled", "plain")


def require_hyper_parameters(values: Mapping[str, Any], where: str = "") -> None:
    """Raise an error that names the first value out of range."""
    for name, value in values.items():
        if name == "betas":
            _require_pair(where + name, value, HYPER_PARAMETERS[name])
        else:
            require_number(where + name, value, below=HYPER_PARAMETERS[name])
            if value > torch.finfo(torch.float32).max:
                raise ValueError(f"{where}{name} is too large for float32: {value:g}")


def _require_pair(name: str, value: object, below: float) -> None:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers, got {value!r}")
    for index, number in enumerate(value):
        require_number(f"{name}[{index}]", number, below=below)


def excluded_layers(plan: Plan, overrides: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    """Return the layers that overrides exclude from the curvature, each with the reason.

    A layer has the treatment of its weight.
    """
    checked = [_prefixed(override, index) for index, override in enumerate(overrides or ())]
    owners = {name: _owner(checked, name) for name in plan.layer_of}
    excluding = {index for index, override in enumerate(checked) if TREATMENT in override}
    excluded = {
        layer: f"groups[{owners[name]}] excludes it"
        for name, (layer, role) in plan.layer_of.items()
        if role == "weight" and owners[name] in excluding
    }
    for name, (layer, _) in plan.layer_of.items():
        if owners[name] in excluding and layer not in excluded:
            raise ValueError(
                f"groups[{owners[name]}]: the treatment of {name} has no effect, because a layer "
                f"has that of its weight; use the prefix {layer!r}"
            )
    return excluded


def build_groups(
    model: nn.Module,
    plan: Plan,
    overrides: Sequence[Mapping[str, Any]] | None,
    defaults: Mapping[str, Any],
    fallback_lr: float | None,
    of_weight: Sequence[str] = (),
    fallback: str = PLAIN,
) -> list[dict[str, Any]]:
    """Return param groups for ``torch.optim.Optimizer``.

    Parameters without a Fisher block are in groups of their own, after the others.

    Args:
        overrides: ``{"prefix": ..., option: value, ...}``: a prefix is the name of a module or
            parameter, a pattern such as ``"*.bias"``, or a list of these. The first override that
            matches a parameter applies. For a ``"treatment"`` see ``excluded_layers()``.
        defaults: the options of parameters that no override matches.
        fallback_lr: the learning rate of parameters without a Fisher block, unless an override
            sets it.
        of_weight: the options that a layer has from its weight, and its bias must share.
        fallback: the treatment of parameters without a Fisher block, unless an override sets it.
    """
    checked = [
        _checked(override, index, defaults) for index, override in enumerate(overrides or ())
    ]
    treatments = _chosen_treatments(model, checked)
    members: dict[tuple[int, str], list[tuple[str, nn.Parameter]]] = {}
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        own = treatments.get(name, fallback) if name in plan.plain else CURVATURE
        members.setdefault((_owner(checked, name, used), own), []).append((name, parameter))
    unused = [p for override in checked for p in override["prefix"] if p not in used]
    if unused:
        raise ValueError(
            f"groups: {unused} match no parameter that an earlier prefix has not matched; prefixes "
            "are names from model.named_modules() or model.named_parameters()"
        )
    for owner, override in enumerate(checked):
        others = [name for key in members if key[0] == owner for name, _ in members[key]]
        _require_effect(override, owner, others, fallback, plan)
    groups = []
    for owner, own in sorted(members, key=lambda key: (TREATMENTS.index(key[1]), key[0])):
        override = checked[owner] if owner >= 0 else {}
        options = {**defaults, **{k: v for k, v in override.items() if k in defaults}}
        factor = 1.0  # of the rate of parameters that lose their Fisher block later
        if fallback_lr is not None and "lr" not in override:
            factor = fallback_lr / options["lr"] if options["lr"] else 1.0
            options["lr"] = options["lr"] if own == CURVATURE else fallback_lr
        extra = {TREATMENT: own, "fallback_factor": factor if own == CURVATURE else 1.0}
        groups.append({"params": members[owner, own], **options, **extra})
    _require_shared(groups, plan, of_weight)
    return groups


def _chosen_treatments(model: nn.Module, overrides: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the treatments that overrides choose, by parameter; a layer has that of its weight."""
    if not any(TREATMENT in override for override in overrides):
        return {}
    owners = {name: _owner(overrides, name) for name, _ in model.named_parameters()}
    known = {name: overrides[owner] for name, owner in owners.items() if owner >= 0}
    found = {name: each[TREATMENT] for name, each in known.items() if TREATMENT in each}
    layer_of = find_layers(model).layer_of
    weights = {layer: name for name, (layer, role) in layer_of.items() if role == "weight"}
    of_weight = {name: found.get(weights[layer]) for name, (layer, _) in layer_of.items()}
    return found | {name: treatment for name, treatment in of_weight.items() if treatment}


def _require_effect(
    override: Mapping[str, Any], index: int, names: Sequence[str], fallback: str, plan: Plan
) -> None:
    """Raise ``ValueError`` if an option of an override has no effect.

    Args:
        names: the parameters that it applies to.
        fallback: the treatment of parameters without a Fisher block by default.
    """
    if "damping" in override and all(name in plan.plain for name in names):
        raise ValueError(
            f"groups[{index}] has a damping, which has no effect on {list(names)}: they have no "
            "Fisher block; remove it"
        )
    if override.get(TREATMENT) == SCALED != fallback:
        raise ValueError(f'groups[{index}]: treatment "{SCALED}" is one of kfc.KFC; use "{PLAIN}"')


def _require_shared(
    groups: Sequence[Mapping[str, Any]], plan: Plan, of_weight: Sequence[str]
) -> None:
    """Raise ``ValueError`` if a bias has another value of an option than its layer's weight.

    Of ``betas``, only β₂ has to be the same.
    """
    group_of = {name: group for group in groups for name, _ in group["params"]}
    weights = {layer: name for name, (layer, role) in plan.layer_of.items() if role == "weight"}
    for name, (layer, _) in plan.layer_of.items():
        for option in of_weight:
            own, other = (group_of[each][option] for each in (name, weights[layer]))
            if option == "betas":
                own, other = own[1], other[1]
            if own != other:
                raise ValueError(
                    f"groups: {option} of {name} has no effect, because a layer has that of its "
                    f"weight; give {weights[layer]} the same value"
                )


def _checked(override: Mapping[str, Any], index: int, known: Mapping[str, Any]) -> dict[str, Any]:
    checked = _prefixed(override, index)
    options = {name: checked[name] for name in checked if name not in (PREFIX, TREATMENT)}
    unknown = [name for name in options if name not in known]
    if unknown:
        known_names = [*known, TREATMENT]
        raise ValueError(f"groups[{index}] has unknown options {unknown}; known are {known_names}")
    require_hyper_parameters(options, f"groups[{index}]: ")
    return checked


def _prefixed(override: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return an override with a list of prefixes, after a check of its treatment."""
    where = f"groups[{index}]"
    if not isinstance(override, Mapping) or PREFIX not in override:
        raise ValueError(f'{where} must be a dict with a "prefix", got {override!r}')
    if TREATMENT in override:
        require_choice(f"{where}: treatment", override[TREATMENT], (SCALED, PLAIN))
    prefix = override[PREFIX]
    return {**override, PREFIX: [prefix] if isinstance(prefix, str) else list(prefix)}


def _owner(overrides: Sequence[Mapping[str, Any]], name: str, used: set[str] | None = None) -> int:
    """Return the index of the first override that matches a parameter; -1 if none does.

    Args:
        used: the prefix that matches is added to this set.
    """
    for index, override in enumerate(overrides):
        for prefix in override[PREFIX]:
            # A pattern may be that of a module or of a parameter.
            inside = name.startswith(prefix + ".") or fnmatchcase(name, prefix + ".*")
            if name == prefix or inside or fnmatchcase(name, prefix):
                if used is not None:
                    used.add(prefix)
                return index
    return -1
