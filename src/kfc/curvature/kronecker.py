"""Kronecker factors of a Fisher block, their damping, and the inverses of blocks.

Notation (section 2.2 and Theorem 2 of the paper): a block is approximated by Ω ⊗ Γ, with the
activation factor Ω (groups, n, n) and the derivative factor Γ (groups, m, m). A gradient is a
batch of matrices V (groups, m, n), and (Ω ⊗ Γ)⁻¹ vec V = vec(Γ⁻¹ V Ω⁻¹). A factor that is too wide
is kept as its diagonal, (groups, n). The damping is δ = λ + γ, weight decay plus damping.

A bias with a damping of its own: the damped block is Ω ⊗ Γ + δ S² ⊗ I with S = diag(s, 1, ..., 1)
and s² = δ_bias / δ, the ``bias_ratio``. It equals (S ⊗ I) (Ω̃ ⊗ Γ + δ I) (S ⊗ I) with
Ω̃ = S⁻¹ Ω S⁻¹, so that Ω̃ is damped and inverted like any other factor, and S⁻¹ is multiplied into
what is kept of the inverse. With s = 1, nothing is multiplied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from kfc._helpers import at_least_float32
from kfc.curvature.damped import DampedInverse, Form, invert_shifted
from kfc.curvature.factor import (
    eigendecompose,
    is_diagonal,
    mean_eigenvalue,
    reciprocal_or_zero,
    scale_first,
    scale_first_row,
)
from kfc.curvature.low_rank import NARROWEST, most_columns, times_between
from kfc.moments.folding import Shape, whole, width

# Factors up to this width, or up to this many times the width of the other factor, have explicit
# inverses, which products apply faster than solves do.
SMALL, FEW = 1000, 16


class Factors(NamedTuple):
    """Ω and Γ of one layer, batched over groups.

    Either may be a diagonal, (groups, size). Inverses take folded and rounded ones too.
    """

    activation: Tensor
    derivative: Tensor


def factor_balance(factors: Factors) -> Tensor:
    """Return π, (groups,), which splits the damping between the factors.

    It is the square root of the ratio of their mean eigenvalues, or 1 if either is zero.
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
    """Return π √δ and √δ / π, (groups,), which damping adds to the diagonals of Ω and Γ."""
    balance = factor_balance(factors)
    root = damping**0.5
    return balance * root, root / balance


class Bases(NamedTuple):
    """Orthogonal bases U_Ω (groups, n, n) and U_Γ (groups, m, m); ``None`` is the identity.

    If the bias has a damping of its own, S⁻¹ U with the basis U of Ω̃ takes the place of U_Ω. It is
    not orthogonal; ``coordinates()`` and ``combine()`` are then transposes of each other, but
    not inverses.
    """

    activation: Tensor | None = None
    derivative: Tensor | None = None

    def coordinates(self, gradient: Tensor) -> Tensor:
        """Return U_Γᵀ V U_Ω of a gradient V (groups, m, n)."""
        result = gradient if self.activation is None else gradient @ self.activation
        return result if self.derivative is None else self.derivative.mT @ result

    def combine(self, coordinates: Tensor) -> Tensor:
        """Return U_Γ C U_Ωᵀ of coordinates C (groups, m, n)."""
        result = coordinates if self.activation is None else coordinates @ self.activation.mT
        return result if self.derivative is None else self.derivative @ result


