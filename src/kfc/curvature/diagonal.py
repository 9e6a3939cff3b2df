"""The diagonal of the exact Fisher block."""

from torch import Tensor

from kfc.curvature.damping import Damping
from kfc.curvature.factor import reciprocal_or_zero
from kfc.curvature.gradients import SquaredGradients
from kfc.curvature.kronecker import Bases, Inverse
from kfc.curvature.layer import LayerCurvature
from kfc.curvature.statistics import LayerStatistics
from kfc.layers import MatrixLayer
from kfc.moments.folding import Shape


class DiagonalInverse(Inverse):
    """The inverse of a diagonal block: its entries, (groups, I · n)."""

    def apply(self, gradient: Tensor) -> Tensor:
        """Return the inverse times a gradient (groups, I, n)."""
        return gradient * self.tensors["inverse"].reshape(gradient.shape)


class DiagonalCurvature(LayerCurvature):
    """The mean over examples of the squares of their gradients, (groups, I · n).

    There are no factors to damp: δ of the weight or of the bias is added to every entry.
    """

    treatment = "diagonal"
    inverse_class = DiagonalInverse
    layer: MatrixLayer

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        return SquaredGradients(self.layer, Bases())

    def running_shapes(self) -> tuple[Shape, ...]:
        width, height = self.layer.factor_sizes()
        return ((self.layer.groups, height * width),)

    def invert(
        self, running: tuple[Tensor, ...], damping: Damping, previous: Inverse | None = None
    ) -> Inverse:
        (squares,) = running
        damped = squares + damping.weight
        if damping.bias != damping.weight:
            _, height = self.layer.factor_sizes()
            bias = squares.unflatten(1, (height, -1))[..., 0]
            damped.unflatten(1, (height, -1))[..., 0] = bias + damping.bias
        return DiagonalInverse({"inverse": reciprocal_or_zero(damped)})

    def apply_inverse(self, inverse: Inverse, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.layer.from_matrix(inverse.apply(self.layer.to_matrix(gradients)))
