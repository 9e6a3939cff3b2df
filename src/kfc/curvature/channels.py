"""Normalisation layers: a small Fisher block per channel, over its scale and shift."""

from collections.abc import Callable

import torch
from torch import Tensor

from kfc.curvature.damping import Damping
from kfc.curvature.factor import reciprocal_or_zero
from kfc.curvature.kronecker import Inverse
from kfc.curvature.layer import LayerCurvature
from kfc.curvature.statistics import KeptInputs, LayerStatistics, Moment
from kfc.layers import NormalisationLayer
from kfc.moments.folding import Shape


class ChannelInverse(Inverse):
    """The inverses of small blocks, (channels, size, size)."""

    triangles = ("inverse",)

    def apply(self, gradient: Tensor) -> Tensor:
        """Return the inverses times a gradient (channels, size)."""
        return (self.tensors["inverse"] * gradient.unsqueeze(-2)).sum(-1)


class ChannelCurvature(LayerCurvature):
    """The Fisher matrix of (scale, shift) for every channel.

    Blocks are (channels, 2, 2), or (channels, 1, 1) if only one of the two is trained.
    """

    treatment = "channel blocks"
    inverse_class = ChannelInverse
    layer: NormalisationLayer

    def new_statistics(self, inverse: Inverse | None) -> LayerStatistics:
        return _ChannelStatistics(self.layer)

    def running_shapes(self) -> tuple[Shape, ...]:
        size = len(self.layer.trained())
        return ((self.layer.weight.numel(), size, size),)

    def invert(
        self, running: tuple[Tensor, ...], damping: Damping, previous: Inverse | None = None
    ) -> Inverse:
        return ChannelInverse({"inverse": invert_blocks(running[0], *damping)})

    def apply_inverse(self, inverse: Inverse, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        stacked = torch.stack([g.flatten() for g in gradients.values()], dim=-1)
        solution = inverse.apply(stacked).unbind(-1)
        return {
            role: part.reshape(gradient.shape)
            for (role, gradient), part in zip(gradients.items(), solution, strict=True)
        }


# The inputs of a call, and the function that normalises them.
_Kept = tuple[KeptInputs, Callable[[Tensor], Tensor]]


class _ChannelStatistics(LayerStatistics):
    """The mean over examples of the outer product of (Σ_t Ds x̂, Σ_t Ds), per channel."""

    def __init__(self, layer: NormalisationLayer) -> None:
        self.layer = layer
        self.trained = layer.trained()
        self.example_gradients: Tensor | None = None
        self.total: Tensor | None = None

    def forward(self, inputs: Tensor, outputs: Tensor) -> _Kept:
        return KeptInputs.of(inputs), self.layer.normaliser(inputs)

    def backward(self, kept: _Kept, derivatives: Tensor, examples: int) -> None:
        derivatives = derivatives.detach().to(self.layer.dtype)
        by_role = {"bias": derivatives}
        if "weight" in self.trained:
            inputs, normalise = kept
            by_role["weight"] = derivatives * normalise(inputs.get(self.layer.dtype))
        per_row = torch.stack(
            [self.layer.channel_rows(by_role[r], examples).sum(1) for r in self.trained], dim=-1
        )
        if per_row.shape[0] % examples:
            # Rows that mix examples: independent targets make them uncorrelated.
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


def invert_blocks(blocks: Tensor, damping: float, shift_damping: float | None = None) -> Tensor:
    """Return (blocks + δ I)⁻¹ for positive semi-definite blocks of size 1 or 2, in closed form.

    With the block [[a, b], [b, c]], the Schur complement of a + δ is a sum of non-negative parts,
    δ′ + δ c / (a + δ) + (c - b²/a) a / (a + δ): so that the result is accurate even where the
    determinant cancels in float32.

    Args:
        damping: δ, of the scale.
        shift_damping: δ′, of the shift in blocks of size 2; by default δ.
    """
    shift_damping = damping if shift_damping is None else shift_damping
    first = reciprocal_or_zero(blocks[:, 0, 0] + damping)
    if blocks.shape[-1] == 1:
        return first.reshape(blocks.shape)
    a, b, c = blocks[:, 0, 0], blocks[:, 0, 1], blocks[:, 1, 1]
    independent = c - b * b * reciprocal_or_zero(a)
    rounding = 4 * torch.finfo(blocks.dtype).eps * c
    independent = torch.where(independent > rounding, independent, 0)
    # With neither damping nor a (so no b), the complement is c itself.
    share = torch.where(a > 0, a * first, 1)
    second = reciprocal_or_zero(shift_damping + damping * c * first + independent * share)
    coupling = b * first
    rows = (first + coupling * coupling * second, -coupling * second, -coupling * second, second)
    return torch.stack(rows, dim=-1).reshape(blocks.shape)
