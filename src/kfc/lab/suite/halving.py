"""Successive halving: at each rung, the better half of the trials of a method continues, or two.

What continues is a function of the recorded curves alone, so an interrupted benchmark decides again
as it did before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kfc.lab.halving import best_of, half
from kfc.lab.suite.trial import Outcome

# The rungs, as fractions of the time limit.
RUNGS = (1 / 12, 1 / 4)
# Errors at a rung are noisy, and favour constant rates over schedules: two trials always finish.
FINALISTS = 2


def rank(outcome: Outcome, seconds: float) -> tuple[float, float]:
    """Return the key by which trials are ordered after ``seconds`` of training, best first.

    Trials that have reached the target come first, by time; the others by the best value of the
    metric; those that have diverged by then come last.
    """
    time = outcome.time if outcome.time <= seconds else math.inf
    diverged = outcome.end == "diverged" and outcome.seconds <= seconds
    return time, math.inf if diverged else outcome.best_until(seconds)


def stage(outcomes: Sequence[Outcome], limit: float) -> tuple[list[int], float]:
    """Return the trials that take part now, by index, and the seconds to which they train.

    Args:
        outcomes: of all trials of one method, in the order of the search space, which breaks ties.
        limit: the workload's time limit.
    """
    candidates = list(range(len(outcomes)))
    for rung in RUNGS:
        seconds = rung * limit
        if len(candidates) <= FINALISTS:
            break
        running = [outcomes[i] for i in candidates if not outcomes[i].end]
        if any(outcome.seconds < seconds for outcome in running):
            return candidates, seconds
        kept = best_of(
            [rank(outcomes[index], seconds) for index in candidates],
            max(FINALISTS, half(len(candidates))),
        )
        candidates = [candidates[place] for place in kept]
    return candidates, limit


def winner(outcomes: Sequence[Outcome], limit: float) -> int:
    """Return the index of the best trial."""
    candidates, _ = stage(outcomes, limit)
    return min(candidates, key=lambda index: rank(outcomes[index], limit))
