"""KFC: independent activations and derivatives, spatially uncorrelated derivatives (Theorem 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kfc.kronecker import Factors
from kfc.layers.base import Inverse, Moment, Statistics
from kfc.layers.structures.base import KroneckerProduct
from kfc.patches import row_moment

if TYPE_CHECKING:
    from kfc.layers.factored import KroneckerHandler


class KroneckerFactors(KroneckerProduct):
    """Ω of the patches themselves, Γ of the derivatives, eqn (23): the running averages."""

    treatment = "Kronecker factors"

    def statistics(self, handler: KroneckerHandler, inverse: Inverse | None) -> Statistics:
        return FactorStatistics(handler)

    def shapes(self, handler: KroneckerHandler) -> tuple[tuple[int, ...], ...]:
        return self.factor_shapes(handler)

    def factors(self, handler: KroneckerHandler, running: tuple[Tensor, ...]) -> Factors:
        return Factors(*running)


class FactorStatistics(Statistics):
    """Ω: sum over rows, mean over examples. Γ: mean over rows (Theorem 2, eqn 23)."""

    def __init__(self, handler: KroneckerHandler) -> None:
        self.handler = handler
        self.trained = handler.trained()
        self.wide_activation, self.wide_derivative = handler.are_wide()
        self.activation: Tensor | None = None
        self.derivative: Tensor | None = None
        self.rows = 0

    def forward(self, inputs: Tensor, outputs: Tensor) -> list[Tensor | None]:
        """The call's part of Ω, in a list that ``backward`` empties when it takes it."""
        if "weight" not in self.trained:
            return [None]
        source = self.handler.row_source(inputs.detach().to(self.handler.dtype), outputs)
        moment = self.handler.activation_moment(
            source, homogeneous="bias" in self.trained, diagonal=self.wide_activation
        )
        return [moment]

    def backward(self, kept: list[Tensor | None], derivatives: Tensor, examples: int) -> None:
        rows = self.handler.derivative_rows(derivatives.detach().to(self.handler.dtype))
        moment = row_moment(rows, homogeneous=False, diagonal=self.wide_derivative)
        self.derivative = moment if self.derivative is None else self.derivative.add_(moment)
        if kept:
            self._count(kept.pop(), rows.shape[1])

    def _count(self, activation: Tensor | None, rows: int) -> None:
        self.rows += rows
        if activation is None:
            # The bias alone is trained: the row of every location is just the leading 1.
            assert self.derivative is not None
            activation = self.derivative.new_full((self.handler.groups, 1, 1), rows)
        self.activation = activation if self.activation is None else self.activation + activation

    def end_draw(self) -> None:
        pass

    def moments(self, examples: int) -> tuple[Moment, ...]:
        if self.activation is None or self.derivative is None:
            return ()
        return (
            Moment(self.activation, examples, of_derivatives=False),
            Moment(self.derivative, self.rows, of_derivatives=True),
        )
