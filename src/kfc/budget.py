"""Periods from a budget: how often statistics and inverses can be renewed for a given overhead.

Appendix A.3 of the paper picks T_s and T_f with a profiler, so that an epoch costs less than twice
SGD's. Here a few steps are measured, and the periods follow from the budget b by

    every_step + statistics / T_s + inverses / T_f  ≤  b · plain
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch

from kfc.checks import require_keys, require_whole
from kfc.periods import Period, Stretch

# How many steps are measured; the first, which warms up, counts only if there is nothing else.
MEASURED_STEPS = 6
# No period is longer, however small the budget.
LONGEST_PERIOD = 200


def now(device: torch.device | None) -> float:
    """The time in seconds; if a device is given, when it has done all that it was told to do."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()


class Seconds(NamedTuple):
    """What the parts of a step take.

    Attributes:
        plain: forward and backward, as without curvature.
        every_step: what every step adds: natural gradient, checks, its share of exact norms.
        statistics: when they are gathered.
        inverses: when they are renewed.
    """

    plain: float
    every_step: float
    statistics: float
    inverses: float

    def overhead(self, statistics_period: Period, inverse_period: Period) -> float:
        """Over the plain step, expected once periods that stretch have done so."""
        extra = self.every_step
        extra += self.statistics / longest(statistics_period)
        extra += self.inverses / longest(inverse_period)
        return extra / self.plain


def longest(period: Period) -> int:
    return period.limit if isinstance(period, Stretch) else period


def periods_within(
    seconds: Seconds,
    overhead: float,
    statistics_period: Period | None = None,
    inverse_period: Period | None = None,
) -> tuple[Period, Period]:
    """The shortest periods (T_s, T_f) that keep within the overhead; those given stay.

    T_s + T_f is as small as the budget allows, but inverses are not renewed more often than the
    statistics that they are made of.
    """
    left = overhead * seconds.plain - seconds.every_step
    gathering, inverting = seconds.statistics, seconds.inverses
    if statistics_period is not None:
        left -= gathering / longest(statistics_period)
        return statistics_period, inverse_period or _whole(inverting, left)
    if inverse_period is not None:
        left -= inverting / longest(inverse_period)
        return _whole(gathering, left), inverse_period
    both = math.sqrt(gathering * inverting)
    if inverting <= gathering:
        together = _whole(gathering + inverting, left)
        return together, together
    # Of all with gathering / T_s + inverting / T_f = left, these have the smallest sum.
    first = _whole(gathering + both, left)
    return first, max(first, _whole(inverting, left - gathering / first))


def _whole(work: float, allowance: float) -> int:
    """The shortest period at which the work per step is within the allowance."""
    if work == 0:
        return 1
    if allowance <= 0:
        return LONGEST_PERIOD
    return min(LONGEST_PERIOD, max(1, math.ceil(work / allowance)))


@dataclass
class Budget:
    """Measures the first steps, then chooses.

    Attributes:
        overhead: b, relative to the plain step.
        statistics_period, inverse_period: those that the user has set.
        samples: measured seconds by part of :class:`Seconds`, until the choice is made.
        seconds: the medians that the choice was made by.
        chosen: the periods, once chosen.
    """

    overhead: float
    statistics_period: Period | None
    inverse_period: Period | None
    samples: dict[str, list[float]] = field(default_factory=dict)
    seconds: Seconds | None = None
    chosen: tuple[int, int] | None = None

    @property
    def measuring(self) -> bool:
        return self.chosen is None

    def periods(self) -> tuple[Period, Period]:
        """In force now: while measuring, all that may be chosen is done in every step."""
        chosen = self.chosen or (1, 1)
        return self.statistics_period or chosen[0], self.inverse_period or chosen[1]

    def add(self, parts: Mapping[str, float]) -> None:
        """Take in the seconds of what a step did; after the last one, choose."""
        for name, value in parts.items():
            self.samples.setdefault(name, []).append(value)
        if len(self.samples["plain"]) < MEASURED_STEPS:
            return
        medians = {
            name: statistics.median(values[1:] or values) for name, values in self.samples.items()
        }
        self.seconds = Seconds(*(medians.get(name, 0.0) for name in Seconds._fields))
        pair = periods_within(
            self.seconds, self.overhead, self.statistics_period, self.inverse_period
        )
        self.chosen = (longest(pair[0]), longest(pair[1]))
        self.samples = {}
        expected = self.seconds.overhead(*pair)
        if expected > self.overhead * (1 + 1e-6):
            warnings.warn(
                f"an overhead of {self.overhead:g} cannot be kept: {expected:.2f} is expected with "
                f"the periods {self.chosen}. Steps this short need a larger batch or budget",
                stacklevel=2,
            )

    def summary(self) -> dict[str, Any]:
        """For ``diagnostics``."""
        if self.seconds is None:
            return {"budget": self.overhead, "expected_overhead": None, "measured_seconds": None}
        return {
            "budget": self.overhead,
            "expected_overhead": self.seconds.overhead(*self.periods()),
            "measured_seconds": self.seconds._asdict(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "overhead": self.overhead,
            "samples": {name: list(values) for name, values in self.samples.items()},
            "seconds": None if self.seconds is None else list(self.seconds),
            "chosen": None if self.chosen is None else list(self.chosen),
        }

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if it is not what ``state_dict`` gives."""
        require_keys("budget state", state, Budget(0.0, None, None).state_dict())
        for period in state["chosen"] or ():
            require_whole("the budget state's period", period)
        if (state["chosen"] is None) != (state["seconds"] is None):
            raise ValueError("the budget state has a choice without its reason, or the reverse")
        for name, parts in (("chosen", 2), ("seconds", len(Seconds._fields))):
            if state[name] is not None and len(state[name]) != parts:
                raise ValueError(f"the budget state's {name} must have {parts} parts")
        samples = state["samples"]
        if not isinstance(samples, Mapping) or not set(samples) <= set(Seconds._fields):
            raise ValueError(f"the budget state's samples cannot be {samples!r}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the choice made for the same budget; for another, measure anew."""
        if state["overhead"] != self.overhead:
            return
        self.samples = {name: list(values) for name, values in state["samples"].items()}
        self.seconds = None if state["seconds"] is None else Seconds(*state["seconds"])
        self.chosen = None if state["chosen"] is None else (state["chosen"][0], state["chosen"][1])
