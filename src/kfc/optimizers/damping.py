"""The two dampings of appendix A.2, and how they adapt."""

from __future__ import annotations

# Beyond these the damping alone, or not at all, decides; and float32 would lose it.
LOWEST, HIGHEST = 1e-10, 1e10
# What λ is multiplied by when a step led to a loss that is not finite.
ALARM = 10.0


class ModelDamping:
    """λ, which makes up for what the quadratic model leaves out of the objective.

    Args:
        fixed: a number to stay at, or ``None``: adapted by the Levenberg-Marquardt rule.
        initial: where to begin.
        decrease: λ is multiplied by it if the model predicts well, divided if it predicts badly.
        period: adapt every so many steps.
    """

    def __init__(self, fixed: float | None, initial: float, decrease: float, period: int) -> None:
        self.adapts = fixed is None
        self.value = initial if fixed is None else fixed
        self.decrease = decrease
        self.period = period

    def is_due(self, step: int) -> bool:
        return self.adapts and step % self.period == 0

    def adapt(self, reduction_ratio: float) -> None:
        """By ρ, the change of the objective over what the model said."""
        if reduction_ratio > 0.75:
            self._set(self.value * self.decrease)
        elif reduction_ratio < 0.25:
            self._set(self.value / self.decrease)

    def raise_alarm(self) -> bool:
        """Much more of it, if that is possible; whether it was."""
        if not self.adapts or self.value >= HIGHEST:
            return False
        self._set(max(self.value, LOWEST) * ALARM)
        return True

    def resume_at(self, value: float) -> None:
        if self.adapts:
            self._set(value)

    def _set(self, value: float) -> None:
        self.value = min(max(value, LOWEST), HIGHEST)


class FactorDamping:
    """γ, which makes up for what the Kronecker factors leave out of the Fisher matrix.

    It enters the factors as (Ω + π γ I) ⊗ (Γ + γ/π I), which is γ² in all.

    Args:
        fixed: a number to stay at, or ``None``: the best of three is chosen again and again.
        initial: where to begin.
        factor: between neighbouring candidates, below 1.
        period: choose every so many steps.
    """

    def __init__(self, fixed: float | None, initial: float, factor: float, period: int) -> None:
        self.adapts = fixed is None
        self.value = initial if fixed is None else fixed
        self.factor = factor
        self.period = period

    def is_due(self, step: int) -> bool:
        return self.adapts and step % self.period == 0

    def resume_at(self, value: float) -> None:
        if self.adapts:
            self.value = min(max(value, LOWEST**0.5), HIGHEST**0.5)

    def candidates(self) -> list[float]:
        """The present value first."""
        others = [self.value * self.factor, self.value / self.factor]
        return [self.value, *(v for v in others if LOWEST**0.5 <= v <= HIGHEST**0.5)]
