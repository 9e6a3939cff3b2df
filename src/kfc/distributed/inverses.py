"""Inverses computed by their owners and sent to the ranks that need them."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from kfc.curvature.layer import Inverse, LayerCurvature
from kfc.distributed.options import Parallel
from kfc.distributed.packing import from_wire, is_folded, to_wire, wire_numbers
from kfc.distributed.placement import LayerSize, Placement, place
from kfc.distributed.ranks import Ranks
from kfc.distributed.reducer import Reducer

ABOUT_INVERSES, ABOUT_GRADIENTS = "inverses", "natural gradients"


class RemoteInverse:
    """Stands for an inverse that another rank keeps for itself."""

    tensors: dict[str, Tensor]

    def __init__(self) -> None:
        self.tensors = {}

    def apply(self, gradient: Tensor) -> Tensor:
        """Return a tensor for the natural gradient, which the other rank sends."""
        return torch.empty_like(gradient)


class InverseReducer(Reducer):
    """Computes inverses according to their placement, and sends them to the ranks that need them.

    Attributes:
        placements: where the inverse of every layer is computed.
    """

    def __init__(self, ranks: Ranks, parallel: Parallel) -> None:
        super().__init__()
        self.rank, self.size = ranks.rank, ranks.size
        self.ranks = ranks
        self.parallel = parallel
        self.placements: Mapping[str, Placement] = {}

    def place(self, layers: Mapping[str, LayerCurvature], period: int) -> None:
        sizes = {name: layer_size(layer) for name, layer in layers.items()}
        self.placements = place(sizes, self.size, self.parallel.placement, period)

    def is_everywhere(self, name: str) -> bool:
        return not self.placements[name].kept

    def compute(self, names: Iterable[str], make: Callable[[str], Inverse]) -> dict[str, Inverse]:
        mine = (None, self.rank)
        return {name: make(name) for name in names if self.placements[name].owner in mine}

    def compute_held(
        self, names: Iterable[str], make: Callable[[str], Inverse]
    ) -> dict[str, Inverse]:
        kept = {name: p.owner for name, p in self.placements.items() if p.kept}
        return {
            n: make(n) if kept.get(n, self.rank) == self.rank else RemoteInverse() for n in names
        }

    def distribute(
        self,
        layers: Mapping[str, LayerCurvature],
        names: Iterable[str],
        own: Mapping[str, Inverse],
    ) -> dict[str, Inverse]:
        found: dict[str, Inverse] = {}
        sent: dict[int, list[str]] = {}
        for name in names:
            owner, kept = self.placements[name]
            if owner is not None and not kept:
                sent.setdefault(owner, []).append(name)
            else:
                found[name] = own.get(name) or RemoteInverse()
        messages = {
            owner: self.ranks.start_broadcast(
                [_to_wire(layers[name], own.get(name)) for name in theirs], owner, ABOUT_INVERSES
            )
            for owner, theirs in sent.items()
        }
        for owner, theirs in sent.items():
            for name, numbers in zip(theirs, messages[owner].wait(), strict=True):
                found[name] = _from_wire(layers[name], numbers)
        return found

    def complete_(self, natural: Mapping[str, Mapping[str, Tensor]]) -> None:
        theirs: dict[int, list[Tensor]] = {}
        for name, by_parameter in natural.items():
            owner, kept = self.placements[name]
            if kept and owner is not None:
                theirs.setdefault(owner, []).extend(by_parameter.values())
        messages = [
            (tensors, self.ranks.start_broadcast(tensors, owner, ABOUT_GRADIENTS))
            for owner, tensors in theirs.items()
        ]
        for tensors, message in messages:
            for tensor, arrived in zip(tensors, message.wait(), strict=True):
                tensor.copy_(arrived)


def _to_wire(curvature: LayerCurvature, inverse: Inverse | None) -> Tensor:
    """Return an inverse as a vector; without an inverse, an empty vector to receive one."""
    home, dtype = curvature.layer.weight.device, curvature.layer.dtype
    parts = []
    for key, shape in curvature.inverse_shapes().items():
        symmetric = _is_triangle(curvature, key, shape)
        if inverse is None:
            parts.append(torch.empty(wire_numbers(shape, symmetric=symmetric), device=home))
        else:
            parts.append(to_wire(inverse.tensors[key], symmetric=symmetric))
    return torch.cat([part.to(home, dtype) for part in parts])


def _from_wire(curvature: LayerCurvature, numbers: Tensor) -> Inverse:
    # The owner does this too: what it computed need not be symmetric to the last bit.
    tensors, start = {}, 0
    for key, shape in curvature.inverse_shapes().items():
        symmetric = _is_triangle(curvature, key, shape)
        end = start + wire_numbers(shape, symmetric=symmetric)
        tensors[key] = from_wire(numbers[start:end], shape, symmetric=symmetric)
        start = end
    return curvature.restore_inverse(tensors)


def _is_triangle(curvature: LayerCurvature, key: str, shape: tuple[int, ...]) -> bool:
    return key in curvature.inverse_triangles() and is_folded(shape)


def inverse_numbers(curvature: LayerCurvature) -> int:
    """Return how many numbers are sent for a layer's inverse."""
    return sum(
        wire_numbers(shape, symmetric=_is_triangle(curvature, name, shape))
        for name, shape in curvature.inverse_shapes().items()
    )


def layer_size(curvature: LayerCurvature) -> LayerSize:
    """Return the cost of a layer's inverse, for the parameters trained now."""
    # Eigenvalues may look like a square matrix, but cost nothing beside the bases.
    squares = [
        shape
        for name, shape in curvature.inverse_shapes().items()
        if is_folded(shape) and name != "eigenvalues"
    ]
    # In units of n³: an eigendecomposition with its vectors, or a Cholesky decomposition.
    per_cube = 9.0 if curvature.redamps_cheaply else 1 / 3
    cubes = sum(groups * size**3 for groups, size, _ in squares)
    bytes_each = curvature.layer.dtype.itemsize
    return LayerSize(
        # Never zero, so that cheap inverses are distributed evenly too.
        max(1.0, per_cube * cubes),
        bytes_each * inverse_numbers(curvature),
        bytes_each * sum(parameter.numel() for parameter in curvature.layer.trained().values()),
        can_be_kept=not curvature.measured_shapes(),
    )
