"""The diagonal of the exact Fisher block."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kfc.curvature.gradients import SquaredGradients
from kfc.curvature.kronecker import Bases, Shape, reciprocal_or_zero
from kfc.curvature.layer import Inverse, LayerCurvature
from kfc.curvature.statistics import KeptInputs, LayerStatistics, Moment
from kfc.layers import MatrixLayer


class DiagonalCurvature(LayerCurvature):
    """The mean over examples of the squares of their gradients, (groups, I · n).

    There are no factors to damp: δ is added to every entry.
    """

    treatment = "diagonal"
    layer: MatrixLayer

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        return _DiagonalStatistics(self.layer)

    def running_shapes(self) -> tuple[Shape, ...]:
        width, height = self.layer.factor_sizes()
        return ((self.layer.groups, height * width),)

    def invert(self, running: tuple[Tensor, ...], damping: float) -> Inverse:
        return DiagonalInverse({"inverse": reciprocal_or_zero(running[0] + damping)})

    def inverse_shapes(self) -> dict[str, Shape]:
        return {"inverse": self.running_shapes()[0]}

    def restore_inverse(self, tensors: Mapping[str, Tensor]) -> Inverse:
        return DiagonalInverse(tensors)

    def apply_inverse(self, inverse: Inverse, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.layer.from_matrix(inverse.apply(self.layer.to_matrix(gradients)))

    def summary(self) -> dict[str, Any]:
        assert self.state.running is not None
        return {"block_trace": self.state.running[0].sum().item()}


class DiagonalInverse:
    """The inverse of a diagonal block: its entries, (groups, I · n)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def apply(self, gradient: Tensor) -> Tensor:
        """Return the inverse times a gradient (groups, I, n)."""
        return gradient * self.tensors["inverse"].reshape(gradient.shape)


class _DiagonalStatistics(LayerStatistics):
    def __init__(self, layer: MatrixLayer) -> None:
        self.squares = SquaredGradients(layer, Bases())

    def forward(self, inputs: Tensor, outputs: Tensor) -> KeptInputs | None:
        return self.squares.forward(inputs)

    def backward(self, kept: KeptInputs | None, derivatives: Tensor, examples: int) -> None:
        self.squares.backward(kept, derivatives, examples)

    def end_draw(self) -> None:
        self.squares.end_draw()

    def moments(self, examples: int) -> tuple[Moment, ...]:
        return () if self.squares.total is None else (self.squares.moment(examples),)
