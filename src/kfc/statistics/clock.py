"""The time that gathering statistics takes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kfc.schedule import now

# Where the time is spent: in the user's passes, or in ``step()``.
PLACES = ("forward", "backward", "optimizer")


class Clock:
    """Measures the seconds of gathering statistics.

    Attributes:
        device: the device to wait for when reading the clock; ``None``: do not wait.
        started: when the first forward pass since the last step began.
        spent: the seconds since the last step.
        totals: the seconds since the start, by where they were spent.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.started: float | None = None
        self.spent = 0.0
        self.totals = dict.fromkeys(PLACES, 0.0)

    def begin_step(self, device: torch.device | None) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Forget the times since the last step."""
        self.spent, self.started = 0.0, None

    def start(self) -> None:
        """Record that the first forward pass of a step begins."""
        self.started = now(self.device)

    def add(self, place: str, seconds: float) -> None:
        self.spent += seconds
        self.totals[place] += seconds

    @contextmanager
    def timed(self, place: str) -> Iterator[None]:
        """Add the time spent within the context."""
        start = now(self.device)
        yield
        self.add(place, now(self.device) - start)
