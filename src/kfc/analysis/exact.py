"""The exact Fisher block of a layer."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import require_number, widest
from kfc.analysis.blocks import DEFAULT_MAX_GIB, GIB, Block, reciprocal
from kfc.analysis.recording import LayerRecord, record_layer
from kfc.curvature.damping import UNDAMPED
from kfc.curvature.options import Diagonal
from kfc.fisher.heads import Output
from kfc.fisher.likelihoods import Likelihood


def exact_block(
    model: nn.Module,
    inputs: Any,
    layer: str,
    *,
    likelihood: str | Likelihood = "categorical",
    samples: int | None = None,
    output: Output | None = None,
    seed: int = 0,
    max_gib: float = DEFAULT_MAX_GIB,
) -> ExactBlock:
    """Return the exact Fisher block of one layer on one batch (eqn 19).

    Args:
        max_gib: the memory for the gradients of single examples. If they need more, products are
            computed from activations and derivatives, and systems solved by conjugate gradients.

    The other arguments are those of ``record_layer``.
    """
    record = record_layer(
        model, inputs, layer, likelihood=likelihood, samples=samples, output=output, seed=seed
    )
    return ExactBlock(record, max_gib)


class ExactBlock(Block):
    """E[vec G vec Gᵀ] over the gradients G of single examples and draws.

    With N = draws · examples gradients as the rows of X, divided by the root of the number of
    examples, the block is XᵀX. Its spectrum is computed from the smaller of XᵀX and XXᵀ, if that
    fits into ``max_gib``.

    Attributes:
        rows: N.
    """

    def __init__(self, record: LayerRecord, max_gib: float = DEFAULT_MAX_GIB) -> None:
        require_number("max_gib", max_gib, positive=True)
        super().__init__(record.shape, record.like)
        self.record = record
        self.max_gib = max_gib
        self.rows = record.draws * record.examples

    # Products

    def coefficients(self, vector: Tensor) -> Tensor:
        """Return X v, (..., draws · examples)."""
        if self.keeps_gradients():
            return vector.flatten(-3) @ self._gradients.mT
        found = [self._coefficients_of_one(one) for one in vector.reshape(-1, *self.shape)]
        return torch.stack(found).reshape(*vector.shape[:-3], self.rows)

    def combination(self, coefficients: Tensor) -> Tensor:
        """Return Xᵀ c, (..., groups, I, n)."""
        if self.keeps_gradients():
            found: Tensor = (coefficients @ self._gradients).unflatten(-1, self.shape)
            return found
        each = [self._combination_of_one(one) for one in coefficients.reshape(-1, self.rows)]
        return torch.stack(each).reshape(*coefficients.shape[:-1], *self.shape)

    def product(self, vector: Tensor) -> Tensor:
        return self.combination(self.coefficients(vector))

    def _coefficients_of_one(self, vector: Tensor) -> Tensor:
        """Return ⟨G, V⟩ = Σ_t Ds_t · V a_t for every G, without computing G."""
        parts = [
            (derivatives * (activations @ vector.mT)).sum((-3, -2, -1))
            for _, activations, derivatives in self.record.row_chunks()
        ]
        return torch.cat(parts, dim=1).flatten() / math.sqrt(self.record.examples)

    def _combination_of_one(self, coefficients: Tensor) -> Tensor:
        """Return Σ c G = Σ_t (Σ c Ds_t) a_t, without computing any G."""
        weights = coefficients.unflatten(0, (self.record.draws, self.record.examples))
        total = coefficients.new_zeros(self.shape)
        for part, activations, derivatives in self.record.row_chunks():
            scaled = torch.einsum("rm,rm...->m...", weights[:, part], derivatives)
            total += _over_rows(scaled).mT @ _over_rows(activations)
        return total / math.sqrt(self.record.examples)

    def keeps_gradients(self) -> bool:
        """Return whether X fits into memory."""
        return self.rows * self.size * self.like.element_size() <= self.max_gib * GIB

    @cached_property
    def _gradients(self) -> Tensor:
        """X, (draws · examples, size); a row is G.flatten()."""
        kept = self.like.new_empty(self.record.draws, self.record.examples, self.size)
        for part, gradients in self.record.gradient_chunks():
            kept[:, part] = gradients.flatten(2)
        return kept.div_(math.sqrt(self.record.examples)).flatten(0, 1)

    # Traces, spectra, solutions

    def trace(self) -> float:
        return float(self.diagonal().sum())

    def diagonal(self) -> Tensor:
        """Return the diagonal, (groups, I, n)."""
        (squares,) = self.record.curvature(Diagonal()).block(UNDAMPED).running
        return squares.reshape(self.shape)

    def dense(self) -> Tensor:
        total = self.like.new_zeros(self.size, self.size)
        for _, gradients in self.record.gradient_chunks():
            rows = gradients.mT.flatten(2).flatten(0, 1)
            total.addmm_(rows.mT, rows)
        return total / self.record.examples

    def spectrum(self) -> Tensor | None:
        return self._eigen[0].clamp(min=0).flip(0) if self.is_decomposable() else None

    def solve(self, vector: Tensor, damping: float, tolerance: float = 1e-6) -> Tensor:
        if not self.is_decomposable():
            return super().solve(vector, damping, tolerance)
        values, basis = self._eigen
        if self._is_tall():
            rotated = vector.mT.flatten(-3).to(basis) @ basis
            solution = (rotated * reciprocal(values, damping)) @ basis.mT
            return self.from_order_of_dense(solution).to(vector)
        require_number("damping", damping, positive=True)
        # (XᵀX + δ)⁻¹ v = (v - Xᵀ (XXᵀ + δ)⁻¹ X v) / δ
        inner = self.coefficients(vector).to(basis) @ basis
        inner = (inner * reciprocal(values, damping)) @ basis.mT
        return (vector - self.combination(inner.to(vector))) / damping

    def top_eigenvectors(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the largest eigenvalues, descending, and their vectors (count, groups, I, n)."""
        values, basis = self._eigen
        count = min(count, int((values > 1e-10 * values[-1]).sum()))
        if count == 0:
            return values[:0], self.like.new_zeros(0, *self.shape)
        values, basis = values[-count:].flip(0), basis[:, -count:].flip(1)
        if self._is_tall():
            return values, self.from_order_of_dense(basis.mT).to(self.like)
        vectors = self.combination(basis.mT.to(self.like))
        return values, vectors / values.sqrt().to(vectors).reshape(-1, 1, 1, 1)

    def is_decomposable(self) -> bool:
        """Return whether the smaller of XᵀX and XXᵀ, and for XXᵀ also X, fits into memory."""
        # In double precision, with as much again for the decomposition.
        small = 16 * min(self.rows, self.size) ** 2 <= self.max_gib * GIB
        return small and (self._is_tall() or self.keeps_gradients())

    def _is_tall(self) -> bool:
        return self.size <= self.rows

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues, ascending, and eigenvectors of the smaller of XᵀX and XXᵀ."""
        wide = widest(self.like.device)
        if self._is_tall():
            small = self.dense().to(wide)
        else:
            small = self.like.new_zeros(self.rows, self.rows, dtype=wide)
            for columns in self._gradients.split(1 << 12, dim=1):
                columns = columns.to(wide)
                small.addmm_(columns, columns.mT)
        values, basis = torch.linalg.eigh(small)
        return values, basis


def _over_rows(values: Tensor) -> Tensor:
    """Return (examples, groups, |T|, k) as (groups, examples · |T|, k)."""
    return values.transpose(0, 1).flatten(1, 2)
