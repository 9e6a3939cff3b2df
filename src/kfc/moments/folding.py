"""Symmetric matrices kept in little more than half of their entries.

A symmetric matrix (n, n) is cut into 16 strips of s = ⌈n / 16⌉ rows, of which the last ones may be
shorter or empty. A strip is kept up to the last column of its block on the diagonal: strip i has
(i + 1) s columns. Strips i and 15 - i lie side by side, so that all of them form a rectangle of 8 s
rows and 17 s columns. Some columns of zeros follow, whose number tells n. Sums and averages of
folded matrices are those of the matrices, and products with them need not unfold them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kfc.moments.spectral import mirrored

Shape = tuple[int, ...]

# Narrower statistics are kept as whole matrices.
NARROWEST = 512
STRIPS = 16


class Strip(NamedTuple):
    """Rows ``start`` to ``stop`` of a symmetric matrix and its first ``stop`` columns."""

    start: int
    stop: int
    entries: Tensor


def folded_shape(size: int) -> tuple[int, int]:
    """Return the shape of the rectangle that a symmetric n x n matrix is folded into."""
    height = -(-size // STRIPS)
    return STRIPS // 2 * height, (2 * STRIPS + 1) * height - size


def unfolded_shape(shape: Shape) -> Shape:
    """Return the shape of statistics that are kept in a shape."""
    if len(shape) < 3 or is_symmetric(shape):
        return shape
    size = (2 * STRIPS + 1) * _height(shape) - shape[-1]
    return (*shape[:-2], size, size)


def _height(folded: Shape) -> int:
    return folded[-2] // (STRIPS // 2)


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


def width(statistics: Tensor) -> int:
    """Return n of symmetric matrices (groups, n, n), which may be folded, or of a diagonal."""
    return unfolded_shape(tuple(statistics.shape))[-1]


def strips(folded: Tensor) -> Iterator[Strip]:
    """Yield the strips of folded matrices (..., 8 s, 17 s), as views."""
    shape = tuple(folded.shape)
    height, size = _height(shape), unfolded_shape(shape)[-1]
    for start in range(0, size, height):
        stop, index = min(size, start + height), start // height
        # The wider strip of a pair comes first.
        pair = min(index, STRIPS - 1 - index)
        first = (STRIPS - pair) * height if index == pair else 0
        rows = slice(pair * height, pair * height + stop - start)
        yield Strip(start, stop, folded[..., rows, first : first + stop])


def fold(matrices: Tensor) -> Tensor:
    """Return symmetric matrices (..., n, n) folded."""
    folded = matrices.new_zeros(*matrices.shape[:-2], *folded_shape(matrices.shape[-1]))
    for start, stop, entries in strips(folded):
        entries.copy_(matrices[..., start:stop, :stop])
    return folded


def folded_gram(rows: Tensor) -> Tensor:
    """Return rowsᵀ rows, folded and in float32 at least, of rows (groups, R, n).

    Products have the dtype of the rows.
    """
    shape = len(rows), *folded_shape(rows.shape[-1])
    dtype = torch.promote_types(rows.dtype, torch.float32)
    fresh = rows.new_zeros if rows.shape[-1] % STRIPS else rows.new_empty
    folded = fresh(shape, dtype=dtype)
    for start, stop, entries in strips(folded):
        left, right = rows[..., start:stop].mT, rows[..., :stop]
        if rows.dtype == dtype:
            entries.baddbmm_(left, right, beta=0)
        else:
            entries.copy_(left @ right)
        entries[..., start:] = mirrored(entries[..., start:])
    return folded


def unfold(folded: Tensor) -> Tensor:
    """Return the symmetric matrices (..., n, n) that were folded."""
    matrices = folded.new_empty(unfolded_shape(tuple(folded.shape)))
    for start, stop, entries in strips(folded):
        matrices[..., start:stop, :stop] = entries
        matrices[..., :start, start:stop] = entries[..., :start].mT
    return matrices


def times(matrices: Tensor, right: Tensor) -> Tensor:
    """Return symmetric matrices (groups, n, n), which may be folded, times (groups, n, k).

    Matrices that are not folded may have another dtype, in which they are multiplied.
    """
    if not is_folded(matrices):
        return (matrices @ right.to(matrices.dtype)).to(right.dtype)
    result = torch.zeros_like(right)
    for start, stop, entries in strips(matrices):
        result[:, start:stop].baddbmm_(entries, right[:, :stop])
        if start:
            result[:, :start].baddbmm_(entries[..., :start].mT, right[:, start:stop])
    return result


def plus_diagonal(matrices: Tensor, values: Tensor) -> Tensor:
    """Return symmetric matrices, which may be folded, or a diagonal, plus a diagonal (..., n)."""
    if matrices.dim() == values.dim():
        return matrices + values
    result = matrices.clone()
    blocks = [(0, values.shape[-1], result)] if not is_folded(result) else strips(result)
    for start, stop, entries in blocks:
        entries[..., start:].diagonal(dim1=-2, dim2=-1).add_(values[..., start:stop])
    return result


def diagonal_of_folded(folded: Tensor) -> Tensor:
    """Return the diagonals of folded matrices, (..., n)."""
    blocks = [entries[..., start:] for start, _, entries in strips(folded)]
    return torch.cat([block.diagonal(dim1=-2, dim2=-1) for block in blocks], dim=-1)
