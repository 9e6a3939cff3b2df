"""Whether all ranks have the same, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kfc.distributed.workers import WorkerError, Workers

# Of a tensor's bits, as whole numbers, each is weighted by its place, up to this prime.
PLACES = 8191
# So many times that many at once.
PARTS = 256


def fingerprint(tensor: Tensor) -> Tensor:
    """A whole number, int64, that hardly ever is the same for tensors of other bits."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().flatten().view(whole[tensor.element_size()])
    places = torch.arange(1, PLACES + 1, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    # A part at a time: as int64 all of it would be large.
    for part in bits.split(PARTS * PLACES):
        rows, rest = part[: len(part) // PLACES * PLACES], part[len(part) // PLACES * PLACES :]
        # Sums of int64 wrap around, on every device alike and in any order.
        total = total + (rows.view(-1, PLACES).long().sum(0) * places).sum()
        total = total * PLACES + (rest.long() * places[: len(rest)]).sum()
    return total


def require_same(workers: Workers, tensors: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Raise, on all ranks alike, if a tensor is not the same everywhere.

    Args:
        tensors: by the name by which the error is to call them; the same names on all ranks.
        what: they are, and when.
        remedy: what to do about it.
    """
    if workers.size == 1 or not tensors:
        return
    home = next(iter(tensors.values())).device
    own = torch.stack([fingerprint(tensor).to(home) for tensor in tensors.values()])
    (first,) = workers.start_broadcast([own.clone()], 0, "checks").wait()
    differing = (own != first).nonzero().flatten().tolist()
    earliest = [float(differing[0] if differing else len(tensors))]
    by_rank = [int(place) for (place,) in workers.gather(earliest, "checks")]
    if min(by_rank) == len(tensors):
        return
    name = list(tensors)[min(by_rank)]
    ranks = [str(rank) for rank, place in enumerate(by_rank) if place == min(by_rank)]
    raise WorkerError(
        f"{what}: {name} on rank {', '.join(ranks)} is not what it is on rank 0. {remedy}"
    )
