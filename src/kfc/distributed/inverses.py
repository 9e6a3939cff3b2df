"""What the inverse of a layer costs to compute and to send, and how it is sent."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from kfc.curvature.kronecker import Inverse
from kfc.curvature.layer import Columns, LayerCurvature
from kfc.distributed.packing import Packing
from kfc.distributed.placement import LayerSize
from kfc.moments.folding import is_symmetric


class RemoteInverse(Inverse):
    """A stand-in for an inverse that another rank keeps for itself."""

    def __init__(self) -> None:
        super().__init__({})

    def apply(self, gradient: Tensor) -> Tensor:
        """Return a tensor for the natural gradient, which the other rank sends."""
        return torch.empty_like(gradient)

    def whiten(self, matrix: Tensor) -> Tensor:
        """Return a tensor for the whitened matrix, which the other rank sends."""
        return torch.empty_like(matrix)

    def unwhiten(self, matrix: Tensor) -> Tensor:
        """Return a tensor for the unwhitened matrix, which the other rank sends."""
        return torch.empty_like(matrix)

    def redamped(self, damping: float) -> Self:
        return self


def pack_inverse(
    curvature: LayerCurvature, inverse: Inverse | None, widths: tuple[int, ...]
) -> Tensor:
    """Return an inverse as a vector; without an inverse, an empty vector to receive one.

    Args:
        widths: what ``Inverse.widths_of()`` returns for it.
    """
    home, dtype = curvature.layer.weight.device, curvature.layer.dtype
    packings = _packings(curvature, widths)
    if inverse is None:
        return torch.empty(_numbers(packings), dtype=dtype, device=home)
    parts = [packing.pack(inverse.tensors[key]) for key, packing in packings.items()]
    return torch.cat([part.to(home, dtype) for part in parts])


def unpack_inverse(curvature: LayerCurvature, numbers: Tensor, widths: tuple[int, ...]) -> Inverse:
    """Invert ``pack_inverse``.

    The owner does this too, because what it computed need not be symmetric to the last bit.
    """
    packings = _packings(curvature, widths)
    parts = numbers.split([packing.numbers for packing in packings.values()])
    named = zip(packings.items(), parts, strict=True)
    return curvature.inverse_class({key: packing.unpack(part) for (key, packing), part in named})


def _packings(curvature: LayerCurvature, widths: tuple[int, ...] = ()) -> dict[str, Packing]:
    triangles = curvature.inverse_class.triangles
    return {
        key: Packing(shape, key in triangles and is_symmetric(shape))
        for key, shape in curvature.inverse_shapes(widths).items()
    }


def _numbers(packings: Mapping[str, Packing]) -> int:
    return sum(packing.numbers for packing in packings.values())


def layer_size(curvature: LayerCurvature, columns: Columns | None = None) -> LayerSize:
    """Return the cost of a layer's inverse, for the parameters trained now.

    Args:
        columns: the limits of an inverse that is not known yet; by default those in force.
    """
    widths = curvature.inverse_widths(columns)
    # Eigenvalues may look like a square matrix, but cost nothing beside the bases.
    shapes = {
        name: shape
        for name, shape in curvature.inverse_shapes(widths).items()
        if len(shape) == 3 and name != "eigenvalues"
    }
    # In units of n³: an eigendecomposition with its vectors, or a Cholesky decomposition.
    per_cube = 9.0 if curvature.inverse_class.redamps_cheaply else 1 / 3
    operations = sum(
        groups * size**2 * (per_cube * size if width == size else 2.0 * width)
        for groups, size, width in shapes.values()
    )
    bytes_each = curvature.layer.dtype.itemsize
    return LayerSize(
        # Never zero, so that cheap inverses are distributed evenly too.
        max(1.0, operations),
        bytes_each * _numbers(_packings(curvature, widths)),
        bytes_each * sum(parameter.numel() for parameter in curvature.layer.trained().values()),
        can_be_kept=not curvature.measured_shapes(),
    )
