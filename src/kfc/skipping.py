"""Batches that gave something that is not finite: their steps change nothing, and are counted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


class SkippedSteps:
    """Counts steps without looking at the device each time.

    When nothing else makes the host wait for the device, a bad step is only noticed there: it is
    turned into a step of zero, and into a count on the device that is read later.
    """

    def __init__(self) -> None:
        self._known = 0
        self._warned = False
        # (steps, those of them that call for a warning), not read yet
        self._on_device: Tensor | None = None

    def add(self, step: int, ranks: Sequence[int] = (), *, quietly: bool) -> None:
        """One that the host knows of; with a warning the first time.

        Args:
            ranks: of several, those that are known to be the cause.
        """
        self._known += 1
        if not quietly:
            self._warn(f"step {step} was", named_ranks(ranks) if ranks else "the batch")

    def add_on_device(self, bad: Tensor, quietly: Tensor | None) -> None:
        """One step, if it was bad; ``bad`` and ``quietly`` are boolean scalars."""
        loud = bad if quietly is None else bad & ~quietly.to(bad.device)
        both = torch.stack([bad, loud]).long()
        self._on_device = both if self._on_device is None else self._on_device.to(both).add_(both)

    def count(self) -> int:
        """All so far; one look at the device."""
        if self._on_device is not None:
            steps, loud = self._on_device.tolist()
            self._on_device = None
            self._known += steps
            if loud:
                self._warn(
                    f"{loud} of the last steps were" if loud > 1 else "one of the last steps was"
                )
        return self._known

    def restore(self, count: int) -> None:
        self._known, self._on_device = count, None

    def _warn(self, what: str, cause: str = "the batch") -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{what} skipped: {cause} gave gradients, statistics or a Fisher norm that are not "
            "finite. The parameters are unchanged; further skipped steps are only counted, in "
            "diagnostics['skipped_steps'].",
            stacklevel=2,
        )


def named_ranks(ranks: Sequence[int]) -> str:
    """Rank 1, ranks 1 and 2, or one of them, if it is not known which."""
    if not ranks:
        return "a rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
