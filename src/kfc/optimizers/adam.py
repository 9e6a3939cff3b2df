"""Adam's moments and steps (Kingma & Ba 2015), in whatever coordinates the gradients have.

m ← β₁ m + (1 - β₁) g and v ← β₂ v + (1 - β₂) g² begin at zero. After t updates,
m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ), and the step is m̂ / (√v̂ + ε).

In all functions, gradients have any shapes, float32 at least, and are on one device. ``states``
holds the state of each parameter. ``bad`` is a boolean scalar; if true, moments stay as they were
and the results have no meaning. ``None``: the gradients are known to be finite.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

# The parts of a parameter's state: the number t of updates, m and v.
STEP, MEAN, SQUARE = "step", "exp_avg", "exp_avg_sq"


def update_means_(
    gradients: list[Tensor], states: Sequence[dict[str, Any]], beta: float, bad: Tensor | None
) -> list[Tensor]:
    """Count an update, update m, and return m̂ in new tensors; bad gradients become zero."""
    for gradient, state in zip(gradients, states, strict=True):
        # A layer has a matrix of another shape if other parameters are trained than before.
        if STEP not in state or state[MEAN].shape != gradient.shape:
            state[STEP] = gradient.new_zeros(())
            state[MEAN], state[SQUARE] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        if bad is not None:
            gradient.masked_fill_(bad, 0)
    counts, means = ([state[key] for state in states] for key in (STEP, MEAN))
    torch._foreach_add_(counts, 1.0 if bad is None else (~bad).to(_widest(gradients)))
    torch._foreach_mul_(means, kept_share(beta, gradients, bad))
    torch._foreach_add_(means, gradients, alpha=1 - beta)
    return list(torch._foreach_div(means, _corrections(counts, beta)))


def normalise_(
    means: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Any]],
    beta: float,
    eps: float,
    bad: Tensor | None,
) -> None:
    """Update v, and replace m̂ by m̂ / (√v̂ + ε), in place."""
    counts, squares = ([state[key] for state in states] for key in (STEP, SQUARE))
    torch._foreach_mul_(squares, kept_share(beta, gradients, bad))
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta)
    corrections = _corrections(counts, beta)
    torch._foreach_sqrt_(corrections)
    deviations = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(deviations, corrections)
    torch._foreach_add_(deviations, eps)
    torch._foreach_div_(means, deviations)


def kept_share(beta: float, like: Sequence[Tensor], bad: Tensor | None) -> float | Tensor:
    """Return the weight β of an old value, or 1 if the step is bad."""
    if bad is None:
        return beta
    one = torch.ones((), dtype=_widest(like), device=bad.device)
    return torch.where(bad, one, beta * one)


def _corrections(counts: list[Tensor], beta: float) -> list[Tensor]:
    """Return 1 - βᵗ for each t."""
    result = list(torch._foreach_pow(beta, counts))
    torch._foreach_neg_(result)
    torch._foreach_add_(result, 1.0)
    return result


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
