"""Successive halving: which of several candidates continue after a trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def best_of(keys: Sequence[Any], count: int) -> list[int]:
    """Return the indices of the ``count`` smallest keys, in order; of equal ones, the first."""
    ordered = sorted(range(len(keys)), key=keys.__getitem__)
    return sorted(ordered[:count])


def half(count: int, times: int = 1) -> int:
    """Return the number of candidates that are left after halving so many times, at least 1."""
    return math.ceil(count / (1 << times))
