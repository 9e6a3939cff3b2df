"""EKFAC: the eigenbasis of KFC's factors, with the curvature along it measured (George et al.)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfc.kronecker import EigenInverse
from kfc.layers.base import Inverse, Moment, Statistics
from kfc.layers.structures.gradients import Bases, SquaredGradients
from kfc.layers.structures.kfc import FactorStatistics, KroneckerFactors

if TYPE_CHECKING:
    from kfc.layers.factored import KroneckerHandler


class MeasuredEigenbasis(KroneckerFactors):
    """Second moments S of gradients, in the basis in which Ω ⊗ Γ is diagonal, in place of that.

    The running averages are Ω and Γ. S (groups, I, n) means nothing without its bases, and is kept
    with them, in the inverse: statistics gathered while there is one measure S too, and it takes
    it up at once. An inverse with new bases takes over what the one before it knew. δ is added to
    every entry of S.
    """

    treatment = "Kronecker eigenbasis"

    def statistics(self, handler: KroneckerHandler, inverse: Inverse | None) -> Statistics:
        if inverse is None:
            return super().statistics(handler, None)
        assert isinstance(inverse, MeasuredInverse)
        return _MeasuringStatistics(handler, inverse)

    def invert(
        self, handler: KroneckerHandler, running: tuple[Tensor, ...], damping: float, kind: str
    ) -> Inverse:
        return MeasuredInverse(EigenInverse.of(self.factors(handler, running), damping).tensors)

    def continued(self, inverse: Inverse, previous: Inverse) -> Inverse:
        assert isinstance(inverse, MeasuredInverse)
        assert isinstance(previous, MeasuredInverse)
        return inverse.continuing(previous) if previous.measured else inverse

    def measured_shapes(self, handler: KroneckerHandler) -> tuple[tuple[int, ...], ...]:
        width, height = handler.sizes()
        return ((handler.groups, height * width),)

    def updated(self, inverse: Inverse, means: tuple[Tensor, ...], decay: float) -> Inverse:
        assert isinstance(inverse, MeasuredInverse)
        (moments,) = means
        return inverse.averaged(moments, decay)

    def inverse_shapes(self, handler: KroneckerHandler, kind: str) -> dict[str, tuple[int, ...]]:
        return MeasuredInverse.shapes(*self.factor_shapes(handler))

    def inverse_triangles(self, kind: str) -> tuple[str, ...]:
        return MeasuredInverse.triangles

    def restore_inverse(self, tensors: Mapping[str, Tensor], kind: str) -> Inverse:
        return MeasuredInverse(tensors)


class MeasuredInverse(EigenInverse):
    """U (diag S + δ I)⁻¹ Uᵀ with U = U_Ω ⊗ U_Γ; until S is ``measured``, the eigenvalues of Ω ⊗ Γ.

    The tensors are those of an :class:`EigenInverse`, with S for eigenvalues, and the flag.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        unmeasured = torch.zeros((), dtype=tensors["eigenvalues"].dtype)
        super().__init__({"measured": unmeasured, **tensors})
        self.measured = bool(self.tensors["measured"])

    @classmethod
    def shapes(
        cls, activation: tuple[int, ...], derivative: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(activation, derivative), "measured": ()}

    @property
    def bases(self) -> Bases:
        return Bases(self.tensors.get("activation_basis"), self.tensors.get("derivative_basis"))

    def averaged(self, moments: Tensor, decay: float) -> MeasuredInverse:
        """With newly measured S, (groups, I · n), averaged with the old; the first sets it."""
        old = self.tensors["eigenvalues"]
        new = moments.reshape(old.shape)
        return self._with(torch.lerp(old.to(new), new, 1 - decay) if self.measured else new)

    def continuing(self, previous: MeasuredInverse) -> MeasuredInverse:
        """With the diagonal, in the bases of this one, of the block that the previous one inverts.

        S = (U_Γᵀ U_Γ′)² S′ ((U_Ωᵀ U_Ω′)²)ᵀ, squared entry by entry, with those of the previous one
        marked by a prime.
        """
        moments = previous.tensors["eigenvalues"].to(self.tensors["eigenvalues"])
        new, old = self.bases, previous.bases
        if new.activation is not None and old.activation is not None:
            moments = moments @ _squared_cosines(new.activation, old.activation).mT
        if new.derivative is not None and old.derivative is not None:
            moments = _squared_cosines(new.derivative, old.derivative) @ moments
        return self._with(moments)

    def _with(self, moments: Tensor) -> MeasuredInverse:
        # What rounding leaves of gradients in directions in which there are none: nothing, or
        # without damping their reciprocals would be all there is.
        rounding = max(moments.shape) * torch.finfo(moments.dtype).eps ** 2
        noise = rounding * moments.amax((-2, -1), keepdim=True)
        moments = torch.where(moments > noise, moments, 0)
        measured = torch.ones((), dtype=moments.dtype)
        return MeasuredInverse({**self.tensors, "eigenvalues": moments, "measured": measured})


def _squared_cosines(new: Tensor, old: Tensor) -> Tensor:
    """(groups, n, n): of the angles between the vectors of two orthogonal bases."""
    return (new.mT @ old.to(new)).square()


class _MeasuringStatistics(FactorStatistics):
    """Ω and Γ as in KFC; S in the bases of an inverse."""

    def __init__(self, handler: KroneckerHandler, inverse: MeasuredInverse) -> None:
        super().__init__(handler)
        self.squares = SquaredGradients(handler, inverse.bases)

    def forward(self, inputs: Tensor, outputs: Tensor) -> Any:
        return super().forward(inputs, outputs), self.squares.forward(inputs)

    def backward(self, kept: Any, derivatives: Tensor, examples: int) -> None:
        of_factors, inputs = kept
        super().backward(of_factors, derivatives, examples)
        self.squares.backward(inputs, derivatives, examples)

    def end_draw(self) -> None:
        self.squares.end_draw()

    def moments(self, examples: int) -> tuple[Moment, ...]:
        factors = super().moments(examples)
        return (*factors, self.squares.moment(examples)) if factors else ()
