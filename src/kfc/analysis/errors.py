"""Frobenius norms of errors of blocks, from their products with random vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfc.analysis.blocks import in_widest
from kfc.analysis.exact import ExactBlock
from kfc.analysis.krylov import random_start

# Errors of blocks with at most this many rows are computed from dense forms.
DENSE_SIZE = 512
# The number of eigenvectors that are treated exactly where the rest is estimated from probes.
DEFLATED = 32


@dataclass(frozen=True)
class Probes:
    """Vectors whose images give Frobenius norms.

    With random signs z, orthonormal vectors Q and P = 1 - QQᵀ, a block has ‖E‖² = ‖EQ‖² + E‖EPz‖².
    Q are leading eigenvectors of the exact block, which reduces the variance; for small blocks they
    are a whole basis.

    Attributes:
        vectors: the vectors Pz, followed by Q, (count, groups, I, n).
        weights: a row for each random vector, with the weights of all vectors in its estimate of
            ‖E‖²; a single row of ones if there are only basis vectors.
    """

    vectors: Tensor
    weights: Tensor

    @classmethod
    def for_block(cls, exact: ExactBlock, count: int, seed: int) -> Probes:
        """Return ``count`` random vectors and at most as many eigenvectors, or a whole basis."""
        if exact.size <= DENSE_SIZE:
            basis = torch.eye(exact.size, dtype=exact.like.dtype, device=exact.like.device)
            return cls(exact.from_order_of_dense(basis), basis.new_ones(1, exact.size))
        vectors = random_start((count, *exact.shape), exact.like, seed).sign()
        weights = torch.eye(count, dtype=vectors.dtype, device=vectors.device)
        if not exact.is_decomposable():
            return cls(vectors, weights)
        _, top = exact.top_eigenvectors(min(DEFLATED, count))
        inside = vectors.flatten(1) @ top.flatten(1).mT @ top.flatten(1)
        vectors = torch.cat([vectors - inside.reshape(vectors.shape), top])
        return cls(vectors, torch.cat([weights, weights.new_ones(count, len(top))], dim=1))


class Errors:
    """The images of probes by a matrix, such as the error of an approximation, in every batch.

    Args:
        batches: the number of batches to make room for at once: images that are allocated one by
            one, between large temporary arrays, would keep the memory of those from being freed.
    """

    def __init__(self, batches: int = 1) -> None:
        self._room = batches
        self._kept: Tensor | None = None
        self._count = 0
        self._products: dict[tuple[int, int], Tensor] = {}

    def add(self, images: Tensor) -> None:
        """Add the images of one more batch, (count, groups, I, n)."""
        if self._kept is None:
            self._kept = images.new_empty(self._room, *images.shape)
        elif self._count == len(self._kept):
            self._kept = torch.cat([self._kept, torch.empty_like(self._kept)])
        last = self._count
        self._kept[last] = images
        self._count += 1
        for batch, other in enumerate(self._kept[: self._count]):
            self._products[batch, last] = in_widest(other * images).sum((1, 2, 3))

    def squares(self, batches: Sequence[int]) -> Tensor:
        """Return ‖E z‖² for every probe z and the expectation E, (count,).

        From several batches, this is the mean of products of two distinct batches, which is
        unbiased; from one, the square of its own image.
        """
        pairs = [(a, b) for a in batches for b in batches if a < b]
        pairs = pairs or [(batches[0], batches[0])]
        return torch.stack([self._products[pair] for pair in pairs]).mean(0)

    def relative_to(
        self, exact: Errors, weights: Tensor, batches: Sequence[int] | None = None
    ) -> tuple[float, float]:
        """Return ‖E‖ / ‖F‖, and its standard error due to the random probes (jackknife)."""
        chosen = range(self._count) if batches is None else batches
        weights = in_widest(weights)
        above, below = (weights @ each.squares(chosen) for each in (self, exact))
        if not below.sum() > 0:
            return math.nan, 0.0
        ratio = float((above.sum() / below.sum()).clamp(min=0).sqrt())
        if len(weights) == 1:
            return ratio, 0.0
        rest = (above.sum() - above) / (below.sum() - below)
        without = rest.clamp(min=0).sqrt()
        count = len(weights)
        variance = (without - without.mean()).square().sum() * (count - 1) / count
        return ratio, float(variance.sqrt())
