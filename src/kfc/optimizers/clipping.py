"""Clipping by the exact Fisher norm, evaluated no more often than it can matter.

ν = vᵀ F v + λ vᵀ v costs a forward-mode pass over a part of the batch. The same number under the
approximate Fisher matrix, vᵀ F̂ v = α² gᵀ F̂⁻¹ g, costs one inner product. The ratio of the two
changes slowly, so that a few exact values tell when ν is far from the limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kfc.checks import require_keys

# ν is taken to be below MARGIN times what the largest recent ratio predicts.
MARGIN = 2.0
# How many recent exact values are kept to predict from.
MEMORY = 5
# Exact values are never further apart than this.
LONGEST_GAP = 16


class FisherClip:
    """Decides by how much an update is shortened.

    Args:
        limit: C; updates with ν > C are divided by sqrt(ν / C).
        period: evaluate ν every so many steps; ``None``: whenever it may exceed the limit, and from
            time to time.
    """

    def __init__(self, limit: float, period: int | None) -> None:
        self.limit = limit
        self.period = period
        self.norm = float("nan")
        self.factor = 1.0
        self.evaluations = 0
        self._age = 0
        self._gap = 1
        self._ratios: deque[float] = deque(maxlen=MEMORY)

    def shorten(self, estimate: float, exact: Callable[[], float]) -> float:
        """What to multiply the update by; NaN if ν is not a finite number.

        Args:
            estimate: vᵀ F̂ v of the update.
            exact: evaluates ν.
        """
        self._age += 1
        self.factor = 1.0
        if self._needs_exact(estimate):
            norm = exact()
            if not math.isfinite(norm):
                return math.nan
            self._learn(estimate, norm)
            if norm > self.limit:
                self.factor = (self.limit / norm) ** 0.5
        return self.factor

    def _needs_exact(self, estimate: float) -> bool:
        if not self.evaluations:
            return True
        if self.period is not None:
            return self._age >= self.period
        return self._age >= self._gap or not MARGIN * self._predict(estimate) < self.limit

    def _predict(self, estimate: float) -> float:
        return max(self._ratios, default=float("inf")) * estimate

    def _learn(self, estimate: float, norm: float) -> None:
        """Look again later if ν was as predicted and well below the limit, else at once."""
        expected = self._predict(estimate)
        calm = MARGIN * norm < self.limit and norm < MARGIN * expected
        self._gap = min(2 * self._gap, LONGEST_GAP) if calm else 1
        if estimate > 0:
            self._ratios.append(norm / estimate)
        self.norm = norm
        self.evaluations += 1
        self._age = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "norm": self.norm,
            "factor": self.factor,
            "evaluations": self.evaluations,
            "age": self._age,
            "gap": self._gap,
            "ratios": list(self._ratios),
        }

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if it is not what ``state_dict`` gives."""
        expected = FisherClip(1.0, None).state_dict()
        require_keys("clip state", state, expected)
        for name, example in expected.items():
            fits = list if isinstance(example, list) else (int, float)
            if not isinstance(state[name], fits):
                raise ValueError(f"the clip state's {name} cannot be {state[name]!r}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.norm = state["norm"]
        self.factor = state["factor"]
        self.evaluations = state["evaluations"]
        self._age = state["age"]
        self._gap = state["gap"]
        self._ratios = deque(state["ratios"], maxlen=MEMORY)
