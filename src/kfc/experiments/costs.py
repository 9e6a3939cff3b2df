"""Where the time of updates goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from kfc.optimizers.base import CurvatureOptimizer


class Costs:
    """Seconds by part of an update, as the host sees them."""

    def __init__(self, optimizer: Any) -> None:
        self.training_seconds = 0.0
        self._optimizer = optimizer
        self._sums: dict[str, float] = {}
        self._updates = 0
        self._curvature_before: dict[str, float] = {}

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        start = perf_counter()
        yield
        elapsed = perf_counter() - start
        self.training_seconds += elapsed
        self._sums[part] = self._sums.get(part, 0.0) + elapsed
        self._updates += part == "data"

    def means_since_last_time(self) -> dict[str, float]:
        """Seconds per update by part; what curvature takes inside of them is taken out."""
        if not self._updates:
            return {}
        sums, count = self._sums, self._updates
        self._sums, self._updates = {}, 0
        if isinstance(self._optimizer, CurvatureOptimizer):
            totals = dict(self._optimizer.diagnostics["total_seconds"])
            ours = {k: v - self._curvature_before.get(k, 0.0) for k, v in totals.items()}
            self._curvature_before = totals
            in_forward = ours["statistics"]
            if "forward" in sums:
                sums["forward"] -= in_forward
                sums["optimizer"] -= sum(ours.values()) - in_forward
            else:
                sums["forward and backward"] -= sum(ours.values())
            sums.update(ours)
        return {part: value / count for part, value in sums.items()}
