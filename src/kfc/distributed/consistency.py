"""Checks that all ranks have the same tensors, bit for bit."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kfc.curvature.layer import LayerCurvature
from kfc.distributed.ranks import CollectiveError, Ranks

# A tensor's bits are read as integers, each weighted by its place modulo this prime.
PLACES = 8191
# The number of such rows that are processed at a time.
PARTS = 256


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash, int64, that hardly ever is equal for tensors with different bits."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().flatten().view(whole[tensor.element_size()])
    places = torch.arange(1, PLACES + 1, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    # In parts, because int64 takes up to eight times the memory.
    for part in bits.split(PARTS * PLACES):
        rows, rest = part[: len(part) // PLACES * PLACES], part[len(part) // PLACES * PLACES :]
        # Sums of int64 wrap around in the same way on every device and in any order.
        total = total + (rows.view(-1, PLACES).long().sum(0) * places).sum()
        total = total * PLACES + (rest.long() * places[: len(rest)]).sum()
    return total


def require_same(ranks: Ranks, tensors: Mapping[str, Tensor], step: int, remedy: str) -> None:
    """Raise an error on all ranks if a tensor differs between them.

    Args:
        tensors: by the names that the error uses, which are the same on all ranks.
        remedy: what to do about a difference.
    """
    if not tensors:
        return
    home = next(iter(tensors.values())).device
    own = torch.stack([fingerprint(tensor).to(home) for tensor in tensors.values()])
    (first,) = ranks.start_broadcast([own.clone()], 0, "checks").wait()
    differing = (own != first).nonzero().flatten().tolist()
    earliest = [float(differing[0] if differing else len(tensors))]
    by_rank = [int(place) for (place,) in ranks.gather(earliest, "checks")]
    if min(by_rank) == len(tensors):
        return
    name = list(tensors)[min(by_rank)]
    differing = [str(rank) for rank, place in enumerate(by_rank) if place == min(by_rank)]
    raise CollectiveError(
        f"step {step}: {name} on rank {', '.join(differing)} differs from rank 0's. {remedy}"
    )


# Stands for a gradient that a rank does not have, which is a difference too.
NO_GRADIENT = torch.ones(1)


def require_equal_ranks(
    ranks: Ranks,
    model: nn.Module,
    gradients: Mapping[str, Tensor],
    layers: Mapping[str, LayerCurvature],
    with_inverse: Mapping[str, LayerCurvature],
    step: int,
) -> None:
    """Raise an error that names the first parameter, gradient or statistic that differs.

    Args:
        with_inverse: the layers whose inverse every rank has.
    """
    named = dict(model.named_parameters())
    curvature = {}
    for name, layer in layers.items():
        for index, tensor in enumerate(layer.state.running or ()):
            curvature[f"statistic {index} of layer {name!r}"] = tensor
    for name, layer in with_inverse.items():
        inverse = layer.state.inverse
        for key, tensor in ({} if inverse is None else inverse.tensors).items():
            curvature[f"the inverse ({key}) of layer {name!r}"] = tensor
    for tensors, remedy in (
        (
            {f"parameter {name!r}": parameter for name, parameter in named.items()},
            "Ranks that differ train different models: give all ranks the same seed, or wrap the "
            "model in DistributedDataParallel before the optimizer is made",
        ),
        (
            {f"the gradient of {name!r}": gradients.get(name, NO_GRADIENT) for name in named},
            "Wrap the model in DistributedDataParallel and run the wrapper, or average gradients "
            "over the ranks before step()",
        ),
        (
            curvature,
            "The ranks compute different results from the same inputs: do they have the same "
            'hardware and number of threads? placement="shared" sends results instead',
        ),
    ):
        require_same(ranks, tensors, step, remedy)
