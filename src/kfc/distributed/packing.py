"""Symmetric matrices packed into half as many numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor


def packed_shape(size: int) -> tuple[int, int]:
    """Return the shape of the rectangle that a symmetric n x n matrix is folded into."""
    half = (size + 1) // 2
    return (half, size) if size % 2 else (half, size + 1)


def fold(matrices: Tensor) -> Tensor:
    """Return the lower triangles of (..., n, n) as (..., *packed_shape(n)).

    Row i of the rectangle is the i-th row of the triangle from below, followed by the reversed i-th
    row from above (the one before it if n is odd). All such pairs have the same length.
    """
    size = matrices.shape[-1]
    half, _ = packed_shape(size)
    from_below = matrices[..., size - half :, :].flip(-2)
    from_above = matrices[..., :half, :].flip(-1)
    if size % 2:
        from_above = from_above.roll(1, dims=-2)
    else:
        from_below = torch.nn.functional.pad(from_below, (0, 1))
        from_above = torch.nn.functional.pad(from_above, (1, 0))
    return torch.where(_is_from_below(size, matrices.device), from_below, from_above)


def unfold(rectangles: Tensor, size: int) -> Tensor:
    """Return the symmetric matrices (..., n, n) that were folded."""
    half, _ = packed_shape(size)
    odd = size % 2
    from_below = _is_from_below(size, rectangles.device)
    lower = rectangles.new_zeros(*rectangles.shape[:-2], size, size)
    below = torch.where(from_below, rectangles, 0)[..., :size]
    lower[..., size - half :, :] = below.flip(-2)
    above = torch.where(from_below, 0, rectangles).flip(-1)[..., odd:, :size]
    # For odd n the middle row came from below already.
    lower[..., : half - odd, :] += above[..., : half - odd, :]
    return lower + lower.tril(-1).mT


def _is_from_below(size: int, device: torch.device) -> Tensor:
    half, width = packed_shape(size)
    rows = torch.arange(half, device=device).unsqueeze(-1)
    return torch.arange(width, device=device) < size - rows


def is_folded(shape: Sequence[int]) -> bool:
    """Return whether statistics of this shape are symmetric matrices, (groups, n, n)."""
    return len(shape) == 3 and shape[-1] == shape[-2]


def wire_numbers(shape: Sequence[int], *, symmetric: bool) -> int:
    """Return how many numbers are sent for a tensor of this shape."""
    if symmetric:
        groups, size, _ = shape
        return groups * size * (size + 1) // 2
    return torch.Size(shape).numel()


def to_wire(tensor: Tensor, *, symmetric: bool) -> Tensor:
    """Return a tensor as the vector that is sent."""
    return (fold(tensor) if symmetric else tensor).flatten()


def from_wire(numbers: Tensor, shape: Sequence[int], *, symmetric: bool) -> Tensor:
    """Return the tensor that a vector was sent for."""
    if not symmetric:
        # A copy, because a view would keep the whole message alive.
        return numbers.reshape(tuple(shape)).clone()
    groups, size, _ = shape
    return unfold(numbers.reshape(groups, *packed_shape(size)), size)
