"""The search space of the tuned ruleset: no arguments, then the same points for every method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kfc.lab.suite.methods import Method

# The factor of the learning rate by schedule, as a function of the fraction of the time limit
# that the run has used. It is 0 from some fraction on, where the run ends.
SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda used: 1.0,
    "linear to zero at half the limit": lambda used: max(0.0, 1 - 2 * used),
    "cosine to zero at the limit": lambda used: (1 + math.cos(math.pi * min(used, 1.0))) / 2,
}
CONSTANT, LINEAR, COSINE = SCHEDULES

# (multiple of the method's usual rate, schedule, whether weights decay)
POINTS = (
    (1.0, LINEAR, False),
    (3.0, LINEAR, False),
    (1 / 3, LINEAR, False),
    (1.0, COSINE, True),
    (1.0, CONSTANT, False),
    (3.0, COSINE, True),
    (1 / 3, CONSTANT, False),
    (1.0, LINEAR, True),
    (3.0, CONSTANT, True),
    (1 / 3, COSINE, False),
)


@dataclass(frozen=True)
class Setting:
    """The arguments of a method's constructor and the schedule of its learning rate."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = CONSTANT

    def __str__(self) -> str:
        given = [f"{name} {value:g}" for name, value in self.arguments.items()]
        return ", ".join([*given, self.schedule] if given else ["no arguments"])

    def factor(self, used: float) -> float:
        """Return the factor of the learning rate after this fraction of the time limit."""
        return SCHEDULES[self.schedule](used)


DEFAULTS = Setting()


def settings_of(method: Method, trials: int) -> Sequence[Setting]:
    """Return the first ``trials`` different settings of the search space for a method.

    The first one is that of the untuned ruleset, so that tuning includes the defaults. There may be
    fewer for a method that no schedule applies to.
    """
    settings = [DEFAULTS]
    for factor, schedule, decays in POINTS:
        arguments = {
            method.scaled: round_to_two_digits(factor * method.scale),
            "weight_decay": method.decay if decays else 0.0,
            **dict(method.fixed),
        }
        setting = Setting(arguments, CONSTANT if method.adapts else schedule)
        if setting not in settings:
            settings.append(setting)
    return settings[:trials]


def round_to_two_digits(value: float) -> float:
    return float(f"{value:.2g}")
