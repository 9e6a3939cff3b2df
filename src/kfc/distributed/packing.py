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
        return (tensor[:, *self._triangle(tensor.device)] if self.symmetric else tensor).flatten()

    def unpack(self, numbers: Tensor) -> Tensor:
        """Invert ``pack()``."""
        if not self.symmetric:
            # A copy, because a view would keep the whole message alive.
            return numbers.reshape(self.shape).clone()
        matrices, (rows, columns) = numbers.new_empty(self.shape), self._triangle(numbers.device)
        matrices[:, rows, columns] = matrices[:, columns, rows] = numbers.reshape(len(matrices), -1)
        return matrices

    def _triangle(self, device: torch.device) -> Tensor:
        """Return the rows and columns of the entries on and below the diagonal, (2, numbers)."""
        size = self.shape[-1]
        return torch.tril_indices(size, size, device=device)
