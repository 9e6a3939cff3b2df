"""Averaged parameters for any optimizer, so that all are treated alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kfc.optimizers.averaging import KEY, start_averages, swapped_in, update_averages


class Averages:
    """The mean of all iterates at first, later an exponential average of timescale τ.

    Batch normalisation's running statistics are averaged too: they belong to the iterates.

    Args:
        timescale: τ, in updates.
    """

    def __init__(self, model: nn.Module, timescale: float) -> None:
        self._buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        self._tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **self._buffers}
        self._timescale = timescale
        self._state: dict[Tensor, dict[str, Any]] = {t: {} for t in self._tensors.values()}
        start_averages(self._tensors.values(), self._state)

    def update(self, count: int) -> None:
        """Take up the parameters after update ``count``, 1 for the first."""
        # exp(-1 / (k + 1/2)) is k / (k + 1) but for terms of third order: the plain mean.
        timescale = min(self._timescale, count + 0.5)
        update_averages(self._tensors.values(), self._state, timescale, None)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        with swapped_in(self._tensors.values(), self._state):
            yield

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """For good."""
        for tensor in self._tensors.values():
            tensor.copy_(self._state[tensor][KEY])

    def of_buffers(self) -> list[Tensor]:
        return [self._state[buffer][KEY] for buffer in self._buffers.values()]

    def state_dict(self) -> dict[str, Tensor]:
        return {name: self._state[tensor][KEY] for name, tensor in self._tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors.items():
            self._state[tensor][KEY].copy_(state[name])
