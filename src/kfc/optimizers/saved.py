"""Checks of the state dict of an optimizer, which come before anything is changed."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc._helpers import (
    raise_differences,
    require_choice,
    require_keys,
    require_number,
    require_whole,
    shown,
)
from kfc.curvature.kfc import KroneckerCurvature
from kfc.curvature.low_rank import MULTIPLE, most_columns
from kfc.curvature.model import ModelCurvature
from kfc.curvature.saved import require_symmetric, require_tensor
from kfc.distributed.agreement import digest_of
from kfc.optimizers.groups import (
    CURVATURE,
    PLAIN,
    SCALED,
    TREATMENT,
    require_hyper_parameters,
)


class Part(NamedTuple):
    """What a part of a parameter's state has to be.

    Attributes:
        shape: its shape.
        is_wide: whether it has float32 at least, or the dtype of the parameter.
        low: its lowest entry.
        is_whole: whether its entries are whole numbers.
        is_symmetric: whether it consists of symmetric matrices.
        other_shapes: shapes that it may have instead.
    """

    shape: Sequence[int]
    is_wide: bool = True
    low: float = -math.inf
    is_whole: bool = False
    is_symmetric: bool = False
    other_shapes: Sequence[Sequence[int]] = ()

    def dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype in which the part is kept."""
        return (
            torch.promote_types(parameter.dtype, torch.float32) if self.is_wide else parameter.dtype
        )

    def check(self, name: str, value: object) -> None:
        """Raise ``ValueError`` unless a saved value is such a part."""
        shape = self.shape
        if isinstance(value, Tensor) and value.shape in self.other_shapes:
            shape = value.shape
        found = require_tensor(name, value, shape, low=self.low)
        if self.is_whole and not torch.equal(found, found.round()):
            raise ValueError(f"{name} must be a whole number, got {found.tolist()}")
        if self.is_symmetric:
            require_symmetric(name, found)


def check_groups(found: object, own: Sequence[Mapping[str, Any]], options: Sequence[str]) -> None:
    """Raise ``ValueError`` unless saved param groups fit an optimizer's.

    Args:
        options: the options of a group that the optimizer reads.
    """
    if not isinstance(found, list):
        raise ValueError(f"the state's param_groups must be a list, got {shown(found)}")
    for index, group in enumerate(found):
        where = f"param group {index}"
        extra = ("params", "param_names", TREATMENT, "fallback_factor")
        require_keys(where, group, (*extra, *options))
        for key in ("params", "param_names"):
            if not isinstance(group[key], list):
                raise ValueError(f"{where}: {key} must be a list, got {shown(group[key])}")
        if len(group["params"]) != len(group["param_names"]):
            raise ValueError(f"{where}: params and param_names must have the same length")
        for key in group["params"]:
            require_whole(f"{where}: params", key, low=0)
        require_choice(f"{where}: {TREATMENT}", group[TREATMENT], (CURVATURE, SCALED, PLAIN))
        require_number(f"{where}: fallback_factor", group["fallback_factor"])
        numbers = {option: _number(group[option]) for option in options}
        require_hyper_parameters(numbers, f"{where}: ")
    saved, expected = (
        {f"group {i}": _members(group) for i, group in enumerate(groups)} for groups in (found, own)
    )
    raise_differences("param groups", saved, expected)
    keys = [key for group in found for key in group["params"]]
    if len(set(keys)) != len(keys) or len(keys) != sum(len(group["params"]) for group in own):
        raise ValueError(f"the params of the state's param_groups must be different, got {keys}")


def _number(option: object) -> object:
    """Return an option as a number if it is a tensor of one, which schedulers may set."""
    is_scalar = isinstance(option, Tensor) and option.dim() == 0 and option.is_floating_point()
    return option.item() if isinstance(option, Tensor) and is_scalar else option


def _members(group: Mapping[str, Any]) -> str:
    own = "" if group[TREATMENT] == CURVATURE else f", {group[TREATMENT]} gradient"
    return f"{group['param_names']}{own}"


