"""Kronecker factors of a Fisher block, their damping and their inverses: matrices, no modules.

Notation (section 2.2 and Theorem 2 of the paper). A block is approximated by Ω ⊗ Γ, with the
activation factor Ω (groups, n, n) and the derivative factor Γ (groups, m, m); a gradient is a
batch of matrices V (groups, m, n), and (Ω ⊗ Γ)⁻¹ vec V = vec(Γ⁻¹ V Ω⁻¹). A factor too wide to be
kept whole is its diagonal, (groups, n). The damping is δ = λ + γ, weight decay plus damping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """Ω and Γ of one layer, batched over groups; either may be a diagonal, (groups, size)."""

    activation: Tensor
    derivative: Tensor


def is_diagonal(factor: Tensor) -> bool:
    return factor.dim() == 2


def trace(factor: Tensor) -> Tensor:
    """(groups,)"""
    diagonal = factor if is_diagonal(factor) else factor.diagonal(dim1=-2, dim2=-1)
    return diagonal.sum(-1)


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """(groups,)"""
    return trace(factor) / factor.shape[-1]


def factor_balance(factors: Factors) -> Tensor:
    """π, (groups,): splits the damping between the factors in proportion to their mean eigenvalues.

    The ratio of the trace norms of Ω ⊗ I and I ⊗ Γ, square-rooted; 1 where either is zero.
    """
    activation, derivative = (mean_eigenvalue(factor) for factor in factors)
    known = (activation > 0) & (derivative > 0)
    one = torch.ones_like(activation)
    # Roots before the quotient: the quotient itself may leave float32's range.
    root_ratio = (
        torch.where(known, activation, one).sqrt() / torch.where(known, derivative, one).sqrt()
    )
    return torch.where(torch.isfinite(root_ratio) & (root_ratio > 0), root_ratio, one)


def damping_shifts(factors: Factors, damping: float) -> tuple[Tensor, Tensor]:
    """π √δ and √δ / π, each (groups,): what damping adds to the diagonals of Ω and Γ, eqn (9)."""
    balance = factor_balance(factors)
    root = damping**0.5
    return balance * root, root / balance


def add_to_diagonal(factor: Tensor, amount: Tensor) -> Tensor:
    """A new factor with amount (groups,) added to each group's diagonal."""
    result = factor.clone()
    diagonal = result if is_diagonal(factor) else result.diagonal(dim1=-2, dim2=-1)
    diagonal += amount.unsqueeze(-1)
    return result


