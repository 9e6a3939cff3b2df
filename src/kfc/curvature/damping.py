"""The damping of a layer's block: one number for its weight, one for its bias."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

# Beyond this ratio of the two dampings, the coordinates cannot be scaled in float32.
LARGEST_RATIO = 1e12


class Damping(NamedTuple):
    """δ = λ + γ, weight decay plus damping, of a layer's weight and of its bias.

    The damped block is Ω ⊗ Γ + D ⊗ I, where the diagonal matrix D has δ_bias for the homogeneous
    coordinate and δ_weight for the others.
    """

    weight: float
    bias: float

    @classmethod
    def uniform(cls, damping: float) -> Damping:
        """Return the same damping for weight and bias."""
        return cls(damping, damping)

    def restricted(self, roles: Collection[str]) -> Damping:
        """Return the damping with that of the trained parameter for both, if only one is."""
        if "bias" not in roles:
            return Damping.uniform(self.weight)
        return self if "weight" in roles else Damping.uniform(self.bias)

    @property
    def bias_ratio(self) -> float:
        """s² = δ_bias / δ_weight, by which Kronecker factors scale the homogeneous coordinate.

        If either is zero there is no such scale. The ratio is then 1, so that δ_weight damps the
        bias too; likewise if they differ by a factor of more than 1e12.
        """
        if self.weight == self.bias or self.weight <= 0:
            return 1.0
        ratio = self.bias / self.weight
        return ratio if 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO else 1.0


UNDAMPED = Damping(0.0, 0.0)
UNKNOWN = Damping(math.nan, math.nan)
