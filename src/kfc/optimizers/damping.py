"""The two dampings of appendix A.2, which adapt."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kfc._helpers import require_keys, require_number
from kfc.optimizers.options import Adaptation

# Outside these bounds the damping dominates or vanishes, and float32 would lose it.
LOWEST, HIGHEST = 1e-10, 1e10
# The factor of λ after a step that led to a loss that is not finite.
FACTOR_AFTER_FAILURE = 10.0


class ModelDamping:
    """λ, which accounts for what the quadratic model leaves out of the objective.

    It is fixed, or adapts by the Levenberg-Marquardt rule.
    """

    highest = HIGHEST

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

    def raise_after_failure(self) -> bool:
        """Raise λ tenfold if possible; return whether it was."""
        if not self.adapts or self.value >= HIGHEST:
            return False
        self._set(max(self.value, LOWEST) * FACTOR_AFTER_FAILURE)
        return True

    def snapshot(self) -> float:
        """Return the state, to be passed to ``restore()``."""
        return self.value

    def restore(self, value: float) -> None:
        """Return to an earlier state."""
        self.value = value

    def resume_at(self, value: float) -> None:
        """Continue from a saved state, unless λ is fixed."""
        if self.adapts:
            self._set(value)

    def _set(self, value: float) -> None:
        self.value = min(max(value, LOWEST), self.highest)


class FactorDamping:
    """γ, which accounts for what the Kronecker factors leave out of the Fisher matrix.

    It enters the factors as (Ω + π γ I) ⊗ (Γ + γ/π I), which is γ² in all. It is fixed, or the best
    of three candidates is chosen periodically. An adapted γ is never below √(λ + weight decay),
    the damping of the quadratic model, also if λ has grown since γ was chosen.

    Args:
        model_damping: λ.
        weight_decay: returns the largest weight decay.
    """

    highest = HIGHEST**0.5

    def __init__(
        self, options: Adaptation, model_damping: ModelDamping, weight_decay: Callable[[], float]
    ) -> None:
        self.adapts = options.factor_damping is None
        self.factor = options.factor_damping_factor
        self.period = options.factor_damping_period
        self._model_damping, self._weight_decay = model_damping, weight_decay
        # The damping of the inverses in use, which may be below the floor.
        first = model_damping.value or options.initial_model_damping
        initial = math.sqrt(first + weight_decay())
        self._chosen = initial if options.factor_damping is None else options.factor_damping

    @property
    def value(self) -> float:
        return max(self._chosen, self._floor()) if self.adapts else self._chosen

    def _floor(self) -> float:
        return math.sqrt(self._model_damping.value + self._weight_decay())

    def is_due(self, step: int) -> bool:
        return self.adapts and step % self.period == 0

    def is_raised(self) -> bool:
        """Return whether the floor has risen above the damping of the inverses in use."""
        return self.value > self._chosen

    def choose(self, value: float) -> None:
        """Set γ to the damping of the inverses in use."""
        self._chosen = value

    def snapshot(self) -> float:
        """Return the state, to be passed to ``restore()``."""
        return self._chosen

    def restore(self, value: float) -> None:
        """Return to an earlier state."""
        self._chosen = value

    def resume_at(self, value: float) -> None:
        """Continue from a saved state, unless γ is fixed."""
        if self.adapts:
            self._chosen = min(max(value, LOWEST**0.5), self.highest)

    def candidates(self) -> list[float]:
        """Return the candidates, the present value first."""
        present = self.value
        others = [max(present * self.factor, self._floor()), present / self.factor]
        allowed = [v for v in others if LOWEST**0.5 <= v <= HIGHEST**0.5 and v != present]
        return [present, *allowed]


class Dampings(NamedTuple):
    """Both dampings, as they are saved and restored."""

    model: ModelDamping
    factor: FactorDamping

    def _named(self) -> dict[str, ModelDamping | FactorDamping]:
        return {"model_damping": self.model, "factor_damping": self.factor}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict()`` and ``restore()``."""
        return {name: damping.snapshot() for name, damping in self._named().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to an earlier state."""
        for name, damping in self._named().items():
            damping.restore(state[name])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        require_keys("state of the dampings", state, self._named())
        for name, damping in self._named().items():
            require_number(f"the state's {name}", state[name])
            if damping.adapts and state[name] > damping.highest:
                raise ValueError(
                    f"the state's {name} must be at most {damping.highest:g}, got {state[name]!r}"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a damping that is fixed stays as it is."""
        for name, damping in self._named().items():
            damping.resume_at(state[name])