class KroneckerInverse(ABC):
    """The inverse of one damped block, ready to be applied; its tensors are its whole state."""

    tensors: dict[str, Tensor]
    #: Those of which the lower triangle says all.
    triangles: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> KroneckerInverse:
        """From its tensors; of ``triangles``, the rest is as the lower part mirrored has it."""
        return cls(tensors)

    @classmethod
    @abstractmethod
    def of(cls, factors: Factors, damping: float) -> KroneckerInverse:
        """The inverse of the block with these factors, damped by δ."""

    @classmethod
    @abstractmethod
    def shapes(
        cls, activation: tuple[int, ...], derivative: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of ``tensors``, from those of the factors."""

    @abstractmethod
    def apply(self, gradient: Tensor) -> Tensor:
        """The inverse times a gradient (groups, m, n)."""

    def redamped(self, factors: Factors, damping: float) -> KroneckerInverse:
        """With another damping; the factors are still those it was made of."""
        return self.of(factors, damping)


class FactoredInverse(KroneckerInverse):
    """Γ_damped⁻¹ V Ω_damped⁻¹ (eqn 10) from the Cholesky factors of the damped factors.

    The inverses themselves would take three times as long to compute, and no less to apply.
    """

    triangles = Factors._fields

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.activation, self.derivative = (
            DampedInverse(tensors[name], bool(explicit))
            for name, explicit in zip(Factors._fields, tensors["explicit"].tolist(), strict=True)
        )

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> FactoredInverse:
        roots = [
            n for n, e in zip(Factors._fields, tensors["explicit"].tolist(), strict=True) if not e
        ]
        return cls({**tensors, **{name: tensors[name].tril() for name in roots}})

    @classmethod
    def of(cls, factors: Factors, damping: float) -> FactoredInverse:
        inverses = invert_shifted(factors, damping_shifts(factors, damping))
        tensors = {n: i.matrix for n, i in zip(Factors._fields, inverses, strict=True)}
        return cls({**tensors, "explicit": torch.tensor([i.explicit for i in inverses])})

    @classmethod
    def shapes(
        cls, activation: tuple[int, ...], derivative: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        return {"activation": activation, "derivative": derivative, "explicit": (2,)}

    def apply(self, gradient: Tensor) -> Tensor:
        return self.derivative.times(self.activation.times(gradient.mT).mT)


class EigenInverse(KroneckerInverse):
    """(Ω ⊗ Γ + δ I)⁻¹ exactly, from the factors' eigendecompositions (appendix A.2)."""

    @classmethod
    def of(cls, factors: Factors, damping: float) -> EigenInverse:
        (activation_values, activation_basis), (derivative_values, derivative_basis) = map(
            eigendecompose, factors
        )
        products = derivative_values.unsqueeze(-1) * activation_values.unsqueeze(-2)
        tensors = {"eigenvalues": products, "damping": products.new_tensor(damping)}
        if activation_basis is not None:
            tensors["activation_basis"] = activation_basis
        if derivative_basis is not None:
            tensors["derivative_basis"] = derivative_basis
        return cls(tensors)

    @classmethod
    def shapes(
        cls, activation: tuple[int, ...], derivative: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        eigenvalues = (activation[0], derivative[-1], activation[-1])
        shapes: dict[str, tuple[int, ...]] = {"eigenvalues": eigenvalues, "damping": ()}
        # A diagonal has no basis.
        bases = {"activation_basis": activation, "derivative_basis": derivative}
        return {**shapes, **{name: shape for name, shape in bases.items() if len(shape) == 3}}

    def apply(self, gradient: Tensor) -> Tensor:
        activation_basis = self.tensors.get("activation_basis")
        derivative_basis = self.tensors.get("derivative_basis")
        result = gradient
        if activation_basis is not None:
            result = result @ activation_basis
        if derivative_basis is not None:
            result = derivative_basis.mT @ result
        damped = self.tensors["eigenvalues"] + self.tensors["damping"]
        result = result * reciprocal_or_zero(damped)
        if activation_basis is not None:
            result = result @ activation_basis.mT
        if derivative_basis is not None:
            result = derivative_basis @ result
        return result

    def redamped(self, factors: Factors, damping: float) -> EigenInverse:
        shift = torch.full_like(self.tensors["damping"], damping)
        return type(self)({**self.tensors, "damping": shift})


INVERSES: dict[str, type[KroneckerInverse]] = {"factored": FactoredInverse, "eigen": EigenInverse}


class DampedInverse(NamedTuple):
    """(factor + shift I)⁻¹, ready to be applied.

    Attributes:
        matrix: (groups, n, n), the lower Cholesky factor of factor + shift I; or the inverse
            itself if it is ``explicit``, (groups, n) if that is a diagonal.
    """

    matrix: Tensor
    explicit: bool

    def times(self, right: Tensor) -> Tensor:
        """The inverse times (groups, n, k)."""
        if not self.explicit:
            return torch.cholesky_solve(right, self.matrix)
        if is_diagonal(self.matrix):
            return self.matrix.unsqueeze(-1) * right
        return self.matrix @ right


def invert_shifted(factors: Sequence[Tensor], shifts: Sequence[Tensor]) -> list[DampedInverse]:
    """(factor + shift I)⁻¹ for positive semi-definite factors; always finite.

    Cholesky in the factors' own precision where that can be trusted, else more carefully. All
    factors are launched before the one look at whether they can be.
    """
    damped = [add_to_diagonal(f, shift) for f, shift in zip(factors, shifts, strict=True)]
    whole = [index for index, factor in enumerate(factors) if not is_diagonal(factor)]
    roots = {index: _cholesky(damped[index]) for index in whole}
    flags = [trusted for _, trusted in roots.values()]
    trusted = dict(zip(whole, torch.stack(flags).tolist() if flags else [], strict=True))
    result = []
    for index, (factor, shift) in enumerate(zip(factors, shifts, strict=True)):
        if index not in roots:
            result.append(DampedInverse(reciprocal_or_zero(damped[index]), True))
        elif trusted[index]:
            result.append(DampedInverse(roots[index][0], False))
        else:
            result.append(DampedInverse(_invert_carefully(factor, shift), True))
    return result


def _cholesky(damped: Tensor) -> tuple[Tensor, Tensor]:
    """The lower Cholesky factor, and whether it can be trusted."""
    lower, info = torch.linalg.cholesky_ex(damped)
    diagonal = lower.diagonal(dim1=-2, dim2=-1)
    # The square of this ratio bounds the reciprocal condition number from above.
    spread = diagonal.amin(-1) / diagonal.amax(-1)
    lowest = torch.finfo(damped.dtype).eps ** 0.4
    return lower, ((info == 0) & (spread > lowest)).all()


def _invert_carefully(factor: Tensor, shift: Tensor) -> Tensor:
    """The inverse itself: more accurate, when rounded, than a rounded Cholesky factor."""
    # On the CPU: the case is rare, and not every device has float64.
    wide, wide_shift = (part.to("cpu", torch.float64) for part in (factor, shift))
    lower, trusted = _cholesky(add_to_diagonal(wide, wide_shift))
    if trusted:
        return torch.cholesky_inverse(lower).to(factor)
    # Eigenvalues that are rounding errors of the factor's own precision become zero, so that
    # only the shift is left of them; without a shift, this is the pseudo-inverse.
    values, basis = eigendecompose(wide, precision=torch.finfo(factor.dtype).eps)
    assert basis is not None
    reciprocals = reciprocal_or_zero(values + wide_shift.unsqueeze(-1))
    return ((basis * reciprocals.unsqueeze(-2)) @ basis.mT).to(factor)


def reciprocal_or_zero(values: Tensor) -> Tensor:
    """1/x, and 0 where x is (all but) 0: the pseudo-inverse of a diagonal."""
    counts = values > 4 * torch.finfo(torch.float32).tiny
    return torch.where(counts, 1 / torch.where(counts, values, 1), 0)


def eigendecompose(factor: Tensor, precision: float | None = None) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues (groups, n) and basis (groups, n, n); no basis for a diagonal.

    Eigenvalues that are nothing but rounding errors at the given precision are returned as zero.
    """
    if is_diagonal(factor):
        return factor, None
    # Lifted by its mean eigenvalue: float32 eigh of a rank-deficient matrix can be tens of times
    # slower, or fail to converge.
    lift = mean_eigenvalue(factor)
    lifted = add_to_diagonal(factor, lift)
    try:
        values, basis = torch.linalg.eigh(lifted)
    except RuntimeError:  # torch.linalg.LinAlgError
        wide = torch.linalg.eigh(lifted.to("cpu", torch.float64))
        values, basis = (part.to(factor) for part in wide)
    values = values - lift.unsqueeze(-1)
    rounding = factor.shape[-1] * (precision or torch.finfo(factor.dtype).eps)
    noise = values.amax(-1, keepdim=True) * rounding
    return torch.where(values > noise, values, 0), basis
