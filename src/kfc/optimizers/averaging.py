"""The averaged iterate: an exponential moving average of the parameters (Algorithm 1)."""

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kfc._helpers import moved

# The key of a parameter's average in the optimizer's state.
KEY = "average"

State = MutableMapping[Tensor, dict[str, Any]]


def has_average(parameter: Tensor, state: State) -> bool:
    return KEY in state.get(parameter, {})


def start_averages_(parameters: Iterable[Tensor], state: State) -> None:
    """Start averages at θ₀, in float32 at least: small steps must not be rounded away."""
    for parameter in parameters:
        if KEY not in state[parameter]:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            state[parameter][KEY] = parameter.detach().to(wide, copy=True)


def update_averages_(
    parameters: Iterable[Tensor], state: State, timescale: float, bad: Tensor | None
) -> None:
    """Update the averages: θ̄ ← ζ θ̄ + (1 - ζ) θ with ζ = exp(-1/τ), τ in updates.

    Args:
        bad: a boolean scalar; if true, there was no update and the averages stay. ``None``: there
            was one.
    """
    parameters = list(parameters)
    averages = [state[parameter][KEY] for parameter in parameters]
    current = [p.detach().to(a.dtype) for p, a in zip(parameters, averages, strict=True)]
    weight = -math.expm1(-1 / timescale)
    if averages and bad is None:
        torch._foreach_lerp_(averages, current, weight)
    elif averages and bad is not None:
        weights = [
            torch.where(moved(bad, a.device), a.new_zeros(()), a.new_full((), weight))
            for a in averages
        ]
        torch._foreach_lerp_(averages, current, weights)


def averages_of(parameters: Iterable[Tensor], state: State) -> dict[Tensor, Tensor]:
    """Return the averages of the parameters that have one."""
    return {p: state[p][KEY] for p in parameters if has_average(p, state)}


@contextmanager
def swapped_in(averages: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Replace parameters by their averages until the context ends."""
    kept = [(parameter, parameter.detach().clone()) for parameter in averages]
    try:
        with torch.no_grad():
            for parameter, average in averages.items():
                parameter.copy_(average)
        yield
    finally:
        with torch.no_grad():
            for parameter, own in kept:
                parameter.copy_(own)
