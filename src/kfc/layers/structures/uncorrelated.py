"""Spatially uncorrelated activations (SUA), with any derivatives or with white ones (PRONG)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.kronecker import Factors
from kfc.layers.base import Inverse, Moment, Statistics
from kfc.layers.structures.base import KroneckerProduct, factor_shape
from kfc.patches import row_moment
from kfc.stationary import uncorrelated_factor

if TYPE_CHECKING:
    from kfc.layers.factored import KroneckerHandler


class UncorrelatedActivations(KroneckerProduct):
    """Ω as if activations at distinct locations were uncorrelated (Theorem 4), Γ as in KFC.

    The running averages are the pixel moment (groups, 1 + J, 1 + J), its diagonal where Ω is wide,
    the boundary counts β (1 + |D|, 1 + |D|) and Γ. Ω is made of the first two when it is asked for.
    Their shapes say for which parameters: without the bias, β has no homogeneous coordinate;
    without the weight, neither has any other.
    """

    treatment = "Kronecker factors, uncorrelated activations"

    def statistics(self, handler: KroneckerHandler, inverse: Inverse | None) -> Statistics:
        return PixelStatistics(handler, diagonal=handler.are_wide()[1])

    def shapes(self, handler: KroneckerHandler) -> tuple[tuple[int, ...], ...]:
        wide, _ = handler.are_wide()
        trained, columns = handler.trained(), handler.weight_to_matrix(handler.weight).shape[2]
        channels = columns // handler.offsets if "weight" in trained else 0
        pixel = factor_shape(handler.groups, 1 + channels, diagonal=wide)
        side = ("bias" in trained) + handler.offsets * ("weight" in trained)
        return pixel, (side, side), self.derivative_shape(handler)

    def derivative_shape(self, handler: KroneckerHandler) -> tuple[int, ...]:
        """Of the running average that Γ is made of."""
        return self.factor_shapes(handler)[1]

    def factors(self, handler: KroneckerHandler, running: tuple[Tensor, ...]) -> Factors:
        pixel, counts, derivative = running
        return Factors(expanded_factor(pixel, counts, handler.offsets), derivative)


class WhiteDerivatives(UncorrelatedActivations):
    """Ω as above, Γ = c I (Theorem 4: IAD, SH, SUA and WD): what idealised PRONG amounts to.

    The paper sets c = 1, since a learning rate can make up for it. Here it is Γ's mean eigenvalue,
    tr Γ / I, so that damping and clip mean what they do elsewhere. Its running average is
    (groups, 1).
    """

    treatment = "Kronecker factors, uncorrelated activations, white derivatives"

    def statistics(self, handler: KroneckerHandler, inverse: Inverse | None) -> Statistics:
        return WhiteStatistics(handler, diagonal=True)

    def factor_shapes(self, handler: KroneckerHandler) -> tuple[tuple[int, ...], tuple[int, ...]]:
        activation, _ = super().factor_shapes(handler)
        return activation, (handler.groups, handler.sizes()[1])

    def derivative_shape(self, handler: KroneckerHandler) -> tuple[int, ...]:
        return (handler.groups, 1)

    def factors(self, handler: KroneckerHandler, running: tuple[Tensor, ...]) -> Factors:
        pixel, counts, level = running
        derivative = level.expand(-1, handler.sizes()[1])
        return Factors(expanded_factor(pixel, counts, handler.offsets), derivative)

    def wide_factors(self, handler: KroneckerHandler) -> list[str]:
        return [name for name in super().wide_factors(handler) if name == "activation"]


def expanded_factor(pixel: Tensor, counts: Tensor, offsets: int) -> Tensor:
    """Ω of the parameters whose statistics these are: (groups, n, n), or its diagonal (groups, n).

    Args:
        pixel: (groups, 1 + J, 1 + J), or its diagonal; without J if the weight is not among them.
        counts: β, with a first row for the homogeneous coordinate if the bias is among them.
        offsets: |D|.
    """
    if pixel.shape[-1] == 1:
        return counts.expand(len(pixel), 1, 1)
    homogeneous = len(counts) > offsets
    if not homogeneous:
        counts = F.pad(counts, (1, 0, 1, 0))
    if pixel.dim() == 2:
        # β(d, d) (Σ_jj + M_j²) = β(d, d) E[a_j²], which the covariances have no part in.
        inside = (pixel[:, 1:, None] * counts.diagonal()[1:]).flatten(1)
        border = counts[:1, 0].expand(len(pixel), 1)
        return torch.cat([border, inside], dim=1) if homogeneous else inside
    factor = uncorrelated_factor(pixel, counts)
    return factor if homogeneous else factor[:, 1:, 1:].contiguous()


class _Call(NamedTuple):
    """What the pixels of one call amount to."""

    moment: Tensor
    pixels: int
    counts: Tensor


class PixelStatistics(Statistics):
    """Pixels: mean over examples and pixels of (1, a)ᵀ (1, a). β: mean over examples.

    Γ: mean over rows; only its diagonal if ``diagonal``.
    """

    def __init__(self, handler: KroneckerHandler, *, diagonal: bool) -> None:
        self.handler = handler
        self.diagonal = diagonal
        self.trained = handler.trained()
        self.wide_activation, _ = handler.are_wide()
        self.pixels: _Call | None = None
        self.derivative: Tensor | None = None
        self.rows = 0

    def forward(self, inputs: Tensor, outputs: Tensor) -> list[_Call]:
        """What the call's pixels give, in a list that ``backward`` empties when it takes it."""
        inputs = inputs.detach().to(self.handler.dtype)
        rows = self.handler.pixel_rows(inputs, outputs)
        counts = self.handler.offset_counts(inputs, outputs)
        if "weight" not in self.trained:
            rows, counts = rows[:, :, :0], counts[:1, :1]
        elif "bias" not in self.trained:
            counts = counts[1:, 1:]
        moment = row_moment(rows, homogeneous=True, diagonal=self.wide_activation)
        return [_Call(moment, rows.shape[1], counts)]

    def backward(self, kept: list[_Call], derivatives: Tensor, examples: int) -> None:
        rows = self.handler.derivative_rows(derivatives.detach().to(self.handler.dtype))
        moment = row_moment(rows, homogeneous=False, diagonal=self.diagonal)
        self.derivative = moment if self.derivative is None else self.derivative.add_(moment)
        if kept:
            self.rows += rows.shape[1]
            self._count(kept.pop())

    def _count(self, new: _Call) -> None:
        old = self.pixels
        if old is not None:
            new = _Call(old.moment + new.moment, old.pixels + new.pixels, old.counts + new.counts)
        self.pixels = new

    def end_draw(self) -> None:
        pass

    def moments(self, examples: int) -> tuple[Moment, ...]:
        if self.pixels is None or self.derivative is None:
            return ()
        return (
            Moment(self.pixels.moment, self.pixels.pixels, of_derivatives=False),
            Moment(self.pixels.counts, examples, of_derivatives=False),
            Moment(self.derivative, self.rows, of_derivatives=True),
        )


class WhiteStatistics(PixelStatistics):
    """The same with c, the mean of Γ's diagonal, in place of Γ."""

    def moments(self, examples: int) -> tuple[Moment, ...]:
        found = super().moments(examples)
        if not found:
            return ()
        *activation, derivative = found
        level = derivative.total.mean(1, keepdim=True)
        return (*activation, derivative._replace(total=level))
