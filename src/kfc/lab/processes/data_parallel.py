"""Data-parallel training: averaged gradients, and batch statistics of rank 0."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from kfc.distributed.ranks import Ranks
from kfc.lab.averages import Averages


def synchronised(model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """Return the model with batch normalisation over the whole batch, if the device is a GPU.

    On the CPU, where torch does not support this, each rank normalises its part of the batch.
    """
    if ranks.size == 1 or device.type != "cuda":
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


class Replica:
    """The copy of the network on this rank.

    Attributes:
        forward: the network, or the wrapper whose backward pass averages its gradients.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, device: torch.device) -> None:
        self._model = model
        self._ranks = ranks
        self._finite = torch.tensor(True, device=device)
        self._bad_since = torch.tensor(math.inf, device=device)
        self.forward = model if ranks.group is None else self._wrap(ranks.group, device)

    def _wrap(self, group: dist.ProcessGroup, device: torch.device) -> nn.Module:
        devices = [device] if device.type == "cuda" else None
        wrapper = DistributedDataParallel(self._model, device_ids=devices, process_group=group)

        # Without annotations: torch rejects the strings that they are in this file.
        def average(_, bucket):  # type: ignore[no-untyped-def]
            """Average as DistributedDataParallel does, but first check this rank's gradients."""
            self._finite &= bucket.buffer().sum().isfinite()
            return allreduce_hook(group, bucket)

        wrapper.register_comm_hook(None, average)
        return wrapper

    def after_update(self, number: int) -> None:
        """Record whether this rank's gradients were finite, without waiting for the device."""
        if self._ranks.size > 1:
            first = self._bad_since.clamp(max=number)
            self._bad_since = torch.where(self._finite, math.inf, first)
            self._finite.fill_(True)

    def bad_since(self) -> float:
        """Return the first of the latest updates with non-finite gradients on this rank, or ∞."""
        return self._bad_since.item()

    def take_buffers_of_rank_0(self, averages: Averages) -> None:
        """Copy rank 0's buffers, so that all ranks evaluate the network that is saved."""
        buffers = [*self._model.buffers(), *averages.of_buffers()]
        arrived = self._ranks.start_broadcast(buffers, 0, "buffers").wait()
        for buffer, value in zip(buffers, arrived, strict=True):
            buffer.copy_(value)
