"""Adam's second moments (Kingma & Ba 2015), in whatever coordinates the gradients have.

v ← β v + (1 - β) g² begins at zero. After t updates, v̂ = v / (1 - βᵗ), and the normalised gradient
is g / (√v̂ + ε).
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

# The parts of a parameter's state: the number t of updates of v, and v.
STEP, SQUARE = "step", "exp_avg_sq"


def normalise_(
    gradients: list[Tensor],
    states: Sequence[dict[str, Any]],
    beta: float,
    eps: float,
    bad: Tensor | None,
) -> None:
    """Update v, and replace g by g / (√v̂ + ε), in place.

    Args:
        gradients: of any shapes, float32 at least, on one device.
        states: the state of each parameter.
        bad: a boolean scalar; if true, v stays as it was and the results have no meaning. ``None``:
            the gradients are known to be finite.
    """
    for gradient, state in zip(gradients, states, strict=True):
        # A layer has a matrix of another shape if other parameters are trained than before.
        if STEP not in state or state[SQUARE].shape != gradient.shape:
            state[STEP], state[SQUARE] = gradient.new_zeros(()), torch.zeros_like(gradient)
        if bad is not None:
            gradient.masked_fill_(bad, 0)
    counts, squares = ([state[key] for state in states] for key in (STEP, SQUARE))
    torch._foreach_add_(counts, 1.0 if bad is None else (~bad).to(_widest(gradients)))
    torch._foreach_mul_(squares, _kept_share(beta, gradients, bad))
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta)
    corrections = list(torch._foreach_pow(beta, counts))
    torch._foreach_neg_(corrections)
    torch._foreach_add_(corrections, 1.0)
    torch._foreach_sqrt_(corrections)
    deviations = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(deviations, corrections)
    torch._foreach_add_(deviations, eps)
    torch._foreach_div_(gradients, deviations)


def _kept_share(beta: float, like: Sequence[Tensor], bad: Tensor | None) -> float | Tensor:
    """Return the weight β of an old value, or 1 if the step is bad."""
    if bad is None:
        return beta
    one = torch.ones((), dtype=_widest(like), device=bad.device)
    return torch.where(bad, one, beta * one)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
