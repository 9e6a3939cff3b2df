"""The factor by which gradients were multiplied between the backward pass and the step.

``torch.nn.utils.clip_grad_norm_`` multiplies all gradients by a factor c ≤ 1. To the optimizer this
is a step on c times the loss, whose excess is c times that of the loss. Without c, the loss bound
would compare the decrease that the clipped gradients predict with the excess of the whole loss.
"""

import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfc._helpers import after_backward, at_least_float32, moved

# The largest gradients that are compared, and how far they may be from multiples of what they were.
LARGEST, TOLERANCE = 4096, 0.02


class Seen(NamedTuple):
    """A gradient at the end of a backward pass.

    Attributes:
        gradient: the tensor, which may change afterwards.
        version: the number of in-place operations on it so far.
        copy: its values.
    """

    gradient: Tensor
    version: int
    copy: Tensor


class Rescaling:
    """Compares the first and the last small gradient of a model with what they were.

    Args:
        model: hooks on two of its parameters are removed with this object, or by ``close()``.
    """

    def __init__(self, model: nn.Module) -> None:
        small = [p for p in model.parameters() if p.requires_grad and 1 < p.numel() <= LARGEST]
        self._watched = {id(p): p for p in (*small[:1], *small[-1:])}
        self._seen: dict[int, Seen] = {}
        me, handles = weakref.ref(self), []
        for parameter in self._watched.values():
            hook = _Hook(me)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self.close = weakref.finalize(self, _remove, handles)

    def see(self, parameter: Tensor) -> None:
        """Remember the gradient of a parameter, which its backward pass has completed."""
        gradient = parameter.grad
        if gradient is not None and gradient.layout == torch.strided:
            copy = gradient.detach().clone()
            self._seen[id(parameter)] = Seen(gradient, gradient._version, copy)

    def factor(self, loss_scale: float | Tensor = 1.0) -> float | Tensor:
        """Return c, or 1 if it is unknown or if gradients were changed in another way.

        Args:
            loss_scale: the factor of the loss that the gradients do not have any more.
        """
        found = []
        for key, seen in self._seen.items():
            gradient = self._watched[key].grad
            if gradient is None:  # frozen or unused by now
                continue
            if gradient is not seen.gradient or gradient._version == seen.version:
                return 1.0
            found.append(_ratio(gradient, seen.copy))
        if not found:
            return 1.0
        # If the gradients of some parameters are clipped, the others are still those of the loss.
        largest = torch.stack([moved(each, found[0].device) for each in found]).max()
        factor = largest * loss_scale
        return torch.where(torch.isfinite(factor) & (factor > 0), factor, 1.0)


class _Hook:
    """Calls ``Rescaling.see()`` when a gradient is complete, without keeping it alive."""

    def __init__(self, owner: weakref.ref[Rescaling]) -> None:
        self._owner = owner

    def __call__(self, parameter: Tensor) -> None:
        if dist.is_available() and dist.is_initialized():
            # DistributedDataParallel averages gradients in a callback of its own, which is queued
            # before the first of these two runs.
            after_backward(lambda: after_backward(lambda: self._see(parameter)))
        else:
            self._see(parameter)

    def _see(self, parameter: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.see(parameter)


def _ratio(gradient: Tensor, before: Tensor) -> Tensor:
    """Return the factor between two gradients; NaN if one is not a multiple of the other."""
    new, old = at_least_float32(gradient).reshape(-1), at_least_float32(before).reshape(-1)
    ratio = torch.dot(new, old) / torch.dot(old, old)
    is_multiple = (new - ratio * old).norm() <= TOLERANCE * new.norm()
    return torch.where(is_multiple, ratio, torch.nan)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
