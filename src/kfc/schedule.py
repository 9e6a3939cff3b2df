"""When statistics and inverses are due, and how long the parts of a step take."""

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch

from kfc._helpers import require_keys, require_number, require_whole

# Steps measured for a budget. The first warms up and counts only if it is the only one.
MEASURED_STEPS = 6
# The longest period a budget may choose.
LONGEST_PERIOD = 200


@dataclass(frozen=True)
class Stretch:
    """A period that starts at 1 and grows with the run, up to a limit.

    Curvature changes fastest at the start. The period is 1 up to step ``2 * pace - 1``, then
    ``step // pace``, so that nothing in use is older than about 1/pace of the run.

    A period that grows by one is due at least once in every ``pace`` steps until it reaches its
    limit.
    If the limit is much larger than the pace, let the period double instead.

    Args:
        limit: the longest period, in steps.
        pace: how slowly the period grows.
        doubling: round ``step // pace`` down to a power of two.
    """

    limit: int
    pace: int = 12
    doubling: bool = False

    def __post_init__(self) -> None:
        require_whole("Stretch's limit", self.limit)
        require_whole("Stretch's pace", self.pace)

    def at(self, step: int) -> int:
        """Return the period in force at a step."""
        period = max(1, step // self.pace)
        if self.doubling:
            period = 1 << (period.bit_length() - 1)
        return min(self.limit, period)


Period = int | Stretch


@dataclass(frozen=True)
class Periods:
    """Fixed or stretching periods of statistics and inverses, in steps.

    Args:
        statistics: T_s, the period of the factors' statistics: a number or a ``Stretch``.
        inverse: T_f, the period of the inverses: a number or a ``Stretch``.
        overhead: what is due is postponed if curvature (refreshes, natural gradients and exact
            Fisher norms) would cost more than this share of your own forward and backward passes,
            on average; at step t, 1 + 10 / t times as much is allowed. Costs are multiply-adds,
            counted from the shapes of the layers, so that they do not depend on the speed of the
            machine. ``None``: nothing is postponed.
    """

    statistics: Period = Stretch(10)
    inverse: Period = Stretch(20)
    overhead: float | None = None

    def __post_init__(self) -> None:
        if self.overhead is not None:
            require_number("overhead", self.overhead, positive=True)
        require_period("statistics", self.statistics)
        require_period("inverse", self.inverse)


@dataclass(frozen=True)
class Budget:
    """Periods chosen so that curvature adds at most ``overhead`` to the time of a step.

    The first six steps are measured. Then the shortest periods are chosen that satisfy

        every_step + statistics / T_s + inverses / T_f  ≤  overhead · plain

    where ``statistics`` and ``inverses`` are the times of one refresh, ``every_step`` is the time
    of the other work on curvature and ``plain`` that of a step without curvature. (Appendix A.3 of
    the paper does this by hand.) ``diagnostics["periods"]`` shows the choice.

    Args:
        overhead: the allowed overhead relative to a step without curvature: 0.25 for a quarter.
        statistics: a fixed period T_s; ``None``: chosen.
        inverse: a fixed period T_f; ``None``: chosen. At least one of them must be chosen.
    """

    overhead: float = 0.25
    statistics: Period | None = None
    inverse: Period | None = None

    def __post_init__(self) -> None:
        require_number("overhead", self.overhead, positive=True)
        require_period("statistics", 1 if self.statistics is None else self.statistics)
        require_period("inverse", 1 if self.inverse is None else self.inverse)
        if self.statistics is not None and self.inverse is not None:
            raise ValueError(
                f"the overhead of a budget has no effect with two fixed periods; pass "
                f"schedule=kfc.Periods({self.statistics}, {self.inverse}), or fix only one of them"
            )


def require_period(name: str, period: object) -> None:
    """Raise an error that names the argument unless it is a period."""
    if not isinstance(period, Stretch):
        require_whole(name, period)


def length(period: Period, step: int) -> int:
    """Return the period in force at a step, in steps."""
    return period.at(step) if isinstance(period, Stretch) else period


def is_due(period: Period, step: int) -> bool:
    """Return whether a step, counted from 1, is due; the first always is."""
    return step == 1 or step % length(period, step) == 0


def longest(period: Period) -> int:
    """Return the period once it has finished stretching."""
    return period.limit if isinstance(period, Stretch) else period


def now(device: torch.device | None) -> float:
    """Return the time in seconds, after waiting for the device if one is given."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()


class Seconds(NamedTuple):
    """The seconds that the parts of a step take.

    Attributes:
        plain: forward and backward, without curvature.
        every_step: what every step adds: natural gradient, checks, its share of exact norms.
        statistics: gathering statistics once.
        inverses: computing all inverses once.
    """

    plain: float
    every_step: float
    statistics: float
    inverses: float

    def overhead(self, statistics_period: Period, inverse_period: Period) -> float:
        """Return the overhead relative to the plain step once the periods have stretched."""
        gathering = self.statistics / longest(statistics_period)
        inverting = self.inverses / longest(inverse_period)
        return (self.every_step + gathering + inverting) / self.plain


def periods_within(seconds: Seconds, budget: Budget) -> Periods:
    """Return the shortest periods that keep within the budget.

    T_s + T_f is as small as the budget allows, but inverses are not refreshed more often than the
    statistics they depend on.
    """
    left = budget.overhead * seconds.plain - seconds.every_step
    gathering, inverting = seconds.statistics, seconds.inverses
    if budget.statistics is not None:
        left -= gathering / longest(budget.statistics)
        return Periods(budget.statistics, _shortest(inverting, left))
    if budget.inverse is not None:
        left -= inverting / longest(budget.inverse)
        return Periods(_shortest(gathering, left), budget.inverse)
    if inverting <= gathering:
        together = _shortest(gathering + inverting, left)
        return Periods(together, together)
    # The pair with gathering / T_s + inverting / T_f = left that has the smallest sum.
    first = _shortest(gathering + math.sqrt(gathering * inverting), left)
    return Periods(first, max(first, _shortest(inverting, left - gathering / first)))


def _shortest(work: float, allowance: float) -> int:
    """Return the shortest period at which the work per step is within the allowance."""
    if work == 0:
        return 1
    if allowance <= 0:
        return LONGEST_PERIOD
    return min(LONGEST_PERIOD, max(1, math.ceil(work / allowance)))


class Timed:
    """A context that adds its time to a schedule, unless it fails.

    Several are entered in every step, and a generator takes twice as long.
    """

    __slots__ = ("_continued", "_part", "_schedule", "_start")

    def __init__(self, schedule: "Schedule", part: str, continued: bool) -> None:
        self._schedule, self._part, self._continued = schedule, part, continued

    def __enter__(self) -> None:
        self._start = now(self._schedule.clock_device)

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            elapsed = now(self._schedule.clock_device) - self._start
            self._schedule.add_seconds(self._part, elapsed, continued=self._continued)


class Schedule:
    """The periods in force, the times of a step's parts, and the measurements for a budget.

    Args:
        options: the periods, or the budget they are chosen from.
        device: the model's device, which is waited for while parts are measured.
        mean_over_ranks: averages numbers over all ranks, so that they choose the same periods.
        norm_rate: the expected number of exact Fisher norms per step.

    Attributes:
        options, budget: the options; the budget, if they are one.
        periods: the periods in force.
        seconds: the time of each part when it was last done, as the host sees it.
        total_seconds: the time of each part since the start.
    """

    def __init__(
        self,
        options: Periods | Budget,
        device: torch.device,
        mean_over_ranks: Callable[[Sequence[float]], list[float]],
        norm_rate: float,
    ) -> None:
        self.options = options
        self.budget = options if isinstance(options, Budget) else None
        self.seconds: dict[str, float] = {}
        self.total_seconds: dict[str, float] = {}
        self._device = device
        self._mean_over_ranks = mean_over_ranks
        self._norm_rate = norm_rate
        # The measurements of the step in progress and of the steps before, until the choice.
        self._current: dict[str, float] = {}
        self._gathering = 0.0
        self._samples: dict[str, list[float]] = {}
        self._measured: Seconds | None = None
        self.periods = self._periods(options)

    def _periods(self, options: Periods | Budget) -> Periods:
        """Return the periods in force; while steps are measured, what may be chosen is due."""
        if isinstance(options, Periods):
            return options
        if self._measured is None:
            return Periods(options.statistics or 1, options.inverse or 1)
        return periods_within(self._measured, options)

    @property
    def measuring(self) -> bool:
        return self.budget is not None and self._measured is None

    @property
    def clock_device(self) -> torch.device | None:
        """The device to wait for when reading the clock, while parts are measured."""
        return self._device if self.measuring else None

    def statistics_are_due(self, step: int) -> bool:
        return is_due(self.periods.statistics, step)

    def inverses_are_due(self, step: int) -> bool:
        return is_due(self.periods.inverse, step)

    def lengths(self, step: int) -> dict[str, int]:
        """Return the periods in force at a step, in steps."""
        return {
            "statistics": length(self.periods.statistics, step),
            "inverse": length(self.periods.inverse, step),
        }

    def timed(self, part: str, *, continued: bool = False) -> "Timed":
        """Return a context that records the seconds that a part of the step takes.

        Args:
            continued: add them to those that the part has taken in this step already.
        """
        return Timed(self, part, continued)

    def add_seconds(self, part: str, elapsed: float, *, continued: bool = False) -> None:
        self.seconds[part] = elapsed + (self.seconds.get(part, 0.0) if continued else 0.0)
        self.total_seconds[part] = self.total_seconds.get(part, 0.0) + elapsed

    # Measuring for a budget

    def begin_measuring(self, started: float | None, gathering: float) -> None:
        """Measure what the user's own part of the step took.

        Args:
            started: when the step's first forward pass began; ``None``: the step is not measured.
            gathering: seconds of gathering statistics since then.
        """
        self._current, self._gathering = {}, gathering
        if self.measuring and started is not None:
            self._current = {"plain": now(self.clock_device) - started - gathering}

    def end_measuring(self, step: int) -> None:
        """Measure our part of the step, and choose the periods after the last measured step."""
        if not self._current:
            return
        assert self.budget is not None
        every_step = self.seconds["check"] + self.seconds["natural gradient"]
        self._current["every_step"] = every_step + self._norm_rate * self.seconds.get("clip", 0.0)
        if self.statistics_are_due(step):
            self._current["statistics"] = self._gathering + self.seconds["averages"]
        if self.inverses_are_due(step):
            self._current["inverses"] = self.seconds["inverses"]
        means = self._mean_over_ranks(list(self._current.values()))
        for name, value in zip(self._current, means, strict=True):
            self._samples.setdefault(name, []).append(value)
        self._current = {}
        if len(self._samples["plain"]) == MEASURED_STEPS:
            self._choose(self.budget)

    def _choose(self, budget: Budget) -> None:
        samples = self._samples.items()
        medians = {name: statistics.median(values[1:] or values) for name, values in samples}
        self._measured = Seconds(*(medians.get(name, 0.0) for name in Seconds._fields))
        self.periods = self._periods(budget)
        self._samples = {}
        expected = self._measured.overhead(self.periods.statistics, self.periods.inverse)
        if expected > budget.overhead * (1 + 1e-6):
            warnings.warn(
                f"an overhead of {budget.overhead:g} cannot be kept: {expected:.2f} is expected "
                f"with {self.periods}. Steps this short need a larger batch or budget",
                stacklevel=2,
            )

    def describe(self, step: int) -> dict[str, Any]:
        """Return the periods in force at a step and, for a budget, what they were chosen by."""
        if self.budget is None:
            return dict(self.lengths(step))
        measured = self._measured
        expected = measured and measured.overhead(self.periods.statistics, self.periods.inverse)
        return {
            **self.lengths(step),
            "budget": self.budget.overhead,
            "expected_overhead": expected,
            "measured_seconds": measured and measured._asdict(),
        }

    # State

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the budget, if there is one."""
        if self.budget is None:
            return None
        return {
            "overhead": self.budget.overhead,
            "samples": {name: list(values) for name, values in self._samples.items()},
            "seconds": None if self._measured is None else list(self._measured),
        }

    @staticmethod
    def check_state(state: Mapping[str, Any] | None) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict`` returns."""
        if state is None:
            return
        require_keys("budget state", state, ("overhead", "samples", "seconds"))
        require_number("the budget state's overhead", state["overhead"], positive=True)
        seconds, samples = state["seconds"], state["samples"]
        if seconds is not None:
            if not isinstance(seconds, list) or len(seconds) != len(Seconds._fields):
                raise ValueError(f"the budget state's seconds must be {Seconds._fields}")
            for name, value in zip(Seconds._fields, seconds, strict=True):
                require_number(f"the budget state's {name}", value, positive=name == "plain")
        if not isinstance(samples, Mapping) or not samples.keys() <= set(Seconds._fields):
            raise ValueError(f"the budget state's samples must be of {Seconds._fields}")
        plain = samples.get("plain")
        most = min(MEASURED_STEPS - 1, len(plain) if isinstance(plain, list) else 0)
        for name, values in samples.items():
            if not isinstance(values, list) or len(values) > most:
                raise ValueError(f"the budget state's samples of {name} must be at most {most}")
            for value in values:
                require_number(f"the budget state's samples of {name}", value)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the choice made for the same budget; for another budget, measure again."""
        if self.budget is None or state is None or state["overhead"] != self.budget.overhead:
            return
        self._samples = {name: list(values) for name, values in state["samples"].items()}
        self._measured = None if state["seconds"] is None else Seconds(*state["seconds"])
        self.periods = self._periods(self.budget)
