"""The state of torch's random number generators that belongs to one run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kfc.fisher.calls import accelerators_of, forked_random_state, get_random_state


class RandomState:
    """The generators' state of one run on one rank, independent of other runs in the process.

    Ranks draw different numbers, so that dropout differs between them; the state of every rank
    follows from that of rank 0, which is the one saved.
    """

    def __init__(self, model: nn.Module, rank: int, seed: int) -> None:
        self._accelerators = accelerators_of(model)
        self._rank = rank
        self.load(self._seeded(seed))

    def _seeded(self, seed: int) -> list[Tensor]:
        with forked_random_state(self._accelerators):
            torch.manual_seed(seed)
            return get_random_state(self._accelerators)

    def load(self, of_rank_0: list[Tensor]) -> None:
        """Continue from a state of rank 0."""
        self._saved: list[Tensor] | None = of_rank_0  # None while the state is active
        if self._rank > 0:
            digest = hashlib.sha256(f"rank {self._rank}".encode())
            for state in of_rank_0:
                digest.update(state.numpy().tobytes())
            self._saved = self._seeded(int.from_bytes(digest.digest()[:8], "big") >> 1)

    def current(self) -> list[Tensor]:
        """Return the state, for a checkpoint."""
        return self._saved or get_random_state(self._accelerators)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let torch draw from this state within the context."""
        with forked_random_state(self._accelerators, self._saved):
            self._saved = None
            try:
                yield
            finally:
                self._saved = get_random_state(self._accelerators)
