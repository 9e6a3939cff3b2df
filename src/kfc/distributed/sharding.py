"""Errors for parameters that are sharded over ranks."""

import sys
from collections.abc import Iterable

from torch import nn


def refuse_sharded(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ``ValueError`` if a parameter is a DTensor, as in FSDP2 and tensor parallelism."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # no DTensor exists
        return
    for name, parameter in parameters:
        if isinstance(parameter, module.DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor, sharded over ranks (fully_shard or tensor "
                "parallelism), but kfc needs whole layers on every rank; use "
                "torch.nn.parallel.DistributedDataParallel"
            )


def refuse_sharding_wrapper(model: nn.Module) -> None:
    """Raise ``ValueError`` if the model or a part of it is wrapped in FSDP."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "the model is wrapped in FullyShardedDataParallel, which shards its layers over "
                "ranks, but kfc needs whole layers on every rank; use "
                "torch.nn.parallel.DistributedDataParallel"
            )
