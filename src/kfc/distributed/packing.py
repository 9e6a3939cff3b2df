"""Tensors as the vectors that ranks send: half of a symmetric matrix suffices."""

from typing import NamedTuple

import torch
from torch import Tensor

from kfc.curvature.folding import fold, folded_shape, unfold


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
        return unfold(numbers.reshape(groups, *folded_shape(size)))
