"""Symmetric matrices kept as half of their entries.

A symmetric matrix A (n, n) consists of the quarters A₁₁ (h, h), A₂₁ (n - h, h), its transpose, and
A₂₂, with h = n // 2. It is folded into a rectangle of n (n + 1) / 2 entries: A₂₁, and beside it a
block whose lower triangle is that of A₂₂ and whose upper triangle, one column further to the right,
is that of A₁₁. Sums and averages of folded matrices are those of the matrices.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

Shape = tuple[int, ...]

# Narrower statistics are kept as whole matrices, which need not be unfolded to be inverted.
NARROWEST = 512
PART = 256


def folded_shape(size: int) -> tuple[int, int]:
    """Return the shape of the rectangle that a symmetric n x n matrix is folded into."""
    half = size // 2
    return size - half, 2 * half + 1


def unfolded_shape(shape: Shape) -> Shape:
    """Return the shape of statistics that are kept in a shape."""
    if len(shape) < 3 or is_symmetric(shape):
        return shape
    size = shape[-2] + shape[-1] // 2
    return (*shape[:-2], size, size)


def is_symmetric(shape: Shape) -> bool:
    """Return whether statistics of this shape are symmetric matrices, (groups, n, n)."""
    return len(shape) == 3 and shape[-1] == shape[-2]


def is_folded(statistics: Tensor) -> bool:
    """Return whether statistics are folded matrices; all others are square or of two dimensions."""
    return statistics.dim() == 3 and not is_symmetric(tuple(statistics.shape))


def kept_shape(shape: Shape) -> Shape:
    """Return the shape in which statistics of a shape are kept: folded if they are wide."""
    if is_symmetric(shape) and shape[-1] >= NARROWEST:
        return (*shape[:-2], *folded_shape(shape[-1]))
    return shape


def to_keep(statistics: Tensor) -> Tensor:
    """Return statistics as they are kept: folded if they are wide."""
    shape = tuple(statistics.shape)
    return statistics if kept_shape(shape) == shape else fold(statistics)


def whole(statistics: Tensor) -> Tensor:
    """Return statistics that may be folded as symmetric matrices or a diagonal."""
    return unfold(statistics) if is_folded(statistics) else statistics


def fold(matrices: Tensor) -> Tensor:
    """Return symmetric matrices (..., n, n) folded; only their lower triangles are read."""
    size, half = matrices.shape[-1], matrices.shape[-1] // 2
    folded = matrices.new_empty(*matrices.shape[:-2], *folded_shape(size))
    block, first = folded[..., half:], matrices[..., :half, :half]
    folded[..., :half] = matrices[..., half:, :half]
    block[..., : size - half] = matrices[..., half:, half:]
    upper = block[..., :half, 1:]
    for here, after in _parts(half):
        corner = upper[..., here, here]
        corner.copy_(corner.tril(-1).add_(first[..., here, here].mT.triu()))
        upper[..., here, after] = first[..., after, here].mT
    return folded


def unfold(folded: Tensor) -> Tensor:
    """Return the symmetric matrices (..., n, n) that were folded."""
    size = folded.shape[-2] + folded.shape[-1] // 2
    half = size // 2
    block = folded[..., half:]
    matrices = folded.new_empty(*folded.shape[:-2], size, size)
    matrices[..., half:, :half] = folded[..., :half]
    matrices[..., half:, half:] = block[..., : size - half]
    matrices[..., :half, :half] = block[..., :half, 1:].mT
    for here, after in _parts(size):  # copy the lower triangle to the upper one
        lower = matrices[..., here, here].tril()
        matrices[..., here, here] = lower.add_(lower.tril(-1).mT)
        matrices[..., here, after] = matrices[..., after, here].mT
    return matrices


def _parts(size: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive parts of a dimension, each with all that follows it.

    Transposing in parts takes half the time of transposing a wide matrix at once.
    """
    for start in range(0, size, PART):
        yield slice(start, start + PART), slice(start + PART, size)


def diagonal_of_folded(folded: Tensor) -> Tensor:
    """Return the diagonals of folded matrices, (..., n)."""
    half = folded.shape[-1] // 2
    block = folded[..., half:]
    parts = [block[..., :half, 1:].diagonal(dim1=-2, dim2=-1), block.diagonal(dim1=-2, dim2=-1)]
    return torch.cat(parts, dim=-1)
