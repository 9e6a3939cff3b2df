"""Symmetric matrices kept as half of their entries.

A symmetric matrix A (n, n) consists of the quarters A₁₁ (h, h), A₂₁ (n - h, h), its transpose, and
A₂₂, with h = n // 2. It is folded into a rectangle of n (n + 1) / 2 entries: A₂₁, and beside it a
block whose lower triangle is that of A₂₂ and whose upper triangle, one column further to the right,
is that of A₁₁. Sums and averages of folded matrices are those of the matrices.
"""

import torch
from torch import Tensor

Shape = tuple[int, ...]

# Narrower statistics are kept as whole matrices, which need not be unfolded to be inverted.
NARROWEST = 512


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
    block = folded[..., half:]
    folded[..., :half] = matrices[..., half:, :half]
    block[..., : size - half] = matrices[..., half:, half:]
    upper = block[..., :half, 1:]
    upper.copy_(upper.tril(-1).add_(matrices[..., :half, :half].mT.triu()))
    return folded


def unfold(folded: Tensor) -> Tensor:
    """Return the symmetric matrices (..., n, n) that were folded."""
    size = folded.shape[-2] + folded.shape[-1] // 2
    half = size // 2
    block, corner = folded[..., half:], folded[..., :half]
    matrices = folded.new_empty(*folded.shape[:-2], size, size)
    matrices[..., half:, :half] = corner
    matrices[..., :half, half:] = corner.mT
    upper, lower = matrices[..., :half, :half], matrices[..., half:, half:]
    upper.copy_(block[..., :half, 1:]).triu_()
    lower.copy_(block[..., : size - half]).tril_()
    upper.add_(upper.triu(1).mT)
    lower.add_(lower.tril(-1).mT)
    return matrices


def diagonal_of_folded(folded: Tensor) -> Tensor:
    """Return the diagonals of folded matrices, (..., n)."""
    half = folded.shape[-1] // 2
    block = folded[..., half:]
    parts = [block[..., :half, 1:].diagonal(dim1=-2, dim2=-1), block.diagonal(dim1=-2, dim2=-1)]
    return torch.cat(parts, dim=-1)
