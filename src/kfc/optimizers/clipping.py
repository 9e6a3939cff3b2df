"""Clipping by the exact Fisher norm, evaluated no more often than it can matter.

ν = vᵀ F v + λ vᵀ v costs a forward-mode pass over a part of the batch, and the host has to wait for
it. The same number under the approximate Fisher matrix, vᵀ F̂ v = α² ∇hᵀ F̂⁻¹ ∇h, costs one inner
product. The ratio of the two changes slowly, so that a few exact values tell when ν is far from
the limit; an update that turns out not to be, in between, is shortened by the estimate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kfc.checks import moved, require_keys

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
        period: evaluate ν every so many steps, and let the others pass; ``None``: as often as it
            takes to be sure.
    """

    def __init__(self, limit: float, period: int | None) -> None:
        self.limit = limit
        self.period = period
        self.norm = float("nan")
        self.evaluations = 0
        self._factor: float | Tensor = 1.0
        self._guards: int | Tensor = 0
        self._guards_seen = 0
        self._age = 0
        self._gap = 1
        self._ratios: deque[float] = deque(maxlen=MEMORY)

    @property
    def lowest_rate(self) -> float:
        """Evaluations per step when ν is far below the limit, or as the period says."""
        return 1 / (self.period or LONGEST_GAP)

    @property
    def factor(self) -> float:
        """What the last update was multiplied by."""
        return float(self._factor)

    @property
    def guards(self) -> int:
        """How many updates were shortened by the estimate."""
        return int(self._guards)

    def is_due(self) -> bool:
        """Whether ν has to be evaluated for the coming update."""
        if self.period is not None:
            return self._age + 1 >= self.period or not self.evaluations
        return self._age + 1 >= self._gap or not self._ratios

    def shorten(self, estimate: Tensor, norm: Tensor) -> float | None:
        """What to multiply an update by whose ν was evaluated; ``None`` if that is not finite.

        Args:
            estimate: vᵀ F̂ v of the update.
            norm: ν.
        """
        exact = norm.item()
        if not math.isfinite(exact):
            return None
        self._learn(estimate.item(), exact, self.guards)
        self._factor = (self.limit / exact) ** 0.5 if exact > self.limit else 1.0
        return self._factor

    def guard(self, estimate: Tensor) -> float | Tensor:
        """What to multiply an update by whose ν was not evaluated; decided on its device."""
        self._age += 1
        if self.period is not None:
            self._factor = 1.0
            return 1.0
        # Of a gradient that the curvature does not see, rounding may leave less than nothing.
        largest = MARGIN * max(self._ratios) * estimate.clamp_min(0)
        factor = (self.limit / largest).clamp(max=1).sqrt()
        guarded = (factor < 1).long()
        before = self._guards
        if isinstance(before, Tensor):
            before = moved(before, guarded.device)
        self._guards = guarded + before
        self._factor = factor
        return factor

    def _learn(self, estimate: float, norm: float, guards: int) -> None:
        """Look again later if ν was as predicted and well below the limit, else at once."""
        expected = max(self._ratios, default=math.inf) * estimate
        guarded = guards > self._guards_seen
        calm = MARGIN * norm < self.limit and norm < MARGIN * expected and not guarded
        self._gap = min(2 * self._gap, LONGEST_GAP) if calm else 1
        if 0 < estimate < math.inf:
            self._ratios.append(norm / estimate)
        self.norm = norm
        self.evaluations += 1
        self._guards = self._guards_seen = guards
        self._age = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "norm": self.norm,
            "factor": self.factor,
            "evaluations": self.evaluations,
            "guards": self.guards,
            "guards_seen": self._guards_seen,
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
        self.evaluations = state["evaluations"]
        self._factor = state["factor"]
        self._guards = state["guards"]
        self._guards_seen = state["guards_seen"]
        self._age = state["age"]
        self._gap = state["gap"]
        self._ratios = deque(state["ratios"], maxlen=MEMORY)
