"""The two dampings of appendix A.2, which adapt."""

from kfc.optimizers.options import Adaptation

# Outside these bounds the damping dominates or vanishes, and float32 would lose it.
LOWEST, HIGHEST = 1e-10, 1e10
# The factor of λ after a step that led to a loss that is not finite.
ALARM = 10.0


class ModelDamping:
    """λ, which accounts for what the quadratic model leaves out of the objective.

    It is fixed, or adapts by the Levenberg-Marquardt rule.
    """

    def __init__(self, options: Adaptation) -> None:
        fixed = options.model_damping
        self.adapts = fixed is None
        self.value = options.initial_model_damping if fixed is None else fixed
        self.decrease = options.model_damping_decrease
        self.period = options.model_damping_period

    def is_due(self, step: int) -> bool:
        return self.adapts and step % self.period == 0

    def adapt(self, reduction_ratio: float) -> None:
        """Adapt to ρ, the change of the objective over the predicted change."""
        if reduction_ratio > 0.75:
            self._set(self.value * self.decrease)
        elif reduction_ratio < 0.25:
            self._set(self.value / self.decrease)

    def raise_alarm(self) -> bool:
        """Raise λ tenfold if possible; return whether it was."""
        if not self.adapts or self.value >= HIGHEST:
            return False
        self._set(max(self.value, LOWEST) * ALARM)
        return True

    def reset(self, value: float) -> None:
        """Return to an earlier value."""
        self.value = value

    def resume_at(self, value: float) -> None:
        """Continue from a saved value, unless λ is fixed."""
        if self.adapts:
            self._set(value)

    def _set(self, value: float) -> None:
        self.value = min(max(value, LOWEST), HIGHEST)


class FactorDamping:
    """γ, which accounts for what the Kronecker factors leave out of the Fisher matrix.

    It enters the factors as (Ω + π γ I) ⊗ (Γ + γ/π I), which is γ² in all. It is fixed, or the best
    of three candidates is chosen periodically.

    Args:
        initial: the initial γ if it adapts.
    """

    def __init__(self, options: Adaptation, initial: float) -> None:
        self.adapts = options.factor_damping is None
        self.value = initial if options.factor_damping is None else options.factor_damping
        self.factor = options.factor_damping_factor
        self.period = options.factor_damping_period

    def is_due(self, step: int) -> bool:
        return self.adapts and step % self.period == 0

    def reset(self, value: float) -> None:
        """Change γ."""
        self.value = value

    def resume_at(self, value: float) -> None:
        """Continue from a saved value, unless γ is fixed."""
        if self.adapts:
            self.value = min(max(value, LOWEST**0.5), HIGHEST**0.5)

    def candidates(self) -> list[float]:
        """Return the candidates, the present value first."""
        others = [self.value * self.factor, self.value / self.factor]
        return [self.value, *(v for v in others if LOWEST**0.5 <= v <= HIGHEST**0.5)]
