"""Symmetric matrices over one layer's parameters: products, solutions, traces, spectra.

A vector is a gradient in matrix form, (..., groups, I, n). Dense forms are in the order of
``vector.mT.flatten()``, group by group and column by column, so that a Kronecker block is
``torch.kron(activation, derivative)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kfc.analysis.krylov import (
    UnsolvableError,
    conjugate_gradients,
    operator_norm,
    random_start,
    top_eigenvalues,
)
from kfc.checks import require_number, widest
from kfc.kronecker import Factors

GIB = 1 << 30
DEFAULT_MAX_GIB = 2.0
# Of the largest magnitude: what an eigenvalue may be below zero by rounding.
NEGATIVE_TOLERANCE = 1e-6


class TooLargeError(MemoryError):
    """A dense form would not fit into the memory that it was given."""


class Block(ABC):
    """A symmetric matrix over one layer's parameters.

    Attributes:
        shape: (groups, I, n) of the vectors.
        like: a tensor of the dtype and on the device of the vectors.
    """

    def __init__(self, shape: tuple[int, int, int], like: Tensor) -> None:
        self.shape = shape
        self.like = like
        # The relative residual to which systems are solved where that is done by products.
        self.tolerance = 1e-6

    @property
    def size(self) -> int:
        """How many rows there are."""
        groups, rows, columns = self.shape
        return groups * rows * columns

    @abstractmethod
    def product(self, vector: Tensor) -> Tensor:
        """The block times a vector, or several, (..., groups, I, n)."""

    @abstractmethod
    def solve(self, vector: Tensor, damping: float) -> Tensor:
        """(block + damping · I)⁻¹ times a vector."""

    @abstractmethod
    def trace(self) -> float: ...

    @abstractmethod
    def dense(self) -> Tensor:
        """(size, size), whatever it takes; :meth:`to_dense` asks about the memory first."""

    def to_dense(self, max_gib: float = DEFAULT_MAX_GIB) -> Tensor:
        """(size, size), in the order of ``vector.mT.flatten()``.

        Raises:
            TooLargeError: if that would be larger than ``max_gib``.
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
        """All eigenvalues that may differ from zero, descending; ``None`` if that is too much."""
        return None

    def top_eigenvalues(self, count: int) -> Tensor:
        """The largest, descending, by Lanczos' method."""
        return top_eigenvalues(self.product, self.random_vector(), count)

    def operator_norm(self) -> float:
        spectrum = self.spectrum()
        if spectrum is not None:
            return float(spectrum.abs().max()) if len(spectrum) else 0.0
        return operator_norm(self.product, self.random_vector())

    def smallest_eigenvalue(self) -> float:
        """Zero for blocks that are sums of outer products and smaller than their number of rows."""
        spectrum = self.spectrum()
        return float(spectrum[-1]) if spectrum is not None and len(spectrum) == self.size else 0.0

    def is_positive(self) -> bool:
        """Whether the block is positive semi-definite, up to rounding."""
        return self.smallest_eigenvalue() >= -NEGATIVE_TOLERANCE * self.operator_norm()

    def random_vector(self, seed: int = 0) -> Tensor:
        return random_start(self.shape, self.like, seed)

    def _solve_by_products(self, vector: Tensor, damping: float) -> Tensor:
        require_number("damping", damping, positive=True)
        flat = vector.reshape(-1, *self.shape)
        solutions = [
            conjugate_gradients(
                lambda v: self.product(v) + damping * v, right, tolerance=self.tolerance
            )
            for right in flat
        ]
        return torch.stack(solutions).reshape(vector.shape)


def reciprocal(values: Tensor, damping: float) -> Tensor:
    """1 / (values + damping), or an error that says what to do."""
    require_number("damping", damping)
    damped = values + damping
    if bool((damped == 0).any()):
        raise UnsolvableError("the block is singular: give a damping above 0")
    return 1 / damped


def in_widest(values: Tensor) -> Tensor:
    return values.to(widest(values.device))


def descending(values: Tensor) -> Tensor:
    ordered, _ = values.flatten().sort(descending=True)
    return ordered


def block_diagonal(blocks: list[Tensor]) -> Tensor:
    joined: Tensor = torch.block_diag(*blocks)
    return joined


