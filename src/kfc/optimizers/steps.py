"""Steps with momentum: m ← μm + v, θ ← θ + m."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from kfc._helpers import moved, parts_by_size, widest

# A number, or a scalar on a device if the host would have to wait for the number.
Scalar = float | Tensor


class StepScales(NamedTuple):
    """The factors of v and of μm in a step."""

    new: Scalar
    old: Scalar


def sum_of_scalars(scalars: Sequence[Scalar]) -> Scalar:
    """Return the sum of numbers, or of scalars on devices, on the device of the first."""
    if not scalars or not isinstance(scalars[0], Tensor):
        return sum(scalars)
    tensors = [torch.as_tensor(scalar) for scalar in scalars]
    home = tensors[0].device
    wide = widest(home)
    return torch.stack([moved(tensor, home).to(wide) for tensor in tensors]).sum()


def where(condition: bool | Tensor, one: Scalar, other: Scalar) -> Scalar:
    """Return one of two scalars, as ``torch.where`` does, also if the condition is known."""
    if isinstance(condition, Tensor):
        return torch.where(condition, one, other)
    return one if condition else other


def add_steps_(
    parameters: list[Tensor],
    buffers: list[Tensor] | None,
    values: list[Tensor],
    new: float,
    old: float,
) -> None:
    """Replace m by old · m + new · values, and add it to the parameters.

    Args:
        buffers: m; ``None``: m is zero and not kept.
    """
    # A few tensors at a time, which stay in the cache
    for part in parts_by_size(parameters):
        own, targets = values[part], parameters[part]
        if buffers is None:
            torch._foreach_add_(targets, own, alpha=new)
            continue
        steps = buffers[part]
        torch._foreach_mul_(steps, old)
        torch._foreach_add_(steps, own, alpha=new)
        torch._foreach_add_(targets, steps)


def add_steps_on_device_(
    parameters: list[Tensor],
    buffers: list[Tensor] | None,
    values: list[Tensor],
    new: Scalar,
    old: Scalar,
    bad: Tensor | None,
) -> None:
    """Do the same with scalars on the device, unless a boolean one says that the step is bad.

    The values are overwritten.
    """
    device = parameters[0].device
    wide = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    new, old = (torch.as_tensor(scale, device=device).to(wide) for scale in (new, old))
    torch._foreach_mul_(values, new)
    if bad is not None:
        for value in values:
            value.masked_fill_(bad, 0)
        old = torch.where(bad, torch.ones_like(old), old)
    if buffers is not None:
        torch._foreach_mul_(buffers, old)
        torch._foreach_add_(buffers, values)
        if bad is None:
            values = buffers
        else:
            torch._foreach_copy_(values, buffers)
            torch._foreach_mul_(values, torch.where(bad, 0.0, 1.0))
    torch._foreach_add_(parameters, values)
