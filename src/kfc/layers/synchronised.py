"""``nn.SyncBatchNorm`` in plain operations: batch statistics of all ranks of its process group.

torch's own kernel keeps its statistics to itself, and has no forward mode.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def synchronising_group(module: nn.Module) -> dist.ProcessGroup | None:
    """The ranks whose examples the module normalises together now; ``None``: each its own."""
    if not (isinstance(module, nn.SyncBatchNorm) and module.training):
        return None
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup | None = module.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def mixes_ranks(model: nn.Module) -> bool:
    """Whether an example's output depends on those of other ranks.

    All ranks then go forward and backward together: each pass is full of collectives.
    """
    return any(synchronising_group(module) is not None for module in model.modules())


def batch_moments(inputs: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(channels,) each: mean and variance (biased) over the inputs, (M, C, *map), of all ranks."""
    others = [0, *range(2, inputs.dim())]
    count = inputs.new_tensor([inputs.numel() // inputs.shape[1]])
    sums = _sum_over_ranks(torch.cat([inputs.sum(others), count]), group)
    mean, count = sums[:-1] / sums[-1], sums[-1]
    # From the deviations, in a second message: a mean of squares would cancel in float32.
    squares = (inputs - _per_channel(mean, inputs)).square().sum(others)
    return mean, _sum_over_ranks(squares, group) / count


def normalise_over_ranks(norm: nn.SyncBatchNorm, inputs: Tensor) -> Tensor:
    """The module's output, by operations that have a forward mode; no buffer changes."""
    group = synchronising_group(norm)
    assert group is not None
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    mean, variance = batch_moments(wide, group)
    scale, shift = (variance + norm.eps).rsqrt(), norm.bias
    if norm.weight is not None:
        scale = scale * norm.weight
    outputs = (wide - _per_channel(mean, wide)) * _per_channel(scale, wide)
    if shift is not None:
        outputs = outputs + _per_channel(shift, wide)
    return outputs.to(inputs.dtype)


def _per_channel(values: Tensor, inputs: Tensor) -> Tensor:
    return values.reshape(-1, *(1 for _ in inputs.shape[2:]))


def _sum_over_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    """Every rank's total depends on every rank's values: changes, and derivatives, add up too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduced(values, group)

    @staticmethod
    def backward(ctx: Any, derivatives: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(derivatives, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, _: None) -> Tensor:
        return _all_reduced(change, ctx.group)


def _all_reduced(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
