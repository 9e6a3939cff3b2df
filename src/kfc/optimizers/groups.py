"""Param groups: which parameters share a learning rate, momentum, weight decay and damping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from kfc.checks import require_number
from kfc.layers import Plan

# The options of a group, and what each must be below (all must be at least 0).
HYPER_PARAMETERS = {
    "lr": float("inf"),
    "momentum": 1.0,
    "weight_decay": float("inf"),
    "damping": float("inf"),
}


def require_hyper_parameters(values: Mapping[str, Any], where: str = "") -> None:
    """Raise an error that names the first value out of range."""
    for name, value in values.items():
        require_number(where + name, value, below=HYPER_PARAMETERS[name])


def build_groups(
    model: nn.Module,
    plan: Plan,
    wishes: Sequence[Mapping[str, Any]] | None,
    defaults: Mapping[str, float],
    fallback_lr: float | None,
) -> list[dict[str, Any]]:
    """Param groups for ``torch.optim.Optimizer``, each of parameters treated alike.

    Args:
        wishes: ``{"prefix": ..., option: value, ...}``: a prefix is a module's or a parameter's
            name, or a pattern such as ``"*.bias"``, or a list of these. The first wish that fits a
            parameter counts.
        defaults: the options of parameters that no wish fits.
        fallback_lr: the learning rate of parameters with the plain gradient, unless a wish sets it.

    Parameters with the plain gradient are in groups of their own, after the others.
    """
    wishes = [_checked(wish, index, defaults) for index, wish in enumerate(wishes or ())]
    members: dict[tuple[int, bool], list[tuple[str, nn.Parameter]]] = {}
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        owner = next((i for i, wish in enumerate(wishes) if _fits(wish, name, used)), -1)
        members.setdefault((owner, name in plan.plain), []).append((name, parameter))
    unused = [p for wish in wishes for p in wish["prefix"] if p not in used]
    if unused:
        raise ValueError(
            f"groups: no parameter is left for {unused}; prefixes are names from "
            "model.named_modules() or model.named_parameters(), and the first that fits counts"
        )
    groups = []
    for owner, plain in sorted(members, key=lambda key: (key[1], key[0])):
        options = dict(defaults)
        if plain and fallback_lr is not None:
            options["lr"] = fallback_lr
        if owner >= 0:
            options.update({k: v for k, v in wishes[owner].items() if k != "prefix"})
        groups.append({"params": members[owner, plain], **options, "plain_gradient": plain})
    return groups


def _checked(wish: Mapping[str, Any], index: int, known: Mapping[str, float]) -> dict[str, Any]:
    where = f"groups[{index}]"
    if not isinstance(wish, Mapping) or "prefix" not in wish:
        raise ValueError(f'{where} must be a dict with a "prefix", got {wish!r}')
    options = {name: value for name, value in wish.items() if name != "prefix"}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"{where} has unknown options {unknown}; known are {list(known)}")
    require_hyper_parameters(options, f"{where}: ")
    prefix = wish["prefix"]
    return {**options, "prefix": [prefix] if isinstance(prefix, str) else list(prefix)}


def _fits(wish: Mapping[str, Any], name: str, used: set[str]) -> bool:
    for prefix in wish["prefix"]:
        if name == prefix or name.startswith(prefix + ".") or fnmatchcase(name, prefix):
            used.add(prefix)
            return True
    return False
