"""The quadratic model of the objective on a few directions (appendix A.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfc.checks import widest
from kfc.fisher import products_of_call
from kfc.gathering import Gathering


@dataclass(frozen=True)
class QuadraticModel:
    """M(c) = bᵀc + ½ cᵀ(A + λS)c, what updates v = Σ cᵢ vᵢ are predicted to change.

    Attributes:
        slopes: b, (k,): ∇hᵀ vᵢ.
        curvature: A, (k, k): vᵢᵀ (F + weight decay) vⱼ, F the exact Fisher matrix of the batch.
        overlaps: S, (k, k): vᵢᵀ vⱼ.
        precision: the relative error of their entries.

    All are float64 on the CPU. λ is the model's damping.
    """

    slopes: Tensor
    curvature: Tensor
    overlaps: Tensor
    precision: float

    def is_finite(self) -> bool:
        parts = (self.slopes, self.curvature, self.overlaps)
        return all(bool(torch.isfinite(part).all()) for part in parts)

    def is_dominated_by(self, damping: float, coefficients: Sequence[float]) -> bool:
        """Whether λS outweighs A at these coefficients."""
        c = self.slopes.new_tensor(coefficients)
        return bool(damping * (c @ self.overlaps @ c) > c @ self.curvature @ c)

    def on(self, directions: Sequence[int]) -> QuadraticModel:
        """The model on some of the directions only."""
        chosen = torch.tensor(directions)
        return QuadraticModel(
            self.slopes[chosen],
            self.curvature[chosen][:, chosen],
            self.overlaps[chosen][:, chosen],
            self.precision,
        )

    def change(self, coefficients: Sequence[float], damping: float = 0.0) -> float:
        """M(c), with λS if a damping λ is given."""
        c = self.slopes.new_tensor(coefficients)
        return (self.slopes @ c + 0.5 * c @ self._damped(damping) @ c).item()

    def minimiser(self, damping: float, fixed: Mapping[int, float] | None = None) -> list[float]:
        """The c that minimises M, some coefficients being given.

        Directions that vanish, that the model sees no curvature in, or that are linear combinations
        of others up to rounding, do not make it singular: the solution is the shortest, with each
        direction scaled to unit curvature.
        """
        fixed = fixed or {}
        c = torch.zeros_like(self.slopes)
        for index, value in fixed.items():
            c[index] = value
        matrix = self._damped(damping)
        free = torch.tensor(
            [i for i in range(len(c)) if i not in fixed and matrix[i, i] > 0], dtype=torch.long
        )
        if len(free):
            slopes = (self.slopes + matrix @ c)[free]
            scale = matrix.diagonal()[free].rsqrt()
            scaled = matrix[free][:, free] * scale.unsqueeze(-1) * scale
            c[free] = -scale * _pseudo_solve(scaled, scale * slopes, 100 * self.precision)
        result: list[float] = c.tolist()
        return result

    def _damped(self, damping: float) -> Tensor:
        return self.curvature + damping * self.overlaps


def _pseudo_solve(matrix: Tensor, right: Tensor, smallest: float) -> Tensor:
    """A symmetric matrix's pseudo-inverse times a vector; eigenvalues below ``smallest`` are 0."""
    values, basis = torch.linalg.eigh(matrix)
    kept = values > smallest
    solution: Tensor = basis[:, kept] @ ((basis[:, kept].mT @ right) / values[kept])
    return solution


def fisher_products(gathering: Gathering, vectors: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """(k, k): vᵢᵀ F vⱼ with the exact F of all forward passes of a step; float64, on the CPU."""
    if not gathering.calls:
        raise RuntimeError(
            "the closure did not run the model in training mode: call model.train(), and the "
            "model itself rather than its parts"
        )
    examples = sum(count for _, count in gathering.calls)
    total = torch.zeros(len(vectors), len(vectors)).double()
    for call, count in gathering.calls:
        products = products_of_call(
            gathering.model, call, vectors, gathering.likelihood, gathering.output
        )
        share = gathering.likelihood.growth(count, examples) * count / examples
        total += share * products.cpu().double()
    return gathering.mean_over_ranks(0.5 * (total + total.mT), examples)


def inner_products(vectors: Sequence[Tensor]) -> Tensor:
    """(k, k), of k tensors of one shape; float64 where the device has such."""
    rows = torch.stack([vector.flatten() for vector in vectors])
    return (rows @ rows.mT).to(widest(rows.device))
