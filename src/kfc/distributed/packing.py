"""Tensors as the vectors that ranks send: half of a symmetric matrix suffices."""

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """How a tensor is sent.

    Attributes:
        shape: the shape of the tensor.
        symmetric: whether it consists of symmetric matrices, (groups, n, n).
    """

    shape: tuple[int, ...]
    symmetric: bool

    @property
    def numbers(self) -> int:
        """The number of entries that are sent."""
        if not self.symmetric:
            return torch.Size(self.shape).numel()
        groups, size, _ = self.shape
        return groups * size * (size + 1) // 2

    def pack(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the vector that is sent."""
        return (fold(tensor) if self.symmetric else tensor).flatten()

    def unpack(self, numbers: Tensor) -> Tensor:
        """Invert ``pack()``."""
        if not self.symmetric:
            # A copy, because a view would keep the whole message alive.
            return numbers.reshape(self.shape).clone()
        groups, size, _ = self.shape
        return unfold(numbers.reshape(groups, *folded_shape(size)), size)


def is_symmetric(shape: tuple[int, ...]) -> bool:
    """Return whether statistics of this shape are symmetric matrices, (groups, n, n)."""
    return len(shape) == 3 and shape[-1] == shape[-2]


def folded_shape(size: int) -> tuple[int, int]:
    """Return the shape of the rectangle that a symmetric n x n matrix is folded into."""
    return size + (size + 1) % 2, (size + 1) // 2


def fold(matrices: Tensor) -> Tensor:
    """Return the lower triangles of (..., n, n) as (..., *folded_shape(n)).

    The left half of the triangle stays in place, one row further down if n is even. Its right half,
    a smaller triangle, is turned by 180 degrees into the gap above.
    """
    size = matrices.shape[-1]
    height, half = folded_shape(size)
    folded = matrices.new_zeros(*matrices.shape[:-2], height, half)
    folded[..., height - size :, :] = matrices[..., :half].tril()
    folded[..., : size - half, size % 2 :] += matrices[..., half:, half:].flip(-2, -1).triu()
    return folded


def unfold(rectangles: Tensor, size: int) -> Tensor:
    """Return the symmetric matrices (..., n, n) that were folded."""
    height, half = folded_shape(size)
    lower = rectangles.new_zeros(*rectangles.shape[:-2], size, size)
    lower[..., :half] = rectangles[..., height - size :, :].tril()
    lower[..., half:, half:] = rectangles[..., : size - half, size % 2 :].triu().flip(-2, -1)
    return lower + lower.tril(-1).mT
