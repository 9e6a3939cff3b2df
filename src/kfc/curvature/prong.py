"""PRONG: spatially uncorrelated activations and white derivatives (Theorem 4)."""

from torch import Tensor

from kfc.curvature.kronecker import Factors, Inverse
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.curvature.sua import PixelStatistics, SUACurvature
from kfc.moments.folding import Shape


class PRONGCurvature(SUACurvature):
    """Ω as in SUA and Γ = c I, which is what idealised PRONG amounts to.

    The paper sets c = 1, since the learning rate can compensate. Here c is Γ's mean eigenvalue
    tr Γ / I, so that damping and clip mean the same as elsewhere. Its running average is
    (groups, 1).
    """

    treatment = "Kronecker factors, uncorrelated activations, white derivatives"

    def are_wide(self) -> tuple[bool, bool]:
        return super().are_wide()[0], False

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        return _WhiteStatistics(self.layer, (self.are_wide()[0], True))

    def factor_shapes(self) -> tuple[Shape, Shape]:
        return super().factor_shapes()[0], (self.layer.groups, self.layer.factor_sizes()[1])

    def running_shapes(self) -> tuple[Shape, ...]:
        return (*super().running_shapes()[:2], (self.layer.groups, 1))

    def factors_of(self, running: tuple[Tensor, ...]) -> Factors:
        pixel, counts, level = running
        derivative = level.expand(-1, self.layer.factor_sizes()[1])
        return super().factors_of((pixel, counts, derivative))


class _WhiteStatistics(PixelStatistics):
    """The statistics of SUA with c, the mean of Γ's diagonal, in place of Γ."""

    def moments(self, examples: int) -> tuple[Moment, ...]:
        found = super().moments(examples)
        if not found:
            return ()
        *activation, derivative = found
        level = derivative.total.mean(1, keepdim=True)
        return (*activation, derivative._replace(total=level))