def check_shapes(found: object, own: Mapping[str, list[int]]) -> None:
    """Raise ``ValueError`` unless the saved shapes of parameters are those of the model."""
    require_keys("state's parameters", found, ())
    assert isinstance(found, Mapping)
    for name, shape in found.items():
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise ValueError(
                f"the state's shape of parameter {shown(name)} must be a list of sizes, got "
                f"{shown(shape)}"
            )
    raise_differences("parameters", found, own)


def check_parts(state_dict: Mapping[str, Any], part_of: Callable[[str, str], Part | None]) -> None:
    """Raise ``ValueError`` unless the saved state of every parameter is complete and usable.

    Args:
        part_of: returns what a part of a parameter's state has to be, given the names of the
            parameter and of the part; ``None`` if there is no such part.
    """
    state, parts = state_dict["state"], state_dict["parts"]
    require_keys("state of the parameters", state, ())
    require_keys("state's parts", parts, ())
    names = {
        key: name
        for group in state_dict["param_groups"]
        for key, name in zip(group["params"], group["param_names"], strict=True)
    }
    if unknown := [key for key in state if key not in names]:
        raise ValueError(f"the state has entries of unknown parameters: {shown(unknown)}")
    found: dict[str, object] = {}
    for key, own in state.items():
        require_keys(f"state of {names[key]}", own, ())
        found |= {f"{names[key]}: {part}": "saved" for part in own}
    listed = {
        f"{name}: {part}": "saved"
        for name, own in parts.items()
        for part in (own if isinstance(own, list) else [own])
    }
    raise_differences("parts of the state (momentum, averages)", found, listed)
    for key, own in state.items():
        for part, value in own.items():
            entry = f"{names[key]}: {part}"
            expected = part_of(names[key], part)
            if expected is None:
                raise ValueError(f"{entry} is unknown to this optimizer")
            expected.check(entry, value)


def check_allowance(
    state: Mapping[str, Any], curvature: ModelCurvature, sizes: Mapping[str, int]
) -> None:
    """Raise ``ValueError`` unless the state is one of an ``Allowance``.

    Args:
        sizes: how many numbers the lists ``costs`` and ``balances`` have.
    """
    what = "the allowance state's"
    require_keys("allowance state", state, (*sizes, "columns", "others"))
    for name, size in sizes.items():
        numbers = state[name]
        if name == "costs" and numbers is None:
            continue
        if not isinstance(numbers, list) or len(numbers) != size:
            raise ValueError(f"{what} {name} must be {size} numbers, got {shown(numbers)}")
        for number in numbers:
            require_number(f"{what} {name}", number, low=0.0 if name == "costs" else -math.inf)
    if state["others"] is not None:
        require_number(f"{what} others", state["others"])
    if state["columns"] is None:
        return
    require_keys("allowance state's columns", state["columns"], ())
    for name, columns in state["columns"].items():
        layer = curvature.layers.get(name) if isinstance(name, str) else None
        if not isinstance(layer, KroneckerCurvature):
            raise ValueError(f"{what} columns are of an unknown layer {shown(name)}")
        if not isinstance(columns, list) or len(columns) != 2:
            raise ValueError(f"{what} columns of {name!r} must be two, got {shown(columns)}")
        for number, width in zip(columns, layer.factor_widths(), strict=True):
            require_whole(f"{what} columns of {name!r}", number, low=0)
            if number > (most_columns(width) + MULTIPLE if width else 0):
                raise ValueError(f"{what} columns of {name!r} are too many: {shown(columns)}")


def shared_digest(state_dict: Mapping[str, Any]) -> int:
    """Return a checksum of the parts of a state dict that are the same on all ranks."""
    curvature = state_dict["curvature"] if "steps" not in state_dict else state_dict
    # What a rank reads from the losses of its own batches is its own.
    own = {key: value for key, value in curvature.items() if key not in ("losses", "expected")}
    return digest_of([own, state_dict.get("state"), state_dict.get("param_groups")])
