"""Time spent in each part of an update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, process_time

from kfc.lab.method import Optimizer
from kfc.optimizers.base import CurvatureOptimizer


class Costs:
    """Accumulates wall-clock seconds by part of an update, measured on the host.

    Attributes:
        training_seconds: of all updates and of the first estimate of the factors.
        processor_seconds: the processor time of the same, over all threads of this process. With
            one thread it is the training time, without what other programs add to it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.training_seconds = self.processor_seconds = 0.0
        self._optimizer = optimizer
        self._sums: dict[str, float] = defaultdict(float)
        self._updates = 0
        self._curvature_before: dict[str, float] = {}
        self._places_before: dict[str, float] = {}

    def resume_at(self, training_seconds: float, processor_seconds: float) -> None:
        """Continue from the times of an earlier part of the run."""
        self.training_seconds = training_seconds
        self.processor_seconds = processor_seconds

    @contextmanager
    def measured(self, part: str) -> Iterator[None]:
        """Add the time spent within the context to a part."""
        before = self.training_seconds
        with self._counted():
            yield
        self._sums[part] += self.training_seconds - before
        self._updates += part == "data"

    @contextmanager
    def first_estimate(self) -> Iterator[None]:
        """Count the time of the first estimate of the factors, which is no part of an update.

        An estimate that fails is not counted.
        """
        with self._counted():
            yield
        if isinstance(self._optimizer, CurvatureOptimizer):
            self._places_before = dict(self._optimizer.engine.collector.clock.totals)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Add the time spent within the context to the totals, unless it raises."""
        start, processor = perf_counter(), process_time()
        yield
        self.training_seconds += perf_counter() - start
        self.processor_seconds += process_time() - processor

    def means_since_last_time(self) -> dict[str, float]:
        """Return the mean seconds per update by part since the last call.

        The time for curvature is listed by its own parts, and subtracted from those around it.
        """
        if not self._updates:
            return {}
        sums, count = dict(self._sums), self._updates
        self._sums.clear()
        self._updates = 0
        if isinstance(self._optimizer, CurvatureOptimizer):
            totals = dict(self._optimizer.diagnostics["total_seconds"])
            curvature = {k: v - self._curvature_before.get(k, 0.0) for k, v in totals.items()}
            self._curvature_before = totals
            if "forward" in sums:
                places = dict(self._optimizer.engine.collector.clock.totals)
                for place, seconds in places.items():
                    sums[place] -= seconds - self._places_before.get(place, 0.0)
                self._places_before = places
                sums["optimizer"] -= sum(curvature.values()) - curvature["statistics"]
            else:
                sums["forward and backward"] -= sum(curvature.values())
            sums.update(curvature)
        return {part: value / count for part, value in sums.items()}
