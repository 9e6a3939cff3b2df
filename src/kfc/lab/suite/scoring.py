"""Scores of methods from their times to target, by the rules of AlgoPerf.

See Dahl et al., "Benchmarking Neural Network Training Algorithms" (2023), and Dolan and Moré,
"Benchmarking optimization software with performance profiles" (2002). A time is ∞ if the method
did not reach the target within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

# Seconds by workload and method, or ratios of them.
Table = Mapping[str, Mapping[str, float]]

LARGEST_RATIO = 4.0


def median_time(times: Sequence[float]) -> float:
    """Return the median over seeds; ∞ if at least half of the seeds did not reach the target."""
    return median(times)


def ratios_to_best(times: Table) -> dict[str, dict[str, float]]:
    """Return each method's time relative to the fastest method's on the same workload.

    A workload whose target no method reached has ratios of ∞.
    """
    ratios = {}
    for workload, row in times.items():
        best = min(row.values())
        ratios[workload] = {
            method: time / best if math.isfinite(time) else math.inf for method, time in row.items()
        }
    return ratios


def of_method(table: Table, method: str) -> list[float]:
    """Return a method's values on all workloads."""
    return [row[method] for row in table.values()]


def profile(ratios: Iterable[float], tau: float) -> float:
    """Return ρ(τ), the fraction of workloads on which the method's ratio is at most τ."""
    reached = [ratio <= tau for ratio in ratios]
    return sum(reached) / len(reached)


def profile_steps(
    ratios: Sequence[float], largest: float = LARGEST_RATIO
) -> tuple[list[float], list[float]]:
    """Return τ and ρ(τ) at the steps of the profile between 1 and ``largest``, ends included."""
    taus = [1.0, *sorted(ratio for ratio in ratios if 1 < ratio < largest), largest]
    return taus, [profile(ratios, tau) for tau in taus]


def score(ratios: Sequence[float], largest: float = LARGEST_RATIO) -> float:
    """Return ∫ρ(τ)dτ from 1 to ``largest``, divided by the length of the interval.

    It is 1 for a method that is the fastest on every workload. A workload contributes
    ``largest - ratio`` to the integral if the ratio is at most ``largest``.
    """
    return sum(max(0.0, largest - ratio) for ratio in ratios) / ((largest - 1) * len(ratios))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean; ∞ if any value is."""
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def bounded_ratios(times: Table, limits: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return ratios to the fastest, with a lower bound where a target was not reached.

    There, the time counts as the limit or ``LARGEST_RATIO`` times the fastest, whichever is
    shorter. Workloads whose target no method reached are left out.
    """
    bounded = {}
    for name, row in times.items():
        best = min(row.values())
        if math.isfinite(best):
            longest = min(limits[name], LARGEST_RATIO * best)
            bounded[name] = {m: t if math.isfinite(t) else longest for m, t in row.items()}
    return ratios_to_best(bounded)
