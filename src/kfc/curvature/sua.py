"""SUA: Kronecker factors with spatially uncorrelated activations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.curvature.kfc import FactorStatistics, KroneckerCurvature
from kfc.curvature.kronecker import Factors, Inverse
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.moments.folding import Shape, kept_shape, whole
from kfc.moments.patches import row_moment
from kfc.moments.stationary import uncorrelated_factor


class SUACurvature(KroneckerCurvature):
    """Ω as if activations at distinct locations were uncorrelated, Γ as in KFC.

    The running averages are the pixel moment (groups, 1 + J, 1 + J), or its diagonal if Ω is wide,
    the boundary counts β (1 + |D|, 1 + |D|), and Γ. Ω is computed from the first two when needed.
    Without a trained bias, β has no homogeneous coordinate; without a trained weight, both have
    nothing else.
    """

    treatment = "Kronecker factors, uncorrelated activations"

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        return PixelStatistics(self.layer, self.are_wide())

    def may_be_rounded(self, inverse: Inverse | None) -> tuple[bool, ...]:
        return False, False, False

    def running_shapes(self) -> tuple[Shape, ...]:
        layer, (wide, _) = self.layer, self.are_wide()
        trained, columns = layer.trained(), layer.weight_to_matrix(layer.weight).shape[2]
        size = 1 + (columns // layer.offsets if "weight" in trained else 0)
        pixel: Shape = (layer.groups, size) if wide else (layer.groups, size, size)
        side = ("bias" in trained) + layer.offsets * ("weight" in trained)
        return kept_shape(pixel), (side, side), kept_shape(self.factor_shapes()[1])

    def factors_of(self, running: tuple[Tensor, ...]) -> Factors:
        pixel, counts, derivative = running
        return Factors(expanded_factor(whole(pixel), counts, self.layer.offsets), derivative)


def expanded_factor(pixel: Tensor, counts: Tensor, offsets: int) -> Tensor:
    """Return Ω (groups, n, n), or its diagonal (groups, n), from running averages.

    Args:
        pixel: (groups, 1 + J, 1 + J), or its diagonal; without J if the weight is not trained.
        counts: β, with a first row for the homogeneous coordinate if the bias is trained.
        offsets: |D|.
    """
    if pixel.shape[-1] == 1:
        return counts.expand(len(pixel), 1, 1)
    homogeneous = len(counts) > offsets
    if not homogeneous:
        counts = F.pad(counts, (1, 0, 1, 0))
    if pixel.dim() == 2:
        # β(d, d) (Σ_jj + M_j²) = β(d, d) E[a_j²]: covariances are not needed.
        inside = (pixel[:, 1:, None] * counts.diagonal()[1:]).flatten(1)
        border = counts[:1, 0].expand(len(pixel), 1)
        return torch.cat([border, inside], dim=1) if homogeneous else inside
    factor = uncorrelated_factor(pixel, counts)
    return factor if homogeneous else factor[:, 1:, 1:].contiguous()


class PixelStatistics(FactorStatistics):
    """Pixels: mean of (1, a)ᵀ (1, a) over examples and pixels. β: mean over examples.

    Γ as in KFC.
    """

    def activation_sums(self, inputs: Tensor, outputs: Tensor) -> tuple[Any, ...]:
        """Return a call's pixel moment, number of pixels and boundary counts."""
        rows = self.layer.pixel_rows(inputs, outputs)
        counts = self.layer.boundary_counts(inputs, outputs)
        if "weight" not in self.trained:
            rows, counts = rows[:, :, :0], counts[:1, :1]
        elif "bias" not in self.trained:
            counts = counts[1:, 1:]
        moment = row_moment(rows, homogeneous=True, diagonal=self.wide_activation, fold=True)
        return moment, rows.shape[1], counts

    def activation_moments(self, examples: int) -> tuple[Moment, ...]:
        moment, pixels, counts = self.activation
        return (
            Moment(moment, pixels, of_derivatives=False),
            Moment(counts, examples, of_derivatives=False),
        )
