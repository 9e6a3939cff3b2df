"""Which rank computes which layer's inverse, and what it sends."""

import heapq
from collections.abc import Mapping
from typing import NamedTuple

from kfc.distributed.options import PlacementKind

# A sent byte is worth this many operations: 10 Gbit/s against 40 GFLOP/s. It only decides which
# inverses "auto" considers too small to be worth sending.
OPERATIONS_PER_BYTE = 32


class Placement(NamedTuple):
    """Where one layer's inverse is computed.

    Attributes:
        owner: the rank that computes it; ``None``: every rank does.
        kept: whether the owner keeps it and sends natural gradients instead.
    """

    owner: int | None
    kept: bool = False


EVERYWHERE = Placement(None)


class LayerSize(NamedTuple):
    """The cost of one layer's inverse.

    Attributes:
        operations: the floating-point operations to compute it.
        inverse_bytes, gradient_bytes: the bytes to send it, or the layer's natural gradient.
        can_be_kept: whether statistics can be gathered without it.
    """

    operations: float
    inverse_bytes: int
    gradient_bytes: int
    can_be_kept: bool


def place(
    sizes: Mapping[str, LayerSize], ranks: int, kind: PlacementKind, period: int
) -> dict[str, Placement]:
    """Return a placement for every layer.

    Args:
        ranks: the number of ranks.
        kind: the ``placement`` of ``kfc.Parallel``.
        period: the number of steps that an inverse is used for.
    """
    if ranks == 1 or kind == "replicated":
        return dict.fromkeys(sizes, EVERYWHERE)
    kinds = {
        name: _cheapest(size, ranks, period) if kind == "auto" else kind
        for name, size in sizes.items()
    }
    shared_out = {name: sizes[name].operations for name in sizes if kinds[name] != "replicated"}
    owners = assign(shared_out, ranks)
    return {
        name: Placement(
            owners.get(name), kept=kinds[name] == "gradients" and sizes[name].can_be_kept
        )
        for name in sizes
    }


def _cheapest(size: LayerSize, ranks: int, period: int) -> PlacementKind:
    """Return the placement with the least traffic, or "replicated" if little work is saved.

    An owner saves the other ranks 1 - 1/ranks of the work.
    """
    sent: PlacementKind = "shared"
    traffic = size.inverse_bytes
    if size.can_be_kept and size.gradient_bytes * period < traffic:
        sent, traffic = "gradients", size.gradient_bytes * period
    spared = size.operations * (1 - 1 / ranks)
    return sent if spared > traffic * OPERATIONS_PER_BYTE else "replicated"


def assign(costs: Mapping[str, float], ranks: int) -> dict[str, int]:
    """Return a rank for every name: costliest first, each to the rank with the least work so far.

    The largest load is at most 4/3 of the best possible (Graham 1969).
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = {}
    # The sort is stable, so that all ranks come to the same answer.
    for name in sorted(costs, key=lambda name: -costs[name]):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + costs[name], rank))
    return owners
