"""Scaled gradients: a diagonal block for parameters that have no Fisher block.

The block is D = (√(v̂ + (λθ)²) + ε) / √(1 - μ²), with the second moments v of the parameter's
gradients as in Adam: v ← β v + (1 - β) g² begins at zero, and v̂ = v / (1 - βᵗ) after t updates.
Momentum multiplies the mean square of independent updates by 1 / (1 - μ²), so that with any μ the
root mean square of a step is α, as that of normalised gradients without momentum. The gradient λθ
of the penalty limits the step of an entry whose g is zero.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc._helpers import at_least_float32, moved
from kfc.optimizers.adam import SQUARE, STEP

# β and ε.
DECAY, EPSILON = 0.99, 1e-8


class Scaled(NamedTuple):
    """A parameter with such a block: its name, its state, and μ and λ."""

    name: str
    parameter: Tensor
    state: dict[str, Any]
    momentum: float
    weight_decay: float


class GradientScales:
    """The diagonal blocks of a step, from second moments in the parameters' states.

    A step may be skipped after it has used a block. The moments that contain its gradients are
    therefore kept only when the parameters move.
    """

    def __init__(self) -> None:
        self._proposed: list[tuple[dict[str, Any], dict[str, Tensor]]] = []

    def diagonals(
        self, gradients: Mapping[str, Tensor], parameters: Iterable[Scaled]
    ) -> dict[str, Tensor]:
        """Return D of parameters by name, with the gradients of this step in v.

        Args:
            gradients: gradients of the loss, without weight decay, by name.
        """
        self._proposed, found = [], {}
        for name, parameter, state, momentum, weight_decay in parameters:
            gradient = at_least_float32(gradients[name])
            old = _moments(state, gradient)
            count = old[STEP] + 1
            square = torch.lerp(old[SQUARE], gradient * gradient, 1 - DECAY)
            self._proposed.append((state, {STEP: count, SQUARE: square}))
            mean = square / (1 - DECAY**count)
            if weight_decay:
                current = at_least_float32(parameter.detach())
                mean.addcmul_(current, current, value=weight_decay**2)
            found[name] = mean.sqrt_().add_(EPSILON).div_(math.sqrt(1 - momentum**2))
        return found

    def keep_(self, bad: Tensor | None) -> None:
        """Keep the moments of the last call of ``diagonals()``.

        Args:
            bad: a boolean scalar; if true, the moments stay as they were. ``None``: the step is
                known to be good.
        """
        for state, new in self._proposed:
            if bad is not None:
                old, flag = _moments(state, new[SQUARE]), moved(bad, new[SQUARE].device)
                new = {part: torch.where(flag, old[part], value) for part, value in new.items()}
            state.update(new)
        self._proposed = []


def _moments(state: Mapping[str, Any], like: Tensor) -> dict[str, Tensor]:
    """Return t and v of a state; zero if it has none, or none for this shape."""
    if SQUARE in state and state[SQUARE].shape == like.shape:
        return {part: state[part] for part in (STEP, SQUARE)}
    return {STEP: like.new_zeros(()), SQUARE: torch.zeros_like(like)}
