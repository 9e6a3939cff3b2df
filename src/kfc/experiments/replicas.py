"""One network on several ranks: gradients are averaged, and batch statistics are rank 0's."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from kfc.distributed.workers import Workers
from kfc.experiments.averages import Averages


def synchronised(model: nn.Module, workers: Workers, device: torch.device) -> nn.Module:
    """Batch normalisation over the whole batch, where torch can: on GPUs.

    On the CPU each rank normalises its own part of the batch.
    """
    if workers.size == 1 or device.type != "cuda":
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


class Replica:
    """This rank's copy of the network.

    Attributes:
        forward: the network itself, or the wrapper whose backward pass averages the gradients.
    """

    def __init__(self, model: nn.Module, workers: Workers, device: torch.device) -> None:
        self.forward: nn.Module = model
        self._model = model
        self._workers = workers
        self._finite = torch.tensor(True, device=device)
        self._bad_since = torch.tensor(math.inf, device=device)
        if workers.group is not None:
            self.forward = self._wrapped(workers.group, device)

    def _wrapped(self, group: dist.ProcessGroup, device: torch.device) -> nn.Module:
        devices = [device] if device.type == "cuda" else None
        wrapper = DistributedDataParallel(self._model, device_ids=devices, process_group=group)

        # Without types: torch refuses those that are text, as all are in this file.
        def average(_, bucket):  # type: ignore[no-untyped-def]
            """As without a hook; but of the mean nobody could say whose gradient is not finite."""
            self._finite &= bucket.buffer().sum().isfinite()
            return allreduce_hook(group, bucket)

        wrapper.register_comm_hook(None, average)
        return wrapper

    def after_update(self, number: int) -> None:
        """Take note of this rank's own gradients, without waiting for the device."""
        if self._workers.size > 1:
            first = self._bad_since.clamp(max=number)
            self._bad_since = torch.where(self._finite, math.inf, first)
            self._finite.fill_(True)

    def bad_since(self) -> float:
        """The first of the last updates whose gradients were not finite on this rank, or ∞."""
        return self._bad_since.item()

    def take_buffers_of_rank_0(self, averages: Averages) -> None:
        """So that all ranks evaluate the network that is saved."""
        if self._workers.size > 1:
            buffers = [*self._model.buffers(), *averages.of_buffers()]
            arrived = self._workers.start_broadcast(buffers, 0, "buffers").wait()
            for buffer, value in zip(buffers, arrived, strict=True):
                buffer.copy_(value)
