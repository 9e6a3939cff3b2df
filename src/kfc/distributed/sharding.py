"""Parameters of which every rank has a part only: refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn


def refuse_sharded(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise if a parameter is a DTensor, as FSDP2 and tensor parallelism make them."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:  # then there are none
        return
    for name, parameter in parameters:
        if isinstance(parameter, module.DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor, of which each rank has a part (fully_shard or "
                "tensor parallelism); kfc needs whole layers on every rank: use "
                "torch.nn.parallel.DistributedDataParallel"
            )


def refuse_sharding_wrapper(model: nn.Module) -> None:
    """Raise if the model, or a part of it, is wrapped in FSDP, which hides its parameters."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "the model is wrapped in FullyShardedDataParallel, of whose layers each rank has a "
                "part; kfc needs whole layers on every rank: use "
                "torch.nn.parallel.DistributedDataParallel"
            )
