"""Symmetric matrices over one layer's parameters: products, solutions, traces, spectra.

A vector is a gradient in matrix form, (..., groups, I, n). Dense forms are in the order of
``vector.mT.flatten()``, group by group and column by column, so that a Kronecker block is
``torch.kron(activation, derivative)``.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from kfc._helpers import require_number, widest
from kfc.analysis.krylov import (
    UnsolvableError,
    conjugate_gradients,
    operator_norm,
    random_start,
    top_eigenvalues,
)
from kfc.curvature.factor import trace
from kfc.curvature.kronecker import Bases, Factors

GIB = 1 << 30
DEFAULT_MAX_GIB = 2.0
# The most operations, up to a factor, for the spectrum of a block of every unit.
LARGEST_SPECTRUM = 1e9
# How far below zero rounding may take an eigenvalue, relative to the largest magnitude.
NEGATIVE_TOLERANCE = 1e-6


class TooLargeError(MemoryError):
    """Raised if an array would need more memory than allowed."""


class Block(ABC):
    """A symmetric matrix over one layer's parameters.

    Attributes:
        shape: the shape (groups, I, n) of vectors.
        like: a tensor with the dtype and the device of vectors.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        groups, rows, columns = shape
        self.shape = (groups, rows, columns)
        self.like = like

    @property
    def size(self) -> int:
        """The number of rows."""
        return math.prod(self.shape)

    @abstractmethod
    def product(self, vector: Tensor) -> Tensor:
        """Return the block times one or more vectors, (..., groups, I, n)."""

    def solve(self, vector: Tensor, damping: float, tolerance: float = 1e-6) -> Tensor:
        """Return (block + damping · I)⁻¹ times one or more vectors.

        Args:
            tolerance: the relative residual, if the solution is found by products alone.
        """
        require_number("damping", damping, positive=True)
        solutions = [
            conjugate_gradients(lambda v: self.product(v) + damping * v, right, tolerance=tolerance)
            for right in vector.reshape(-1, *self.shape)
        ]
        return torch.stack(solutions).reshape(vector.shape)

    @abstractmethod
    def trace(self) -> float:
        """Return the trace."""

    def dense(self) -> Tensor:
        """Return the matrix, (size, size); ``to_dense()`` checks the memory first."""
        identity = torch.eye(self.size, dtype=self.like.dtype, device=self.like.device)
        return self.product(self.from_order_of_dense(identity)).mT.flatten(1)

    def from_order_of_dense(self, flat: Tensor) -> Tensor:
        """Return vectors (..., groups, I, n) from coordinates (..., size) of the dense form."""
        groups, rows, columns = self.shape
        transposed: Tensor = flat.unflatten(-1, (groups, columns, rows))
        return transposed.mT

    def to_dense(self, max_gib: float = DEFAULT_MAX_GIB) -> Tensor:
        """Return the matrix, (size, size), in the order of ``vector.mT.flatten()``.

        Raises:
            TooLargeError: if it would be larger than ``max_gib``.
        """
        require_number("max_gib", max_gib, positive=True)
        needed = self.size**2 * self.like.element_size() / GIB
        if needed > max_gib:
            raise TooLargeError(
                f"the dense form of this block has {self.size} rows and would take {needed:.1f} "
                f"GiB, more than {max_gib:g}; use product, solve, trace, top_eigenvalues, or give "
                "a larger max_gib"
            )
        return self.dense()

    def spectrum(self) -> Tensor | None:
        """Return all eigenvalues that may be nonzero, descending; ``None`` if that is too large."""
        return None

    def top_eigenvalues(self, count: int) -> Tensor:
        """Return the largest eigenvalues, descending, by Lanczos' method."""
        return top_eigenvalues(self.product, random_start(self.shape, self.like), count)

    def operator_norm(self) -> float:
        """Return the largest magnitude of an eigenvalue."""
        spectrum = self.spectrum()
        if spectrum is not None:
            return float(spectrum.abs().max()) if len(spectrum) else 0.0
        return operator_norm(self.product, random_start(self.shape, self.like))

    def smallest_eigenvalue(self) -> float:
        """Return the smallest eigenvalue, or 0 for sums of outer products without full rank."""
        spectrum = self.spectrum()
        return float(spectrum[-1]) if spectrum is not None and len(spectrum) == self.size else 0.0

    def is_positive(self) -> bool:
        """Return whether the block is positive semi-definite, up to rounding."""
        smallest = self.smallest_eigenvalue()
        return smallest >= 0 or smallest >= -NEGATIVE_TOLERANCE * self.operator_norm()


