"""When something is due: every so many steps."""

from __future__ import annotations

from dataclasses import dataclass

from kfc.checks import require_whole


@dataclass(frozen=True)
class Stretch:
    """A period that begins at 1 and grows with the run, up to a limit.

    Curvature changes fastest at the start: up to step ``2 * pace - 1`` every step is due, after
    that every ``step // pace``-th, so that what was computed is never older than about 1/pace of
    the run, and never older than ``limit`` steps.
    """

    limit: int
    pace: int = 12

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("pace", self.pace)):
            require_whole(f"Stretch's {name}", value)

    def at(self, step: int) -> int:
        """The period in force at a step."""
        return min(self.limit, max(1, step // self.pace))


Period = int | Stretch


def is_due(period: Period, step: int) -> bool:
    """Whether something with this period is due at a step; steps count from 1, the first is due."""
    length = period.at(step) if isinstance(period, Stretch) else period
    return step == 1 or step % length == 0


def require_period(name: str, period: object) -> None:
    """Raise an error that names the argument unless it is a period."""
    if not isinstance(period, Stretch):
        require_whole(name, period)
