"""Normalisation layers: a small Fisher block per channel, over its scale and shift."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from kfc.kronecker import reciprocal_or_zero
from kfc.layers.base import (
    Handler,
    Inverse,
    KeptInputs,
    Moment,
    Statistics,
    is_sequence_first,
)
from kfc.layers.synchronised import batch_moments, synchronising_group


class NormalisationHandler(Handler):
    """output = scale · x_hat + shift, per channel; a block is the Fisher matrix of (scale, shift).

    x_hat is computed anew from the input, not divided out of the output: the scale may be zero.
    Blocks are (channels, 2, 2), or (channels, 1, 1) where only one of the two is trained.
    """

    roles: ClassVar[tuple[str, ...]] = ("weight", "bias")

    @property
    def treatment(self) -> str:
        return "channel blocks"

    @abstractmethod
    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        """What makes x_hat of a call's inputs, shaped like them; as the module did, also later on.

        The result takes the inputs anew and should not hold them.
        """

    @abstractmethod
    def channel_rows(self, values: Tensor, examples: int) -> Tensor:
        """Values shaped like the inputs as (rows, locations, channels); a row is of one example."""

    def statistics(self, inverse: Inverse | None = None) -> Statistics:
        return _NormalisationStatistics(self)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        size = len(self.trained())
        return ((self.weight.numel(), size, size),)

    def summary(self, running: tuple[Tensor, ...]) -> dict[str, Any]:
        return {"block_trace": running[0].diagonal(dim1=-2, dim2=-1).sum().item()}

    def invert(self, running: tuple[Tensor, ...], damping: float, kind: str) -> Inverse:
        return BlockInverse({"inverse": invert_blocks(running[0], damping)})

    def inverse_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {"inverse": self.shapes()[0]}

    def inverse_triangles(self, kind: str) -> tuple[str, ...]:
        return ("inverse",)

    def restore_inverse(self, tensors: Mapping[str, Tensor], kind: str) -> Inverse:
        return BlockInverse(tensors)

    def natural_gradient(
        self, inverse: Inverse, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        stacked = torch.stack([g.flatten() for g in gradients.values()], dim=-1)
        solution = inverse.apply(stacked).unbind(-1)
        return {
            role: part.reshape(gradient.shape)
            for (role, gradient), part in zip(gradients.items(), solution, strict=True)
        }


class _Kept(NamedTuple):
    """A call's inputs, and how they were normalised then."""

    inputs: KeptInputs
    normalise: Callable[[Tensor], Tensor]

    def normalised(self, dtype: torch.dtype) -> Tensor:
        return self.normalise(self.inputs.get(dtype))


class _NormalisationStatistics(Statistics):
    """Mean over examples of the outer product of (Σ_t Ds x_hat, Σ_t Ds), per channel."""

    def __init__(self, handler: NormalisationHandler) -> None:
        self.handler = handler
        self.trained = handler.trained()
        self.example_gradients: Tensor | None = None
        self.total: Tensor | None = None

    def forward(self, inputs: Tensor, outputs: Tensor) -> _Kept:
        # The inputs, and not what they become.
        return _Kept(KeptInputs.of(inputs), self.handler.normaliser(inputs))

    def backward(self, kept: _Kept, derivatives: Tensor, examples: int) -> None:
        derivatives = derivatives.detach().to(self.handler.dtype)
        by_role = {"bias": derivatives}
        if "weight" in self.trained:
            by_role["weight"] = derivatives * kept.normalised(self.handler.dtype)
        per_row = torch.stack(
            [self.handler.channel_rows(by_role[r], examples).sum(1) for r in self.trained], dim=-1
        )
        if per_row.shape[0] % examples:
            # Rows that are not of one example each: independent targets make them uncorrelated.
            self._add_outer_products(per_row)
            return
        # Frames folded into the batch, and further calls, are locations of their example.
        per_example = per_row.reshape(examples, -1, *per_row.shape[1:]).sum(1)
        if self.example_gradients is not None:
            per_example = per_example + self.example_gradients
        self.example_gradients = per_example

    def end_draw(self) -> None:
        if self.example_gradients is not None:
            self._add_outer_products(self.example_gradients)
            self.example_gradients = None

    def _add_outer_products(self, gradients: Tensor) -> None:
        by_channel = gradients.transpose(0, 1)  # (channels, rows, roles)
        product = by_channel.mT @ by_channel
        self.total = product if self.total is None else self.total.add_(product)

    def moments(self, examples: int) -> tuple[Moment, ...]:
        return () if self.total is None else (Moment(self.total, examples, of_derivatives=True),)


