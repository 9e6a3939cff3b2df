"""How often statistics and inverses are renewed, and how long the parts of a step take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kfc.budget import Budget, now
from kfc.distributed import Workers
from kfc.periods import Period, Stretch, is_due

# Why these: see docs/choosing.md.
DEFAULT_STATISTICS_PERIOD = Stretch(10)
DEFAULT_INVERSE_PERIOD = Stretch(20)


class Schedule:
    """Periods, given or chosen from a budget after measuring a few steps.

    Args:
        overhead: the budget, if there is one.
        device: of the model; waited for while parts are measured.

    Attributes:
        clock_device: the device to wait for when looking at the clock, if any.
        seconds: by part, of the last time it was done, as the host sees them.
        total_seconds: of all times.
        norm_rate: how many exact Fisher norms an optimizer expects to take per step.
    """

    def __init__(
        self,
        statistics_period: Period | None,
        inverse_period: Period | None,
        overhead: float | None,
        device: torch.device,
        workers: Workers,
    ) -> None:
        self.statistics_period: Period = statistics_period or DEFAULT_STATISTICS_PERIOD
        self.inverse_period: Period = inverse_period or DEFAULT_INVERSE_PERIOD
        self.budget: Budget | None = None
        if overhead is not None:
            self.budget = Budget(overhead, statistics_period, inverse_period)
        self.clock_device: torch.device | None = None
        self.seconds: dict[str, float] = {}
        self.total_seconds: dict[str, float] = {}
        self.norm_rate = 0.0
        self._device = device
        self._workers = workers
        self._measured: dict[str, float] = {}
        self._set_periods()

    def statistics_are_due(self, step: int) -> bool:
        return is_due(self.statistics_period, step)

    def inverses_are_due(self, step: int) -> bool:
        return is_due(self.inverse_period, step)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Keep the seconds that a part of the step took."""
        start = now(self.clock_device)
        yield
        elapsed = now(self.clock_device) - start
        self.seconds[part] = elapsed
        self.total_seconds[part] = self.total_seconds.get(part, 0.0) + elapsed

    # Measuring

    def begin_measuring(self, started: float | None, spent: float) -> None:
        """When a step begins: what the user's own part of it took.

        Args:
            started: when its first forward pass began.
            spent: the seconds of gathering since then.
        """
        self.forget()
        if self.budget is not None and self.budget.measuring and started is not None:
            self._measured = {"plain": now(self.clock_device) - started - spent}

    def end_measuring(self, step: int, spent: float) -> None:
        """When a measured step ends: what was ours; and the periods, if it was the last."""
        if not self._measured:
            return
        assert self.budget is not None
        every_step = self.seconds["check"] + self.seconds["natural gradient"]
        self._measured["every_step"] = every_step + self.norm_rate * self.seconds.get("clip", 0.0)
        if spent:
            self._measured["statistics"] = spent + self.seconds["averages"]
        if self.inverses_are_due(step):
            self._measured["inverses"] = self.seconds["inverses"]
        # All ranks must come to the same periods.
        means = self._workers.mean(list(self._measured.values()))
        self.budget.add(dict(zip(self._measured, means, strict=True)))
        self._set_periods()

    def forget(self) -> None:
        """The step in progress is not to be measured."""
        self._measured = {}

    def _set_periods(self) -> None:
        if self.budget is not None:
            self.statistics_period, self.inverse_period = self.budget.periods()
            self.clock_device = self._device if self.budget.measuring else None

    def length(self, name: str, step: int) -> int:
        """Of the period of "statistics" or "inverse" in force at a step."""
        period = self.statistics_period if name == "statistics" else self.inverse_period
        return period.at(step) if isinstance(period, Stretch) else period

    def describe(self, step: int) -> dict[str, Any]:
        """The periods in force at a step; and why, if they follow from a budget."""
        lengths = {name: self.length(name, step) for name in ("statistics", "inverse")}
        return {**lengths, **({} if self.budget is None else self.budget.summary())}

    # State

    def state_dict(self) -> dict[str, Any] | None:
        """Of the budget, if there is one."""
        return None if self.budget is None else self.budget.state_dict()

    @staticmethod
    def check_state(state: Mapping[str, Any] | None) -> None:
        """Raise ``ValueError`` if it is not what ``state_dict`` gives."""
        if state is not None:
            Budget.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if self.budget is not None and state is not None:
            self.budget.load_state_dict(state)
            self._set_periods()
