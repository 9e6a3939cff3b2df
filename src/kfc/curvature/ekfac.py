"""EKFAC: second moments of gradients in the eigenbasis of KFC's factors (George et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from kfc.curvature.factor import scale_first_row
from kfc.curvature.gradients import SquaredGradients
from kfc.curvature.kfc import FactorStatistics, KroneckerCurvature
from kfc.curvature.kronecker import EigenInverse, Inverse
from kfc.curvature.statistics import LayerStatistics, Moment
from kfc.layers import MatrixLayer
from kfc.moments.folding import Shape


class EKFACCurvature(KroneckerCurvature):
    """Second moments S of gradients in the basis in which Ω ⊗ Γ is diagonal.

    The running averages are Ω and Γ. S (groups, I, n) depends on its bases and is kept with them,
    in the inverse: statistics gathered while there is an inverse also measure S and update the
    inverse at once. An inverse with new bases takes over the S of the previous one. δ is added to
    every entry of S.

    If the bias has a damping of its own, all this takes place in the scaled coordinates of
    ``kfc.curvature.kronecker``: the bases are those of Ω̃ and Γ, S is measured in them, and the
    damping is exact. A layer whose wide Ω is kept as its diagonal has no scaled coordinates; the
    dampings are added to the entries of S.
    """

    treatment = "Kronecker eigenbasis"

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        if inverse is None:
            return super().new_statistics(None)
        assert isinstance(inverse, MeasuredInverse)
        return _MeasuringStatistics(self.layer, self.are_wide(), inverse)

    def measured_shapes(self) -> tuple[Shape, ...]:
        width, height = self.layer.factor_sizes()
        return ((self.layer.groups, height * width),)


class MeasuredInverse(EigenInverse):
    """U (diag S + δ I)⁻¹ Uᵀ with U = U_Ω ⊗ U_Γ; until S is measured, the eigenvalues of Ω ⊗ Γ.

    The tensors are those of an ``EigenInverse``, with S as eigenvalues, and a flag.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        unmeasured = torch.zeros((), dtype=tensors["eigenvalues"].dtype)
        super().__init__({"measured": unmeasured, **tensors})
        self.measured = bool(self.tensors["measured"])

    @classmethod
    def shapes(
        cls, activation: Shape, derivative: Shape, widths: tuple[int, ...] = ()
    ) -> dict[str, Shape]:
        return {**super().shapes(activation, derivative, widths), "measured": ()}

    def averaged(self, moments: Tensor, decay: float) -> Self:
        """Return the inverse with S, (groups, I · n), averaged in; the first one sets it."""
        old = self.tensors["eigenvalues"]
        new = moments.reshape(old.shape)
        return self._with(torch.lerp(old.to(new), new, 1 - decay) if self.measured else new)

    def continuing(self, previous: Self) -> Self:
        """Return the inverse with the previous S, transformed to the bases of this one.

        S = (U_Γᵀ U_Γ′)² S′ ((U_Ωᵀ U_Ω′)²)ᵀ, squared entry by entry; a prime marks the previous
        inverse. In scaled coordinates U_Ω = diag(1/s, 1, ..., 1) U with U orthogonal, and the first
        row of U_Ω′ is multiplied by s′² before, which makes it the transposed inverse of U_Ω′.
        """
        if not previous.measured:
            return self
        moments = previous.tensors["eigenvalues"].to(self.tensors["eigenvalues"])
        new, old = self.bases, previous.bases
        if new.activation is not None and old.activation is not None:
            basis, ratio = old.activation, previous.bias_ratio
            basis = basis if ratio == 1 else scale_first_row(basis, ratio)
            moments = moments @ _squared_cosines(new.activation, basis).mT
        if new.derivative is not None and old.derivative is not None:
            moments = _squared_cosines(new.derivative, old.derivative) @ moments
        return self._with(moments)

    def _with(self, moments: Tensor) -> Self:
        # Rounding errors in directions without gradients become zero; otherwise their reciprocals
        # would dominate without damping.
        rounding = max(moments.shape) * torch.finfo(moments.dtype).eps ** 2
        noise = rounding * moments.amax((-2, -1), keepdim=True)
        moments = torch.where(moments > noise, moments, 0)
        measured = torch.ones((), dtype=moments.dtype)
        return type(self)({**self.tensors, "eigenvalues": moments, "measured": measured})


def _squared_cosines(new: Tensor, old: Tensor) -> Tensor:
    """Return the squared cosines of the angles between two orthogonal bases, (groups, n, n)."""
    return (new.mT @ old.to(new)).square()


class _MeasuringStatistics(FactorStatistics):
    """Ω and Γ as in KFC, and S in the bases of an inverse."""

    def __init__(
        self, layer: MatrixLayer, wide: tuple[bool, bool], inverse: MeasuredInverse
    ) -> None:
        super().__init__(layer, wide)
        self.squares = SquaredGradients(layer, inverse.bases)

    def forward(self, inputs: Tensor, outputs: Tensor) -> Any:
        return super().forward(inputs, outputs), self.squares.forward(inputs, outputs)

    def backward(self, kept: Any, derivatives: Tensor, examples: int) -> None:
        of_factors, inputs = kept
        super().backward(of_factors, derivatives, examples)
        self.squares.backward(inputs, derivatives, examples)

    def end_draw(self) -> None:
        self.squares.end_draw()

    def moments(self, examples: int) -> tuple[Moment, ...]:
        factors = super().moments(examples)
        return factors and factors + self.squares.moments(examples)
