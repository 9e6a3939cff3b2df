"""KFC: independent activations and derivatives, spatially uncorrelated derivatives (Theorem 2)."""

from collections.abc import Sequence
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc._helpers import multiplies_bfloat16
from kfc.curvature.damping import Damping
from kfc.curvature.factor import is_diagonal, trace
from kfc.curvature.kronecker import (
    Accuracy,
    FactoredInverse,
    Factors,
    Inverse,
    KroneckerInverse,
    factor_balance,
)
from kfc.curvature.layer import Columns, LayerCurvature
from kfc.curvature.low_rank import NARROWEST, default_columns
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.layers import MatrixLayer
from kfc.moments.folding import Shape, kept_shape, to_keep, whole, width
from kfc.moments.patches import row_moment


class KroneckerCurvature(LayerCurvature):
    """Ω ⊗ Γ, with Ω of the patches and Γ of the derivatives (eqn 32) as running averages.

    Wide factors are kept folded (``kfc.moments.folding``), and those wider than
    ``max_factor_size`` as their diagonals.
    """

    treatment = "Kronecker factors"
    layer: MatrixLayer
    inverse_class: type[KroneckerInverse]

    def __init__(
        self,
        layer: MatrixLayer,
        inverse: type[KroneckerInverse],
        max_factor_size: int,
        inverse_error: float | None = None,
    ) -> None:
        super().__init__(layer)
        self.inverse_class = inverse
        self.max_factor_size = max_factor_size
        self.inverse_error = inverse_error
        self._columns: Columns | None = None
        # The last inverse that was applied, and the same with reordered columns.
        self._reordered: tuple[Inverse, Inverse | None] | None = None

    # Statistics

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        activation, derivative = self.may_be_rounded(inverse)
        rounded = activation and not self.layer.centred, derivative
        return FactorStatistics(self.layer, self.are_wide(), rounded)

    def may_be_rounded(self, inverse: Inverse | None) -> tuple[bool, ...]:
        if not isinstance(inverse, FactoredInverse):
            return False, False
        return inverse.activation.tolerates_rounding, inverse.derivative.tolerates_rounding

    def running_shapes(self) -> tuple[Shape, ...]:
        return tuple(map(kept_shape, self.factor_shapes()))

    def factors_of(self, running: tuple[Tensor, ...]) -> Factors:
        """Return Ω and Γ from the running averages; they may be folded or rounded."""
        return Factors(*running)

    def factors(self) -> Factors | None:
        if self.state.running is None:
            return None
        activation, derivative = self.factors_of(self.state.running)
        return Factors(*(whole(each).to(self.layer.dtype) for each in (activation, derivative)))

    def are_wide(self) -> tuple[bool, bool]:
        """Return whether Ω and Γ are kept as diagonals, because they are wide or Ω is diagonal."""
        activation, derivative = self.layer.factor_sizes()
        is_wide = activation > self.max_factor_size
        return is_wide or self.layer.one_hot, derivative > self.max_factor_size

    def factor_shapes(self) -> tuple[Shape, Shape]:
        """Return the shapes of Ω and Γ."""
        activation, derivative = (
            (self.layer.groups, size) if wide else (self.layer.groups, size, size)
            for size, wide in zip(self.layer.factor_sizes(), self.are_wide(), strict=True)
        )
        return activation, derivative

    # Inverses

    def invert(
        self, running: tuple[Tensor, ...], damping: Damping, previous: Inverse | None = None
    ) -> Inverse:
        factors = self.factors_of(running)
        # From the factors alone: in another thread, parameters may be replaced by others meanwhile.
        widths = [0 if is_diagonal(factor) else width(factor) for factor in factors]
        accuracy = Accuracy(self.inverse_error, self._largest_columns(widths), previous)
        return self.inverse_class.of(factors, damping.weight, damping.bias_ratio, accuracy)

    def has_variable_inverse(self) -> bool:
        is_wide = max(self.factor_widths()) >= NARROWEST
        can_be_cheap = issubclass(self.inverse_class, FactoredInverse)
        return is_wide and can_be_cheap and self.inverse_error is not None

    def limit_columns(self, columns: Columns | None) -> None:
        self._columns = columns

    def _largest_columns(self, widths: Sequence[int]) -> Columns:
        """Return the largest ranks of the inverses of factors with these widths."""
        if self._columns is not None:
            return self._columns
        first, second = map(default_columns, widths)
        return first, second

    def expected_widths(self, columns: Columns | None) -> tuple[int, ...]:
        if not self.has_variable_inverse():
            return ()
        widths = self.factor_widths()
        limits = self._largest_columns(widths) if columns is None else columns
        return tuple(1 + most if most else n for n, most in zip(widths, limits, strict=True))

    def factor_widths(self) -> tuple[int, int]:
        """Return the widths of Ω and Γ; 0 for diagonals."""
        first, second = (s[-1] if len(s) == 3 else 0 for s in self.factor_shapes())
        return first, second

    def inverse_shapes(self, widths: tuple[int, ...] = ()) -> dict[str, Shape]:
        return self.inverse_class.shapes(*self.factor_shapes(), widths)

    def apply_inverse(self, inverse: Inverse, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return Γ_damped⁻¹ V Ω_damped⁻¹ with V = (bias, weight) (eqn 11)."""
        layer = self.layer
        if "weight" in gradients and layer.is_channels_last(gradients["weight"]):
            reordered = self._reordered_inverse(inverse)
            if reordered is not None:
                solution = reordered.apply(layer.to_matrix(gradients, channels_last=True))
                return layer.from_matrix(solution, channels_last=True)
        return layer.from_matrix(inverse.apply(layer.to_matrix(gradients)))

    def _reordered_inverse(self, inverse: Inverse) -> Inverse | None:
        """Return an inverse for matrices with columns in the order of channels_last."""
        if self._reordered is None or self._reordered[0] is not inverse:
            self._reordered = inverse, inverse.reordered(self.layer.channels_last_order())
        return self._reordered[1]

    # What users see

    def note(self) -> str:
        if self.layer.one_hot:
            return "the activation factor of one-hot rows is diagonal"
        names = zip(Factors._fields, self.are_wide(), strict=True)
        wide = " and ".join(name for name, is_wide in names if is_wide)
        return wide and f"{wide} factor wider than {self.max_factor_size}: diagonal only"

    def summary(self) -> dict[str, Any]:
        assert self.state.running is not None
        factors = self.factors_of(self.state.running)
        names = ("pi", "activation_trace", "derivative_trace")
        values = (factor_balance(factors), *map(trace, factors))
        return {
            name: value.item() if value.numel() == 1 else value.tolist()
            for name, value in zip(names, values, strict=True)
        }


# The largest number of rows whose second moments have a sampling error, 1 / √rows, above 2⁻⁸.
MOST_ROUNDED_ROWS = 2**16


class _Kept(NamedTuple):
    """What ``backward()`` needs of a call: its ``activation_sums()``, used up by the first draw.

    Attributes:
        mask: 1 for every row of the factors, (rows,); ``None`` if there is no padding.
    """

    sums: list[tuple[Any, ...]]
    mask: Tensor | None


class FactorStatistics(LayerStatistics):
    """Ω: summed over rows, mean over examples. Γ: mean over rows (Theorem 2, eqn 32).

    Args:
        wide: whether Ω and Γ are kept as diagonals.
        rounded: whether their products may be computed in bfloat16, where that is faster and the
            rounding errors are below the sampling error.
    """

    def __init__(
        self,
        layer: MatrixLayer,
        wide: tuple[bool, bool],
        rounded: tuple[bool, bool] = (False, False),
    ) -> None:
        self.layer = layer
        self.trained = layer.trained()
        self.wide_activation, self.wide_derivative = wide
        self._rounded = rounded
        self.activation: tuple[Any, ...] = ()
        self.derivative: Tensor | None = None
        self.rows = 0

    def forward(self, inputs: Tensor, outputs: Tensor) -> _Kept:
        inputs = inputs.detach()
        if not self.layer.one_hot:  # whose inputs are indices
            inputs = inputs.to(self._product_dtype(0, outputs))
        mask = self.layer.padding_mask(inputs)
        return _Kept([self.activation_sums(inputs, outputs)], mask)

    def _product_dtype(self, side: int, outputs: Tensor) -> torch.dtype:
        """Return the dtype of the products for Ω (0) or Γ (1), given a call's outputs."""
        own = self.layer.dtype
        if not (self._rounded[side] and own == torch.float32):
            return own
        rows = outputs.numel() // (self.layer.groups * self.layer.factor_sizes()[1])
        is_faster = rows <= MOST_ROUNDED_ROWS and multiplies_bfloat16(outputs.device)
        return torch.bfloat16 if is_faster else own

    def backward(self, kept: _Kept, derivatives: Tensor, examples: int) -> None:
        dtype = self._product_dtype(1, derivatives)
        rows = self.layer.derivative_rows(derivatives.detach().to(dtype))
        rows, count = without_padding(rows, kept.mask)
        moment = row_moment(rows, homogeneous=False, diagonal=self.wide_derivative, fold=True)
        self.derivative = moment if self.derivative is None else self.derivative.add_(moment)
        if kept.sums:
            new = kept.sums.pop()
            self.activation = tuple(map(add, self.activation, new)) if self.activation else new
            self.rows += count

    def moments(self, examples: int) -> tuple[Moment, ...]:
        if self.derivative is None:
            return ()
        activation = self.activation_moments(examples)
        return (*activation, Moment(to_keep(self.derivative), self.rows, of_derivatives=True))

    def activation_sums(self, inputs: Tensor, outputs: Tensor) -> tuple[Any, ...]:
        """Return what one call adds to the statistics of activations: its part of Ω."""
        moment = activation_sum(self.layer, inputs, outputs, diagonal=self.wide_activation)
        return (to_keep(moment.to(self.layer.dtype)),)

    def activation_moments(self, examples: int) -> tuple[Moment, ...]:
        """Return the moments of activations, from the sums over all calls."""
        (total,) = self.activation
        return (Moment(total, examples, of_derivatives=False),)


def without_padding(rows: Tensor, mask: Tensor | None) -> tuple[Tensor, int]:
    """Return rows of derivatives, zero where the mask is, and the number of the others."""
    if mask is None:
        return rows, rows.shape[1]
    return rows * mask.to(rows.dtype).view(1, -1, 1), int(mask.sum())


def activation_sum(
    layer: MatrixLayer, inputs: Tensor, outputs: Tensor, *, diagonal: bool
) -> Tensor:
    """Return the part of Ω of one call: Σ rowᵀ row, (groups, n, n), or only its diagonal.

    It may be folded.
    """
    trained = layer.trained()
    if "weight" not in trained:
        # The row of every location is the leading 1.
        rows = outputs.numel() // (layer.groups * layer.factor_sizes()[1])
        return inputs.new_full((layer.groups, 1, 1), rows)
    source = layer.row_source(inputs, outputs)
    return layer.activation_moment(source, homogeneous="bias" in trained, diagonal=diagonal)