def reciprocal(values: Tensor, damping: float) -> Tensor:
    """Return 1 / (values + damping); raise ``UnsolvableError`` where that is infinite."""
    require_number("damping", damping)
    damped = values + damping
    if bool((damped == 0).any()):
        raise UnsolvableError("the block is singular; give a damping above 0")
    return 1 / damped


def in_widest(values: Tensor) -> Tensor:
    """Return values in the widest floating point of their device."""
    return values.to(widest(values.device))


class DiagonalBlock(Block):
    """A diagonal, (groups, I, n), in the product of two orthogonal bases, if given.

    In the eigenbases of Ω and Γ, this is the block of EKFAC.
    """

    def __init__(self, diagonal: Tensor, bases: Bases | None = None) -> None:
        super().__init__(diagonal.shape, diagonal)
        self.diagonal = diagonal
        self.bases = bases or Bases()

    def product(self, vector: Tensor) -> Tensor:
        return self._scaled(vector, self.diagonal)

    def solve(self, vector: Tensor, damping: float, tolerance: float = 1e-6) -> Tensor:
        return self._scaled(vector, reciprocal(self.diagonal, damping))

    def _scaled(self, vector: Tensor, scale: Tensor) -> Tensor:
        return self.bases.combine(scale * self.bases.coordinates(vector))

    def trace(self) -> float:
        return float(self.diagonal.sum())

    def spectrum(self) -> Tensor:
        return self.diagonal.flatten().sort(descending=True).values


class KroneckerBlock(Block):
    """Ω ⊗ Γ, block-diagonal over groups; either factor may be indefinite."""

    def __init__(self, factors: Factors) -> None:
        activation, derivative = factors
        shape = (activation.shape[0], derivative.shape[-1], activation.shape[-1])
        super().__init__(shape, activation)
        self.factors = factors

    def product(self, vector: Tensor) -> Tensor:
        return self.factors.derivative @ vector @ self.factors.activation

    def solve(self, vector: Tensor, damping: float, tolerance: float = 1e-6) -> Tensor:
        return self._decomposed.solve(in_widest(vector), damping).to(vector)

    def trace(self) -> float:
        return float((trace(self.factors.activation) * trace(self.factors.derivative)).sum())

    def spectrum(self) -> Tensor:
        return self._decomposed.spectrum()

    @cached_property
    def _decomposed(self) -> DiagonalBlock:
        """The same matrix, in the eigenbases of its factors."""
        (activation, activation_basis), (derivative, derivative_basis) = (
            torch.linalg.eigh(in_widest(factor)) for factor in self.factors
        )
        products = derivative.unsqueeze(-1) * activation.unsqueeze(-2)
        return DiagonalBlock(products, Bases(activation_basis, derivative_basis))


class UnitBlock(Block):
    """A block for every output unit (map), (groups, I, n, n), and zeros between units."""

    def __init__(self, units: Tensor) -> None:
        super().__init__(units.shape[:3], units)
        self.units = units

    def product(self, vector: Tensor) -> Tensor:
        image: Tensor = torch.einsum("gimn,...gin->...gim", self.units, vector)
        return image

    def solve(self, vector: Tensor, damping: float, tolerance: float = 1e-6) -> Tensor:
        require_number("damping", damping)
        columns = vector.reshape(-1, *self.shape).permute(1, 2, 3, 0)
        solved = torch.empty_like(columns)
        for group, unit in itertools.product(*map(range, self.shape[:2])):
            # One at a time: in double precision, all of them may take several times the memory.
            damped = in_widest(self.units[group, unit]).clone()
            damped.diagonal().add_(damping)
            try:
                # A mean of outer products is positive definite with a damping.
                root = torch.linalg.cholesky(damped)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                raise UnsolvableError("the block is singular; give a damping above 0") from error
            right = columns[group, unit].to(damped).contiguous()
            solved[group, unit] = torch.cholesky_solve(right, root).to(solved)
        return solved.permute(3, 0, 1, 2).reshape(vector.shape)

    def trace(self) -> float:
        return float(self.units.diagonal(dim1=-2, dim2=-1).sum())

    def spectrum(self) -> Tensor | None:
        groups, rows, columns = self.shape
        return self._eigenvalues if groups * rows * columns**3 <= LARGEST_SPECTRUM else None

    @cached_property
    def _eigenvalues(self) -> Tensor:
        values: Tensor = torch.linalg.eigvalsh(in_widest(self.units))
        return values.flatten().sort(descending=True).values