class BlockInverse:
    """The inverses of small blocks, (channels, size, size)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def apply(self, gradient: Tensor) -> Tensor:
        """(channels, size) -> (channels, size)"""
        return (self.tensors["inverse"] * gradient.unsqueeze(-2)).sum(-1)


def invert_blocks(blocks: Tensor, damping: float) -> Tensor:
    """(blocks + δ I)⁻¹ for positive semi-definite blocks of size 1 or 2, in closed form.

    With the block [[a, b], [b, c]], the Schur complement of a + δ is a sum of non-negative parts,
    δ + δ c / (a + δ) + (c - b²/a) a / (a + δ): so that the result is accurate even where the
    determinant cancels in float32.
    """
    first = reciprocal_or_zero(blocks[:, 0, 0] + damping)
    if blocks.shape[-1] == 1:
        return first.reshape(blocks.shape)
    a, b, c = blocks[:, 0, 0], blocks[:, 0, 1], blocks[:, 1, 1]
    independent = c - b * b * reciprocal_or_zero(a)
    rounding = 4 * torch.finfo(blocks.dtype).eps * c
    independent = torch.where(independent > rounding, independent, 0)
    # With neither damping nor a (so no b), the complement is c itself.
    share = torch.where(a > 0, a * first, 1)
    second = reciprocal_or_zero(damping + damping * c * first + independent * share)
    coupling = b * first
    rows = (first + coupling * coupling * second, -coupling * second, -coupling * second, second)
    return torch.stack(rows, dim=-1).reshape(blocks.shape)


class _ChannelSecond(NormalisationHandler):
    """Layers whose channels are dimension 1: (M, C, *map)."""

    def channel_rows(self, values: Tensor, examples: int) -> Tensor:
        return values.flatten(2).transpose(1, 2) if values.dim() > 2 else values.unsqueeze(1)


class BatchNormHandler(_ChannelSecond):
    """``nn.BatchNorm*d`` and ``nn.SyncBatchNorm``, with batch or running statistics.

    A SyncBatchNorm's batch is that of all ranks, which find its statistics together in ``forward``.
    """

    module: _BatchNorm

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        norm = self.module
        mean, variance = self._statistics(inputs)
        alone, eps = mean is None, norm.eps
        return lambda inputs: F.batch_norm(inputs, mean, variance, training=alone, eps=eps)

    def _statistics(self, inputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """By which the module normalises; ``None`` if they are those of its inputs alone."""
        group = synchronising_group(self.module)
        if group is not None:
            return batch_moments(inputs.to(self.dtype), group)
        if self.module.training or self.module.running_mean is None:
            return None, None
        return _running_statistics(self.module, self.dtype)


def _running_statistics(
    norm: _BatchNorm | _InstanceNorm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copies: the module's own may move on before they are needed."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean.to(dtype, copy=True), norm.running_var.to(dtype, copy=True)


class InstanceNormHandler(_ChannelSecond):
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
        unbatched = self.module._get_no_batch_dim()
        return values.unsqueeze(0) if values.dim() == unbatched else values


class GroupNormHandler(_ChannelSecond):
    """``nn.GroupNorm``"""

    module: nn.GroupNorm

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        norm = self.module
        return lambda inputs: F.group_norm(inputs, norm.num_groups, eps=norm.eps)


class LayerNormHandler(NormalisationHandler):
    """``nn.LayerNorm``: every element of ``normalized_shape`` is a channel."""

    module: nn.LayerNorm

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        norm = self.module
        return lambda inputs: F.layer_norm(inputs, norm.normalized_shape, eps=norm.eps)

    def channel_rows(self, values: Tensor, examples: int) -> Tensor:
        channels = self.weight.numel()
        leading = values.shape[: values.dim() - self.weight.dim()]
        if is_sequence_first(leading, examples):
            values = values.transpose(0, 1)
        rows = leading.numel() if len(leading) < 2 else values.shape[0]
        return values.reshape(rows, -1, channels)


class RMSNormHandler(LayerNormHandler):
    """``nn.RMSNorm``: a scale and no shift."""

    module: nn.RMSNorm  # type: ignore[assignment]
    roles: ClassVar[tuple[str, ...]] = ("weight",)

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        norm = self.module
        return lambda inputs: F.rms_norm(inputs, list(norm.normalized_shape), eps=norm.eps)


def mixes_examples(model: nn.Module) -> bool:
    """Whether an example's output depends on the others, as with batch statistics."""
    return any(
        isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )
