"""Checks of saved tensors and layers, which come before any of them is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfc._helpers import require_keys, require_number, shown
from kfc.curvature.damping import Damping
from kfc.moments.folding import is_symmetric

if TYPE_CHECKING:
    from kfc.curvature.layer import LayerCurvature

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Relative to the largest entry; averages may be rounded to bfloat16.
ASYMMETRY = 1e-2


def require_tensor(
    name: str,
    value: object,
    shape: Sequence[int] | None = None,
    *,
    low: float = -math.inf,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> Tensor:
    """Return a tensor that is dense and finite; raise ``ValueError`` if the value is none.

    Args:
        name: the entry of the state, as the error names it.
        shape: the shape that it must have; ``None``: any.
        low: the lowest entry that is allowed.
        dtypes: the dtypes that are allowed.
    """
    kind = "a dense tensor of floating-point numbers" if dtypes is FLOATS else "a dense tensor"
    expected = kind if shape is None else f"{kind} of shape {tuple(shape)}"
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    if (
        not isinstance(value, Tensor)
        or not is_dense
        or value.is_nested
        or value.device.type == "meta"
        or value.dtype not in dtypes
        or (shape is not None and tuple(value.shape) != tuple(shape))
    ):
        raise ValueError(f"{name} must be {expected}, got {shown(value)}")
    found = value.detach()
    finite = torch.isfinite(found)
    if not bool(finite.all()):
        count = found.numel() - int(finite.sum())
        raise ValueError(f"{name} must be finite, but {count} of {found.numel()} entries are not")
    if found.numel() and float(found.min()) < low:
        raise ValueError(
            f"{name} must be at least {low:g}, but its lowest entry is {float(found.min()):g}"
        )
    return found


def require_symmetric(name: str, matrices: Tensor) -> None:
    """Raise ``ValueError`` unless (groups, n, n) are symmetric, without negative diagonals."""
    if not matrices.numel():
        return
    tolerance = ASYMMETRY * float(matrices.abs().max())
    difference = float((matrices - matrices.mT).abs().max())
    if difference > tolerance:
        raise ValueError(
            f"{name} must be symmetric, but entries differ from the transposed ones by up to "
            f"{difference:g}"
        )
    lowest = float(matrices.diagonal(dim1=-2, dim2=-1).min())
    if lowest < -tolerance:
        raise ValueError(f"{name} must have no negative diagonal, but contains {lowest:g} there")


def require_names(name: str, found: object, known: Sequence[str]) -> None:
    """Raise ``ValueError`` unless a value is a list of different names among known ones."""
    if (
        not isinstance(found, list)
        or not all(isinstance(each, str) and each in known for each in found)
        or len(set(found)) != len(found)
    ):
        raise ValueError(f"{name} must be a list of names among {list(known)}, got {shown(found)}")


def require_damping(name: str, found: object, *, may_be_unknown: bool) -> None:
    """Raise ``ValueError`` unless a value is a saved ``Damping``."""
    require_keys(f"damping of {name}", found, Damping._fields)
    assert isinstance(found, Mapping)
    if len(found) != len(Damping._fields):
        raise ValueError(f"the damping of {name} must have {Damping._fields}, got {shown(found)}")
    for key, number in found.items():
        is_unknown = isinstance(number, float) and math.isnan(number)
        if not (may_be_unknown and is_unknown):
            require_number(f"the damping {key!r} of {name}", number)


def require_averages(name: str, running: object, shapes: Sequence[Sequence[int]]) -> None:
    """Raise ``ValueError`` unless a value is a list of running averages of these shapes."""
    if not isinstance(running, list) or len(running) != len(shapes):
        raise ValueError(
            f"the running averages of {name} must be a list of {len(shapes)} tensors, got "
            f"{shown(running)}"
        )
    for index, (average, shape) in enumerate(zip(running, shapes, strict=True)):
        entry = f"running[{index}] of {name}"
        found = require_tensor(entry, average, shape)
        if is_symmetric(tuple(shape)):
            require_symmetric(entry, found)


def check_kinds(name: str, curvature: LayerCurvature, saved: object) -> None:
    """Raise ``ValueError`` unless the entries of a saved layer are of the right kinds."""
    where = f"layer {name!r}"
    require_keys(f"state of {where}", saved, ("roles", "running", "inverse", "damping"))
    assert isinstance(saved, Mapping)
    roles = list(curvature.layer.parameters())
    require_names(f"the roles of {where}", saved["roles"], roles)
    if saved["roles"] != [role for role in roles if role in saved["roles"]]:
        raise ValueError(f"the roles of {where} must be in the order {roles}, got {saved['roles']}")
    require_damping(where, saved["damping"], may_be_unknown=True)
    if not isinstance(saved["running"], list):
        raise ValueError(
            f"the running averages of {where} must be a list, got {shown(saved['running'])}"
        )
    if not isinstance(saved["inverse"], Mapping):
        raise ValueError(f"the inverse of {where} must be a dict, got {shown(saved['inverse'])}")
    for index, tensor in enumerate(saved["running"]):
        require_tensor(f"running[{index}] of {where}", tensor)
    if not saved["roles"] and (saved["running"] or saved["inverse"]):
        raise ValueError(f"the roles of {where} must not be empty: there are statistics of it")
    for key, tensor in saved["inverse"].items():
        # Flags and numbers may be of integers.
        is_small = isinstance(tensor, Tensor) and tensor.dim() < 2
        dtypes = FLOATS + INTEGERS if is_small else FLOATS
        require_tensor(f"inverse[{key!r}] of {where}", tensor, dtypes=dtypes)


def check_values(name: str, curvature: LayerCurvature, saved: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the numbers in a saved layer of the right shapes are usable."""
    where = f"layer {name!r}"
    if saved["running"]:
        require_averages(where, saved["running"], [each.shape for each in saved["running"]])
    for key, low in curvature.inverse_class.lowest.items():
        if key in saved["inverse"]:
            require_tensor(f"inverse[{key!r}] of {where}", saved["inverse"][key], low=low)
    if saved["inverse"]:
        problem = curvature.inverse_class.problem(saved["inverse"])
        if problem:
            raise ValueError(f"the inverse of {where} is invalid: {problem}")


@contextmanager
def as_if_trained(curvature: LayerCurvature, roles: Sequence[str]) -> Iterator[None]:
    """Let the shapes of a layer's state be those for which exactly these parameters are trained.

    A layer may be frozen now and trained again later, with the statistics that it had before.
    """
    parameters = curvature.layer.parameters()
    before = {role: parameter.requires_grad for role, parameter in parameters.items()}
    try:
        for role, parameter in parameters.items():
            parameter.requires_grad_(role in roles)
        yield
    finally:
        for role, parameter in parameters.items():
            parameter.requires_grad_(before[role])


@contextmanager
def in_entry(name: str) -> Iterator[None]:
    """Begin the messages of errors with the name of the entry that is being checked."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
