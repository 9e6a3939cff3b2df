"""SUA: Kronecker factors with spatially uncorrelated activations."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.curvature.kfc import KroneckerCurvature
from kfc.curvature.kronecker import Factors, Shape
from kfc.curvature.layer import Inverse
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.layers import MatrixLayer
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
        wide_activation, wide_derivative = self.are_wide()
        return PixelStatistics(self.layer, wide_activation, diagonal=wide_derivative)

    def running_shapes(self) -> tuple[Shape, ...]:
        layer, (wide, _) = self.layer, self.are_wide()
        trained, columns = layer.trained(), layer.weight_to_matrix(layer.weight).shape[2]
        size = 1 + (columns // layer.offsets if "weight" in trained else 0)
        pixel: Shape = (layer.groups, size) if wide else (layer.groups, size, size)
        side = ("bias" in trained) + layer.offsets * ("weight" in trained)
        return pixel, (side, side), self.derivative_shape()

    def derivative_shape(self) -> Shape:
        """Return the shape of the running average that Γ is computed from."""
        return self.factor_shapes()[1]

    def factors_of(self, running: tuple[Tensor, ...]) -> Factors:
        pixel, counts, derivative = running
        return Factors(expanded_factor(pixel, counts, self.layer.offsets), derivative)


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


class _Pixels(NamedTuple):
    """The pixel moment, the number of pixels and the boundary counts of one or more calls."""

    moment: Tensor
    pixels: int
    counts: Tensor


class PixelStatistics(LayerStatistics):
    """Pixels: mean of (1, a)ᵀ (1, a) over examples and pixels. β: mean over examples.

    Γ: mean over rows; only its diagonal if ``diagonal``.
    """

    def __init__(self, layer: MatrixLayer, wide_activation: bool, *, diagonal: bool) -> None:
        self.layer = layer
        self.diagonal = diagonal
        self.trained = layer.trained()
        self.wide_activation = wide_activation
        self.pixels: _Pixels | None = None
        self.derivative: Tensor | None = None
        self.rows = 0

    def forward(self, inputs: Tensor, outputs: Tensor) -> list[_Pixels]:
        """Return the call's pixel moment, in a list that ``backward`` empties."""
        inputs = inputs.detach().to(self.layer.dtype)
        rows = self.layer.pixel_rows(inputs, outputs)
        counts = self.layer.boundary_counts(inputs, outputs)
        if "weight" not in self.trained:
            rows, counts = rows[:, :, :0], counts[:1, :1]
        elif "bias" not in self.trained:
            counts = counts[1:, 1:]
        moment = row_moment(rows, homogeneous=True, diagonal=self.wide_activation)
        return [_Pixels(moment, rows.shape[1], counts)]

    def backward(self, kept: list[_Pixels], derivatives: Tensor, examples: int) -> None:
        rows = self.layer.derivative_rows(derivatives.detach().to(self.layer.dtype))
        moment = row_moment(rows, homogeneous=False, diagonal=self.diagonal)
        self.derivative = moment if self.derivative is None else self.derivative.add_(moment)
        if not kept:
            return
        self.rows += rows.shape[1]
        old, new = self.pixels, kept.pop()
        if old is not None:
            new = _Pixels(old.moment + new.moment, old.pixels + new.pixels, old.counts + new.counts)
        self.pixels = new

    def moments(self, examples: int) -> tuple[Moment, ...]:
        if self.pixels is None or self.derivative is None:
            return ()
        return (
            Moment(self.pixels.moment, self.pixels.pixels, of_derivatives=False),
            Moment(self.pixels.counts, examples, of_derivatives=False),
            Moment(self.derivative, self.rows, of_derivatives=True),
        )
