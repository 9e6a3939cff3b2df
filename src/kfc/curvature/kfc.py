"""KFC: independent activations and derivatives, spatially uncorrelated derivatives (Theorem 2)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kfc.curvature.kronecker import Factors, KroneckerInverse, Shape, factor_balance, trace
from kfc.curvature.layer import Inverse, LayerCurvature
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.layers import MatrixLayer
from kfc.moments.patches import row_moment


class KroneckerCurvature(LayerCurvature):
    """Ω ⊗ Γ, with Ω of the patches and Γ of the derivatives (eqn 32) as running averages.

    Factors wider than ``max_factor_size`` are kept as their diagonals.
    """

    treatment = "Kronecker factors"
    layer: MatrixLayer

    def __init__(
        self, layer: MatrixLayer, inverse: type[KroneckerInverse], max_factor_size: int
    ) -> None:
        super().__init__(layer)
        self.inverse_class = inverse
        self.max_factor_size = max_factor_size

    # Statistics

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        return FactorStatistics(self.layer, self.are_wide())

    def running_shapes(self) -> tuple[Shape, ...]:
        return self.factor_shapes()

    def factors_of(self, running: tuple[Tensor, ...]) -> Factors:
        """Return Ω and Γ from the running averages."""
        return Factors(*running)

    def factors(self) -> Factors | None:
        return None if self.state.running is None else self.factors_of(self.state.running)

    def are_wide(self) -> tuple[bool, bool]:
        """Return whether Ω and Γ are kept as diagonals because they are wide."""
        activation, derivative = self.layer.factor_sizes()
        return activation > self.max_factor_size, derivative > self.max_factor_size

    def factor_shapes(self) -> tuple[Shape, Shape]:
        """Return the shapes of Ω and Γ."""
        activation, derivative = (
            (self.layer.groups, size) if wide else (self.layer.groups, size, size)
            for size, wide in zip(self.layer.factor_sizes(), self.are_wide(), strict=True)
        )
        return activation, derivative

    # Inverses

    def invert(self, running: tuple[Tensor, ...], damping: float) -> Inverse:
        return self.inverse_class.of(self.factors_of(running), damping)

    @property
    def redamps_cheaply(self) -> bool:
        return self.inverse_class.redamps_cheaply

    def redamped(self, damping: float) -> Inverse:
        factors, inverse = self.factors(), self.state.inverse
        assert factors is not None
        assert isinstance(inverse, KroneckerInverse)
        return inverse.redamped(factors, damping)

    def inverse_shapes(self) -> dict[str, Shape]:
        return self.inverse_class.shapes(*self.factor_shapes())

    def inverse_triangles(self) -> tuple[str, ...]:
        return self.inverse_class.triangles

    def restore_inverse(self, tensors: Mapping[str, Tensor]) -> Inverse:
        return self.inverse_class(tensors)

    def apply_inverse(self, inverse: Inverse, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return Γ_damped⁻¹ V Ω_damped⁻¹ with V = (bias, weight) (eqn 11)."""
        return self.layer.from_matrix(inverse.apply(self.layer.to_matrix(gradients)))

    # What users see

    def note(self) -> str:
        names = zip(Factors._fields, self.are_wide(), strict=True)
        wide = " and ".join(name for name, is_wide in names if is_wide)
        return wide and f"{wide} factor wider than {self.max_factor_size}: diagonal only"

    def summary(self) -> dict[str, Any]:
        factors = self.factors()
        assert factors is not None
        names = ("pi", "activation_trace", "derivative_trace")
        values = (factor_balance(factors), *map(trace, factors))
        return {
            name: value.item() if value.numel() == 1 else value.tolist()
            for name, value in zip(names, values, strict=True)
        }


class FactorStatistics(LayerStatistics):
    """Ω: summed over rows, mean over examples. Γ: mean over rows (Theorem 2, eqn 32)."""

    def __init__(self, layer: MatrixLayer, wide: tuple[bool, bool]) -> None:
        self.layer = layer
        self.trained = layer.trained()
        self.wide_activation, self.wide_derivative = wide
        self.activation: Tensor | None = None
        self.derivative: Tensor | None = None
        self.rows = 0

    def forward(self, inputs: Tensor, outputs: Tensor) -> list[Tensor | None]:
        """Return the call's part of Ω, in a list that ``backward`` empties."""
        if "weight" not in self.trained:
            return [None]
        source = self.layer.row_source(inputs.detach().to(self.layer.dtype), outputs)
        moment = self.layer.activation_moment(
            source, homogeneous="bias" in self.trained, diagonal=self.wide_activation
        )
        return [moment]

    def backward(self, kept: list[Tensor | None], derivatives: Tensor, examples: int) -> None:
        rows = self.layer.derivative_rows(derivatives.detach().to(self.layer.dtype))
        moment = row_moment(rows, homogeneous=False, diagonal=self.wide_derivative)
        self.derivative = moment if self.derivative is None else self.derivative.add_(moment)
        if kept:
            self._count(kept.pop(), rows.shape[1])

    def _count(self, activation: Tensor | None, rows: int) -> None:
        self.rows += rows
        if activation is None:
            # Only the bias is trained: the row of every location is the leading 1.
            assert self.derivative is not None
            activation = self.derivative.new_full((self.layer.groups, 1, 1), rows)
        self.activation = activation if self.activation is None else self.activation + activation

    def moments(self, examples: int) -> tuple[Moment, ...]:
        if self.activation is None or self.derivative is None:
            return ()
        return (
            Moment(self.activation, examples, of_derivatives=False),
            Moment(self.derivative, self.rows, of_derivatives=True),
        )