class KroneckerBlock(Block):
    """Ω ⊗ Γ, block-diagonal over groups; either factor may be indefinite."""

    def __init__(self, factors: Factors) -> None:
        activation, derivative = factors
        shape = (activation.shape[0], derivative.shape[-1], activation.shape[-1])
        super().__init__(shape, activation)
        self.factors = factors
        self._decomposition: tuple[Tensor, Tensor, Tensor] | None = None

    def product(self, vector: Tensor) -> Tensor:
        return self.factors.derivative @ vector @ self.factors.activation

    def solve(self, vector: Tensor, damping: float) -> Tensor:
        values, activation_basis, derivative_basis = self.eigen()
        rotated = derivative_basis.mT @ vector.to(values) @ activation_basis
        rotated = rotated * reciprocal(values, damping)
        return (derivative_basis @ rotated @ activation_basis.mT).to(vector)

    def trace(self) -> float:
        traces = [f.diagonal(dim1=-2, dim2=-1).sum(-1) for f in self.factors]
        return float((traces[0] * traces[1]).sum())

    def dense(self) -> Tensor:
        return block_diagonal([torch.kron(*pair) for pair in zip(*self.factors, strict=True)])

    def spectrum(self) -> Tensor:
        return descending(self.eigen()[0])

    def eigen(self) -> tuple[Tensor, Tensor, Tensor]:
        """The eigenvalues (groups, I, n), and the bases of Ω and Γ."""
        if self._decomposition is None:
            (activation, activation_basis), (derivative, derivative_basis) = (
                torch.linalg.eigh(in_widest(factor)) for factor in self.factors
            )
            values = derivative.unsqueeze(-1) * activation.unsqueeze(-2)
            self._decomposition = values, activation_basis, derivative_basis
        return self._decomposition


class EigenvalueCorrectedBlock(Block):
    """The eigenbases of Ω and Γ with second moments (groups, I, n) of their own (EKFAC)."""

    def __init__(self, activation_basis: Tensor, derivative_basis: Tensor, moments: Tensor) -> None:
        groups, rows, columns = moments.shape
        super().__init__((groups, rows, columns), moments)
        self.activation_basis = activation_basis
        self.derivative_basis = derivative_basis
        self.moments = moments

    def product(self, vector: Tensor) -> Tensor:
        return self._scaled(vector, self.moments)

    def solve(self, vector: Tensor, damping: float) -> Tensor:
        return self._scaled(vector, reciprocal(self.moments, damping))

    def _scaled(self, vector: Tensor, scale: Tensor) -> Tensor:
        rotated = self.derivative_basis.mT @ vector @ self.activation_basis
        back: Tensor = self.derivative_basis @ (scale * rotated) @ self.activation_basis.mT
        return back

    def trace(self) -> float:
        return float(self.moments.sum())

    def dense(self) -> Tensor:
        bases = list(map(torch.kron, self.activation_basis, self.derivative_basis))
        scales = [m.mT.flatten() for m in self.moments]
        return block_diagonal([b * s @ b.mT for b, s in zip(bases, scales, strict=True)])

    def spectrum(self) -> Tensor:
        return descending(self.moments)


class DiagonalBlock(Block):
    """A diagonal, (groups, I, n)."""

    def __init__(self, diagonal: Tensor) -> None:
        groups, rows, columns = diagonal.shape
        super().__init__((groups, rows, columns), diagonal)
        self.diagonal = diagonal

    def product(self, vector: Tensor) -> Tensor:
        return self.diagonal * vector

    def solve(self, vector: Tensor, damping: float) -> Tensor:
        return reciprocal(self.diagonal, damping) * vector

    def trace(self) -> float:
        return float(self.diagonal.sum())

    def dense(self) -> Tensor:
        return self.diagonal.mT.flatten().diag()

    def spectrum(self) -> Tensor:
        return descending(self.diagonal)


class UnitBlock(Block):
    """A block for every output unit (map), (groups, I, n, n), and nothing between them."""

    def __init__(self, units: Tensor) -> None:
        groups, rows, columns, _ = units.shape
        super().__init__((groups, rows, columns), units)
        self.units = units
        self._values: Tensor | None = None

    def product(self, vector: Tensor) -> Tensor:
        return self._from_columns(self.units @ self._columns(vector), vector)

    def solve(self, vector: Tensor, damping: float) -> Tensor:
        require_number("damping", damping)
        damped = in_widest(self.units).clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        try:
            solved = torch.linalg.solve(damped, self._columns(vector).to(damped))
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise UnsolvableError("the block is singular: give a damping above 0") from error
        return self._from_columns(solved, vector)

    def _columns(self, vector: Tensor) -> Tensor:
        """(groups, I, n, k): a vector is a column for each unit, several are several columns."""
        return vector.reshape(-1, *self.shape).permute(1, 2, 3, 0)

    def _from_columns(self, columns: Tensor, like: Tensor) -> Tensor:
        return columns.permute(3, 0, 1, 2).reshape(like.shape).to(like)

    def trace(self) -> float:
        return float(self.units.diagonal(dim1=-2, dim2=-1).sum())

    def dense(self) -> Tensor:
        groups, rows, columns = self.shape
        dense = self.units.new_zeros(groups, columns, rows, groups, columns, rows)
        for group in range(groups):
            for row in range(rows):
                dense[group, :, row, group, :, row] = self.units[group, row]
        return dense.reshape(self.size, self.size)

    def spectrum(self) -> Tensor:
        if self._values is None:
            self._values = descending(torch.linalg.eigvalsh(in_widest(self.units)))
        return self._values
