"""Normalisation layers: how each computes x̂ and where its channels are."""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from kfc.distributed.synchronised import batch_moments, synchronising_group
from kfc.layers.base import NormalisationLayer, is_sequence_first


class _ChannelSecond(NormalisationLayer):
    """Layers whose channels are dimension 1: (M, C, *map)."""

    def channel_rows(self, values: Tensor, examples: int) -> Tensor:
        return channels_second_rows(values)


def channels_second_rows(values: Tensor) -> Tensor:
    """Return values (M, C, *map) as (M, locations, C)."""
    return values.flatten(2).transpose(1, 2) if values.dim() > 2 else values.unsqueeze(1)


class BatchNormLayer(_ChannelSecond):
    """``nn.BatchNorm*d`` and ``nn.SyncBatchNorm``, with batch or running statistics.

    The batch of a SyncBatchNorm is that of all ranks, which compute its statistics together.
    """

    module: _BatchNorm

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        norm, group = self.module, synchronising_group(self.module)
        mean: Tensor | None = None
        variance: Tensor | None = None
        if group is not None:
            mean, variance = batch_moments(inputs.to(self.dtype), group)
        elif not norm.training and norm.running_mean is not None:
            mean, variance = _running_statistics(norm, self.dtype)
        alone, eps = mean is None, norm.eps
        return lambda inputs: F.batch_norm(inputs, mean, variance, training=alone, eps=eps)


def _running_statistics(
    norm: _BatchNorm | _InstanceNorm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return copies of the running mean and variance, which the module may update in between."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean.to(dtype, copy=True), norm.running_var.to(dtype, copy=True)


# Dimensions of one example, with its channels.
UNBATCHED_DIMENSIONS = {nn.InstanceNorm1d: 2, nn.InstanceNorm2d: 3, nn.InstanceNorm3d: 4}


class InstanceNormLayer(_ChannelSecond):
    """``nn.InstanceNorm*d``; a single example may come without its batch dimension."""

    module: _InstanceNorm

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        norm = self.module
        uses_input = norm.training or not norm.track_running_stats
        mean, variance = (None, None) if uses_input else _running_statistics(norm, self.dtype)

        def normalised(inputs: Tensor) -> Tensor:
            batch = self._with_batch(inputs)
            x_hat = F.instance_norm(batch, mean, variance, use_input_stats=uses_input, eps=norm.eps)
            return x_hat.reshape(inputs.shape)

        return normalised

    def channel_rows(self, values: Tensor, examples: int) -> Tensor:
        return super().channel_rows(self._with_batch(values), examples)

    def _with_batch(self, values: Tensor) -> Tensor:
        is_unbatched = any(
            isinstance(self.module, kind) and values.dim() == dimensions
            for kind, dimensions in UNBATCHED_DIMENSIONS.items()
        )
        return values.unsqueeze(0) if is_unbatched else values


class GroupNormLayer(_ChannelSecond):
    """``nn.GroupNorm``"""

    module: nn.GroupNorm

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda inputs: F.group_norm(inputs, self.module.num_groups, eps=self.module.eps)


class LayerNormLayer(NormalisationLayer):
    """``nn.LayerNorm``: every element of ``normalized_shape`` is a channel."""

    module: nn.LayerNorm

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        norm = self.module
        return lambda inputs: F.layer_norm(inputs, norm.normalized_shape, eps=norm.eps)

    def channel_rows(self, values: Tensor, examples: int) -> Tensor:
        return channels_last_rows(values, examples, self.weight)


def channels_last_rows(values: Tensor, examples: int, weight: Tensor) -> Tensor:
    """Return values, whose last dimensions are those of the weight, as (rows, locations, C)."""
    leading = values.shape[: values.dim() - weight.dim()]
    if is_sequence_first(leading, examples):
        values = values.transpose(0, 1)
    rows = leading.numel() if len(leading) < 2 else values.shape[0]
    return values.reshape(rows, -1, weight.numel())


class RMSNormLayer(LayerNormLayer):
    """``nn.RMSNorm``: a scale and no shift."""

    module: nn.RMSNorm  # type: ignore[assignment]
    roles: ClassVar[tuple[str, ...]] = ("weight",)

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        norm = self.module
        return lambda inputs: F.rms_norm(inputs, list(norm.normalized_shape), eps=norm.eps)


def mixes_examples(model: nn.Module) -> bool:
    """Return whether an example's output depends on other examples, as with batch statistics."""
    return any(
        isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )
