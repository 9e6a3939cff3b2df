"""Adam's moments and steps (Kingma & Ba 2015), in whatever coordinates the gradients have."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

# The parts of a parameter's state: the number of updates, m and v.
STEP, MEAN, SQUARE = KEYS = ("step", "exp_avg", "exp_avg_sq")


def adam_steps_(
    gradients: list[Tensor],
    states: Sequence[dict[str, Any]],
    betas: tuple[float, float],
    eps: float,
    bad: Tensor | None,
) -> None:
    """Update the moments of gradients g, and replace g by m̂ / (√v̂ + ε), in place.

    m ← β₁ m + (1 - β₁) g and v ← β₂ v + (1 - β₂) g² begin at zero. After t updates,
    m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ).

    Args:
        gradients: of any shapes, in float32 at least, on one device.
        states: the state of each parameter, which the moments belong to.
        bad: a boolean scalar; if true, the moments stay as they were, and the steps have no
            meaning. ``None``: the gradients are known to be finite.
    """
    if not gradients:
        return
    for gradient, state in zip(gradients, states, strict=True):
        if STEP not in state:
            state[STEP] = gradient.new_zeros(())
            state[MEAN], state[SQUARE] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    counts, means, squares = ([state[key] for state in states] for key in KEYS)
    updates: float | Tensor = 1.0
    kept: tuple[float | Tensor, ...] = betas
    if bad is not None:
        for gradient in gradients:
            gradient.masked_fill_(bad, 0)
        one = torch.ones((), dtype=_widest(gradients), device=bad.device)
        updates = torch.where(bad, 0 * one, one)
        kept = tuple(torch.where(bad, one, beta * one) for beta in betas)

    torch._foreach_add_(counts, updates)
    torch._foreach_mul_(means, kept[0])
    torch._foreach_add_(means, gradients, alpha=1 - betas[0])
    torch._foreach_mul_(squares, kept[1])
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - betas[1])

    deviations = torch._foreach_sqrt(squares)
    of_means, of_squares = (_corrections(counts, beta) for beta in betas)
    torch._foreach_sqrt_(of_squares)
    torch._foreach_div_(deviations, of_squares)  # √v̂
    torch._foreach_add_(deviations, eps)
    torch._foreach_copy_(gradients, means)
    torch._foreach_div_(gradients, of_means)  # m̂
    torch._foreach_div_(gradients, deviations)


def _corrections(counts: list[Tensor], beta: float) -> list[Tensor]:
    """Return 1 - βᵗ for each t."""
    result = list(torch._foreach_pow(beta, counts))
    torch._foreach_neg_(result)
    torch._foreach_add_(result, 1.0)
    return result


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
