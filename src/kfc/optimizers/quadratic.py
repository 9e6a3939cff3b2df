"""The quadratic model of the objective on a few directions (appendix A.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfc._helpers import widest


@dataclass(frozen=True)
class QuadraticModel:
    """M(c) = bᵀc + ½ cᵀ(A + λS)c, the predicted change of the objective by v = Σ cᵢ vᵢ.

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
        """Return whether λS outweighs A at these coefficients."""
        c = self.slopes.new_tensor(coefficients)
        return bool(damping * (c @ self.overlaps @ c) > c @ self.curvature @ c)

    def on(self, directions: Sequence[int]) -> QuadraticModel:
        """Return the model on some of the directions."""
        chosen = torch.tensor(directions)
        return QuadraticModel(
            self.slopes[chosen],
            self.curvature[chosen][:, chosen],
            self.overlaps[chosen][:, chosen],
            self.precision,
        )

    def change(self, coefficients: Sequence[float], damping: float = 0.0) -> float:
        """Return M(c), with λS if a damping λ is given."""
        return self._value(self._damped(damping), coefficients)

    def minimiser(
        self, damping: float, bounds: Sequence[tuple[float, float]] | None = None
    ) -> list[float]:
        """Return the c that minimises M in a box.

        Directions that vanish, have no curvature, or are linear combinations of others up to
        rounding do not make the problem singular: the solution is the shortest one, with each
        direction scaled to unit curvature.

        Args:
            bounds: the lowest and the highest value of each coefficient, which may be infinite or
                equal; ``None``: there are no bounds.
        """
        if bounds is None:
            bounds = [(-math.inf, math.inf)] * len(self.slopes)
        matrix, held = self._damped(damping), {}
        for index, (low, high) in enumerate(bounds):
            if low == high or matrix[index, index] <= 0:
                held[index] = min(max(0.0, low), high)
        return self._minimiser_in_box(matrix, bounds, held)

    def _minimiser_in_box(
        self, matrix: Tensor, bounds: Sequence[tuple[float, float]], held: Mapping[int, float]
    ) -> list[float]:
        """Return the minimum in the box with some coefficients held at a value.

        M is convex. If its minimum without bounds lies outside the box, one of the bounds that it
        violates is active at the minimum in the box: else a step towards it would lead further
        down inside the box.
        """
        found = self._minimiser_with(matrix, held)
        nearest = [min(max(c, low), high) for c, (low, high) in zip(found, bounds, strict=True)]
        violated = [i for i, c in enumerate(found) if c != nearest[i] and i not in held]
        if not violated:
            return found
        faces = [
            self._minimiser_in_box(matrix, bounds, {**held, index: nearest[index]})
            for index in violated
        ]
        return min(faces, key=lambda c: self._value(matrix, c))

    def _minimiser_with(self, matrix: Tensor, held: Mapping[int, float]) -> list[float]:
        """Return the minimum without bounds, with some coefficients held at a value."""
        c = torch.zeros_like(self.slopes)
        for index, value in held.items():
            c[index] = value
        free = torch.tensor([i for i in range(len(c)) if i not in held], dtype=torch.long)
        if len(free):
            slopes = (self.slopes + matrix @ c)[free]
            scale = matrix.diagonal()[free].rsqrt()
            scaled = matrix[free][:, free] * scale.unsqueeze(-1) * scale
            c[free] = -scale * _pseudo_solve(scaled, scale * slopes, 100 * self.precision)
        result: list[float] = c.tolist()
        return result

    def _value(self, matrix: Tensor, coefficients: Sequence[float]) -> float:
        c = self.slopes.new_tensor(coefficients)
        return (self.slopes @ c + 0.5 * c @ matrix @ c).item()

    def _damped(self, damping: float) -> Tensor:
        return self.curvature + damping * self.overlaps


def _pseudo_solve(matrix: Tensor, right: Tensor, smallest: float) -> Tensor:
    """Return a pseudo-inverse times a vector; eigenvalues below ``smallest`` count as 0."""
    values, basis = torch.linalg.eigh(matrix)
    kept = values > smallest
    solution: Tensor = basis[:, kept] @ ((basis[:, kept].mT @ right) / values[kept])
    return solution


def inner_products(vectors: Sequence[Tensor]) -> Tensor:
    """Return all inner products of k tensors of one shape, (k, k), in float64 if possible."""
    rows = torch.stack([vector.flatten() for vector in vectors])
    return (rows @ rows.mT).to(widest(rows.device))
