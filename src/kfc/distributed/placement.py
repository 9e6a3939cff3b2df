"""Who inverts which layer's block, and what is sent of it."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from kfc.distributed.packing import is_folded, wire_numbers
from kfc.layers import Handler

PlacementKind = Literal["auto", "shared", "replicated", "gradients"]
PLACEMENTS = ("auto", "shared", "replicated", "gradients")

# What inverting one n x n factor takes, in n³ floating-point operations: a Cholesky factor, or an
# eigendecomposition with its vectors.
OPERATIONS = {"factored": 1 / 3, "eigen": 9.0}
# A sent byte is worth as many operations: 10 Gbit/s against 40 GFLOP/s. Of it depends only what
# "auto" takes to be too small to be worth sending.
OPERATIONS_PER_BYTE = 32


class Placement(NamedTuple):
    """Of one layer's inverse.

    Attributes:
        owner: the rank that computes it; ``None``: every rank does, for itself.
        kept: whether the owner keeps it for itself, and sends natural gradients instead.
    """

    owner: int | None
    kept: bool = False


EVERYWHERE = Placement(None)


class LayerSize(NamedTuple):
    """What a layer's inverse amounts to.

    Attributes:
        operations: to compute it.
        inverse_bytes, gradient_bytes: to send it, or the layer's natural gradient.
        can_be_kept: whether statistics can do without it.
    """

    operations: float
    inverse_bytes: int
    gradient_bytes: int
    can_be_kept: bool


def size_of(handler: Handler, kind: str) -> LayerSize:
    """For the parameters trained now."""
    shapes = handler.inverse_shapes(kind)
    # Eigenvalues may look like a square, and take nothing beside the bases.
    squares = [s for name, s in shapes.items() if is_folded(s) and name != "eigenvalues"]
    cubes = sum(groups * size**3 for groups, size, _ in squares)
    number = torch.finfo(handler.dtype).bits // 8
    gradient = sum(parameter.numel() for parameter in handler.trained().values())
    return LayerSize(
        # Never nothing: what hardly takes time is shared out evenly too.
        max(1.0, OPERATIONS[kind] * cubes),
        number * inverse_numbers(handler, kind),
        number * gradient,
        can_be_kept=not handler.measured_shapes(),
    )


def inverse_numbers(handler: Handler, kind: str) -> int:
    """How many numbers are sent of a layer's inverse."""
    triangles = handler.inverse_triangles(kind)
    return sum(
        wire_numbers(shape, symmetric=name in triangles and is_folded(shape))
        for name, shape in handler.inverse_shapes(kind).items()
    )


def place(
    sizes: Mapping[str, LayerSize], workers: int, kind: PlacementKind, period: int
) -> dict[str, Placement]:
    """A placement for every layer.

    Args:
        workers: how many ranks there are.
        kind: "replicated": every rank computes all; "shared": owners compute and send inverses;
            "gradients": owners compute, keep, and send natural gradients; "auto": for each layer
            whichever costs least.
        period: how many steps an inverse serves.
    """
    if workers == 1 or kind == "replicated":
        return dict.fromkeys(sizes, EVERYWHERE)
    kinds = {
        name: _cheapest(size, workers, period) if kind == "auto" else kind
        for name, size in sizes.items()
    }
    shared_out = {name: sizes[name].operations for name in sizes if kinds[name] != "replicated"}
    owners = assign(shared_out, workers)
    return {
        name: Placement(
            owners.get(name), kept=kinds[name] == "gradients" and sizes[name].can_be_kept
        )
        for name in sizes
    }


def _cheapest(size: LayerSize, workers: int, period: int) -> PlacementKind:
    """Less traffic between inverses and gradients; no traffic at all if there is little to share.

    An owner spares the other ranks their work: 1 - 1/workers of all there is to do.
    """
    sent: PlacementKind = "shared"
    traffic = size.inverse_bytes
    if size.can_be_kept and size.gradient_bytes * period < traffic:
        sent, traffic = "gradients", size.gradient_bytes * period
    spared = size.operations * (1 - 1 / workers)
    return sent if spared > traffic * OPERATIONS_PER_BYTE else "replicated"


def assign(costs: Mapping[str, float], workers: int) -> dict[str, int]:
    """A rank for every name: longest first, each to whoever has least to do so far.

    The largest sum of costs is at most 4/3 of what it would be at best (Graham 1969).
    """
    loads = [(0.0, rank) for rank in range(workers)]
    owners = {}
    # Of equal ones the first: all ranks must come to the same answer.
    for name in sorted(costs, key=lambda name: -costs[name]):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + costs[name], rank))
    return owners
