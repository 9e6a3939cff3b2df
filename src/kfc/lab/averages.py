"""Averaged parameters, for every optimizer alike."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from kfc.optimizers.averaging import (
    KEY,
    averages_of,
    start_averages_,
    swapped_in,
    update_averages_,
)


class Averages:
    """The mean of the latest iterates at first, later an exponential average of timescale τ.

    The running statistics of batch normalisation are averaged like parameters.

    Args:
        timescale: τ in updates.
        fraction: the timescale divided by the number of updates so far, until that is τ. With 1,
            the average is at first the plain mean of all iterates, with θ₀.
    """

    def __init__(self, model: nn.Module, timescale: float, fraction: float = 1.0) -> None:
        self._buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        self._tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **self._buffers}
        self._timescale, self._fraction = timescale, fraction
        self._state: dict[Tensor, dict[str, Any]] = {t: {} for t in self._tensors.values()}
        start_averages_(self._tensors.values(), self._state)

    def update(self, count: int) -> None:
        """Include the parameters after update ``count``, 1 for the first."""
        # With f = 1, exp(-1 / (k + 1/2)) is k / (k + 1) up to terms of third order: the plain mean.
        timescale = min(self._timescale, self._fraction * count + 0.5)
        update_averages_(self._tensors.values(), self._state, timescale, None)

    def swapped_in(self) -> AbstractContextManager[None]:
        """Replace the model's parameters by their averages until the context ends."""
        return swapped_in(averages_of(self._tensors.values(), self._state))

    def of_buffers(self) -> list[Tensor]:
        """Return the averages of the model's buffers."""
        return [self._state[buffer][KEY] for buffer in self._buffers.values()]

    def state_dict(self) -> dict[str, Tensor]:
        return {name: self._state[tensor][KEY] for name, tensor in self._tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors.items():
            self._state[tensor][KEY].copy_(state[name])
