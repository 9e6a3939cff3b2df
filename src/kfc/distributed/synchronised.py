"""``nn.SyncBatchNorm`` in plain operations, with the batch statistics of all its ranks.

torch's own kernel does not expose its statistics and has no forward-mode derivative.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def synchronising_group(module: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that the module normalises together; ``None`` if it does so on its own."""
    if not (isinstance(module, nn.SyncBatchNorm) and module.training):
        return None
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup | None = module.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def mixes_ranks(model: nn.Module) -> bool:
    """Return whether an example's output depends on examples of other ranks.

    Every forward and backward pass then contains collectives, which all ranks must reach.
    """
    return any(synchronising_group(module) is not None for module in model.modules())


def batch_moments(inputs: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return mean and (biased) variance, (channels,), over the inputs (M, C, *map) of all ranks."""
    others = [0, *range(2, inputs.dim())]
    count = inputs.new_tensor([inputs.numel() // inputs.shape[1]])
    sums = _sum_over_ranks(torch.cat([inputs.sum(others), count]), group)
    mean, count = sums[:-1] / sums[-1], sums[-1]
    # From the deviations, in a second message: a mean of squares would lose digits in float32.
    squares = (inputs - _per_channel(mean, inputs)).square().sum(others)
    return mean, _sum_over_ranks(squares, group) / count


def normalise_over_ranks(norm: nn.SyncBatchNorm, inputs: Tensor) -> Tensor:
    """Return the module's output, by operations with a forward mode; buffers do not change."""
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
    """Sum values over ranks; tangents and derivatives are summed likewise."""

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