class Inverse(ABC):
    """The inverse of one damped block, ready to be applied; its tensors are its whole state."""

    #: The tensors of which only the lower triangle is read.
    triangles: ClassVar[tuple[str, ...]] = ()
    #: Whether another damping needs no new decomposition.
    redamps_cheaply: ClassVar[bool] = True
    #: The lowest entries that saved tensors may have.
    lowest: ClassVar[Mapping[str, float]] = {}

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    @classmethod
    def problem(cls, tensors: Mapping[str, Tensor]) -> str:
        """Return why saved tensors of the right shapes are no inverse; empty if they are one."""
        return ""

    @abstractmethod
    def apply(self, gradient: Tensor) -> Tensor:
        """Return the inverse times a gradient."""

    @classmethod
    def widths_of(cls, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Return the sizes of an inverse's tensors that the shapes of the factors do not tell."""
        return ()

    def whiten(self, matrix: Tensor) -> Tensor:
        """Return V Rᵀ of V (groups, I, n), if the inverse is kept as Rᵀ R."""
        raise NotImplementedError(f"{type(self).__name__} has no root")

    def unwhiten(self, matrix: Tensor) -> Tensor:
        """Return V R of V (groups, I, n), if the inverse is kept as Rᵀ R."""
        raise NotImplementedError(f"{type(self).__name__} has no root")

    def redamped(self, damping: float) -> Self | None:
        """Return the inverse with another damping; ``None`` if the block must be inverted anew.

        The ratio of the dampings of bias and weight stays the same.
        """
        return None

    def reordered(self, order: Tensor) -> Self | None:
        """Return the inverse for gradients with reordered columns; ``None`` if that is costly."""
        return None

    def averaged(self, moments: Tensor, decay: float) -> Self:
        """Return the inverse updated with moments that statistics measured for it."""
        return self

    def continuing(self, previous: Self) -> Self:
        """Return the inverse with what the previous inverse of the layer had measured."""
        return self


class Accuracy(NamedTuple):
    """How accurate an inverse has to be.

    Attributes:
        tolerance: the allowed error of each factor's inverse, if a cheaper one exists; ``None``:
            exact.
        columns: the largest ranks of the inverses of Ω and Γ; 0 for an exact inverse.
        previous: an earlier inverse of the block, which may help to find the next one.
    """

    tolerance: float | None = None
    columns: tuple[int, int] = (0, 0)
    previous: Inverse | None = None


EXACT = Accuracy()


class KroneckerInverse(Inverse):
    """The inverse of a damped block Ω ⊗ Γ, which is applied to (groups, m, n)."""

    @classmethod
    @abstractmethod
    def of(
        cls, factors: Factors, damping: float, bias_ratio: float = 1.0, accuracy: Accuracy = EXACT
    ) -> Self:
        """Return the inverse of the block with these factors, damped by δ.

        Args:
            bias_ratio: s² = δ_bias / δ; the first coordinate of Ω is damped by s² δ.
        """

    @classmethod
    @abstractmethod
    def shapes(
        cls, activation: Shape, derivative: Shape, widths: tuple[int, ...] = ()
    ) -> dict[str, Shape]:
        """Return the shapes of ``tensors`` for factors of these shapes.

        Args:
            widths: what ``widths_of()`` returns; if empty, the shapes of an exact inverse.
        """


class FactoredInverse(KroneckerInverse):
    """Γ_damped⁻¹ V Ω_damped⁻¹ (eqn 11) from Cholesky decompositions or from leading eigenpairs.

    Wide factors are inverted by ``kfc.curvature.low_rank`` if a tolerance is given, the others by
    Cholesky decompositions of the damped factors. A factor that is small, or not much larger than
    the other one, gets its explicit inverse, which takes longer to compute but less time to apply.

    If the bias has a damping of its own, Ω_damped = Ω + π √δ S², with the π of Ω̃ and Γ: the
    dampings of the bias's coordinate in Ω and Γ multiply to δ_bias.
    """

    triangles = Factors._fields
    redamps_cheaply = False

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.activation, self.derivative = (
            DampedInverse(tensors[name], Form(form))
            for name, form in zip(Factors._fields, tensors["forms"].tolist(), strict=True)
        )

    @classmethod
    def of(
        cls, factors: Factors, damping: float, bias_ratio: float = 1.0, accuracy: Accuracy = EXACT
    ) -> Self:
        if bias_ratio != 1:
            scaled = scale_first(at_least_float32(whole(factors.activation)), bias_ratio**-0.5)
            factors = factors._replace(activation=scaled)
        tolerance, columns, previous = accuracy
        starts: tuple[DampedInverse | None, ...] = None, None
        if isinstance(previous, FactoredInverse):
            starts = previous.activation, previous.derivative
        shifts = damping_shifts(factors, damping)
        inverses = invert_shifted(factors, shifts, tolerance, columns, starts)
        # The explicit inverse takes ⅔ n³ more multiply-adds, and applying it n² m either way.
        sizes = [width(factor) for factor in factors]
        explicit = [n <= max(FEW * m, SMALL) for n, m in zip(sizes, reversed(sizes), strict=True)]
        inverses = [i.explicit() if e else i for i, e in zip(inverses, explicit, strict=True)]
        if bias_ratio != 1:
            inverses[0] = inverses[0].unscaled(bias_ratio**0.5)
        tensors = {n: i.matrix for n, i in zip(Factors._fields, inverses, strict=True)}
        return cls({**tensors, "forms": torch.tensor([int(i.form) for i in inverses])})

    @classmethod
    def widths_of(cls, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        saved = [tensors[name].shape for name in Factors._fields if name in tensors]
        return tuple(shape[-1] if shape else 0 for shape in saved)

    @classmethod
    def problem(cls, tensors: Mapping[str, Tensor]) -> str:
        forms = tensors["forms"].tolist()
        for name, form in zip(Factors._fields, forms, strict=True):
            if form not in set(Form):
                return f"forms must be among {[int(each) for each in Form]}, got {forms}"
            problem = DampedInverse(tensors[name], Form(form)).problem()
            if problem:
                return f"{name} {problem}"
        return ""

    @classmethod
    def shapes(
        cls, activation: Shape, derivative: Shape, widths: tuple[int, ...] = ()
    ) -> dict[str, Shape]:
        exact = dict(zip(Factors._fields, (activation, derivative), strict=True))
        for (name, shape), columns in zip(exact.items(), widths, strict=False):
            if (
                len(shape) == 3
                and shape[-1] >= NARROWEST
                and columns <= 1 + most_columns(shape[-1])
            ):
                exact[name] = (*shape[:-1], columns)
        return {**exact, "forms": (2,)}

    @cached_property
    def _prepared(self) -> tuple[DampedInverse, DampedInverse]:
        return self.activation.prepared(), self.derivative.prepared()

    def apply(self, gradient: Tensor) -> Tensor:
        activation, derivative = self._prepared
        if activation.cheap is not None and derivative.cheap is not None:
            return times_between(derivative.cheap, gradient, activation.cheap)
        return derivative.times_(activation.after(gradient))

    def reordered(self, order: Tensor) -> Self | None:
        activation = self.activation.reordered(order)
        if activation is None:
            return None
        return type(self)({**self.tensors, "activation": activation.matrix})


class EigenInverse(KroneckerInverse):
    """(Ω ⊗ Γ + δ I)⁻¹ exactly, from the factors' eigendecompositions (appendix A.2).

    If the bias has a damping of its own, (Ω ⊗ Γ + δ S² ⊗ I)⁻¹ exactly.
    """

    lowest: ClassVar[Mapping[str, float]] = {
        "eigenvalues": 0.0,
        "damping": 0.0,
        "bias_ratio": 1e-13,
    }

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.bias_ratio = float(self.tensors["bias_ratio"])

    @property
    def bases(self) -> Bases:
        return Bases(*(self.tensors.get(f"{name}_basis") for name in Factors._fields))

    @classmethod
    def of(
        cls, factors: Factors, damping: float, bias_ratio: float = 1.0, accuracy: Accuracy = EXACT
    ) -> Self:
        """Return the inverse, which is always exact."""
        factors = Factors(*map(whole, factors))
        # A diagonal Ω needs no scale: the damping of each of its coordinates is added as it is.
        scales = bias_ratio != 1 and not is_diagonal(factors.activation)
        if scales:
            scaled = scale_first(factors.activation, bias_ratio**-0.5)
            factors = factors._replace(activation=scaled)
        values, bases = zip(*map(eigendecompose, factors), strict=True)
        if scales:
            bases = (scale_first_row(bases[0], bias_ratio**-0.5), bases[1])
        products = values[1].unsqueeze(-1) * values[0].unsqueeze(-2)
        named = zip(Factors._fields, bases, strict=True)
        tensors = {f"{name}_basis": basis for name, basis in named if basis is not None}
        numbers = {
            "damping": products.new_tensor(damping),
            "bias_ratio": torch.tensor(bias_ratio, dtype=products.dtype),  # on the host
        }
        return cls({"eigenvalues": products, **numbers, **tensors})

    @classmethod
    def shapes(
        cls, activation: Shape, derivative: Shape, widths: tuple[int, ...] = ()
    ) -> dict[str, Shape]:
        eigenvalues = (activation[0], derivative[-1], activation[-1])
        # A diagonal has no basis.
        bases = {"activation_basis": activation, "derivative_basis": derivative}
        kept = {name: shape for name, shape in bases.items() if len(shape) == 3}
        return {"eigenvalues": eigenvalues, "damping": (), "bias_ratio": (), **kept}

    def apply(self, gradient: Tensor) -> Tensor:
        eigenvalues, damping = self.tensors["eigenvalues"], self.tensors["damping"]
        damped = eigenvalues + damping
        if self.bias_ratio != 1 and self.bases.activation is None:
            damped[..., 0] = eigenvalues[..., 0] + damping * self.bias_ratio
        return self.bases.combine(self.bases.coordinates(gradient) * reciprocal_or_zero(damped))

    def redamped(self, damping: float) -> Self:
        shift = torch.full_like(self.tensors["damping"], damping)
        return type(self)({**self.tensors, "damping": shift})


INVERSES: dict[str, type[KroneckerInverse]] = {"factored": FactoredInverse, "eigen": EigenInverse}
