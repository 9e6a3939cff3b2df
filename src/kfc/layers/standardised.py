"""Convolutions that standardise the rows of their weight, as in networks without normalisation."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from kfc.layers.base import MatrixLayer
from kfc.layers.convolution import ConvolutionLayer, SameConvolutionLayer
from kfc.moments.folding import whole
from kfc.moments.patches import patch_chunks


class StandardisedConvolutionLayer(ConvolutionLayer):
    """A convolution with the weight κ g_i (w_i - mean w_i) / s_i, as ``ScaledStdConv2d`` of timm.

    Here w_i is row i of the parameter, s_i² its variance plus ε, and g_i a gain. The layer
    describes the gradient in w. With x̂_i = (w_i - mean w_i) / s_i, the Jacobian of row i is
    c_i (I - 11ᵀ/n - x̂_i x̂_iᵀ/n), c_i = κ g_i / s_i. So patches without their means are the rows of
    Ω, and derivatives times c_i those of Γ. The projection x̂_i x̂_iᵀ/n, another one in every row,
    has no place in a Kronecker product; gradients of single examples contain it.

    The bias has no part in this, because its derivatives are not scaled by c_i.

    Args:
        gain: the name of the parameter g; ``None`` if there is none.
        scale: κ.
        epsilon: ε.
    """

    roles: ClassVar[tuple[str, ...]] = ("weight",)
    centred: ClassVar[bool] = True

    def __init__(
        self, module: _ConvNd, gain: str | None = None, scale: float = 1.0, epsilon: float = 0.0
    ) -> None:
        super().__init__(module)
        self._gain, self._scale, self._epsilon = gain, scale, epsilon

    # Ω

    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        assert not homogeneous
        if diagonal:
            parts = [rows.square().sum(1) for rows in self._chunks(source)]
            return torch.stack(parts).sum(0)
        moment = super().activation_moment(source, homogeneous=False, diagonal=False)
        return centred(whole(moment))

    block_moment = MatrixLayer.block_moment  # the mean is that of all blocks

    def activation_rows(self, source: Tensor) -> Tensor:
        return torch.cat(list(self._chunks(source)), dim=1)

    def _chunks(self, source: Tensor) -> Iterator[Tensor]:
        window = self.window()
        for rows in patch_chunks(source, window):
            yield window.in_kernel_order(rows - rows.mean(-1, keepdim=True), [2])

    # Γ

    def derivative_rows(self, derivatives: Tensor) -> Tensor:
        slopes = self.slopes().to(derivatives.dtype).view(self.groups, 1, -1)
        return super().derivative_rows(derivatives) * slopes

    def pixel_rows(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        return super().derivative_rows(inputs)  # inputs have the layout of outputs

    def slopes(self) -> Tensor:
        """Return c_i of every row of the weight, (groups · I,)."""
        gains = 1.0 if self._gain is None else self._parameter(self._gain).flatten()
        return self._scale * gains / self._deviations().flatten()

    def example_gradients(
        self, source: Tensor | None, derivatives: Tensor, examples: int
    ) -> Tensor:
        gradients = super().example_gradients(source, derivatives, examples)
        rows = self._rows()
        directions = (rows - rows.mean(-1, keepdim=True)) / self._deviations()
        slopes = (gradients * directions).mean(-1, keepdim=True)
        return gradients - slopes * directions

    def _rows(self) -> Tensor:
        return self.weight_to_matrix(self._parameter("weight"))

    def _deviations(self) -> Tensor:
        """Return s_i, (groups, I, 1)."""
        variances = self._rows().var(-1, unbiased=False, keepdim=True)
        return (variances + self._epsilon).sqrt()

    def _parameter(self, name: str) -> Tensor:
        parameter = self.module._parameters[name]
        assert parameter is not None
        return parameter.detach().to(self.dtype)


class StandardisedSameConvolutionLayer(StandardisedConvolutionLayer, SameConvolutionLayer):
    """The same after ``pad_same()``, as ``ScaledStdConv2dSame`` of timm."""


def gain_of(module: _ConvNd) -> str | None:
    """Return the name of the only parameter besides weight and bias, if it has a value per row."""
    others = [
        role
        for role, p in module._parameters.items()
        if p is not None and role not in ("weight", "bias")
    ]
    sizes = [module.get_parameter(role).numel() for role in others]
    return others[0] if sizes == [module.out_channels] else None


def standardised(module: _ConvNd, epsilon: float = 0.0) -> Tensor:
    """Return the standardised weight of a module times its gain, without κ."""
    rows = module.weight.flatten(1)
    variances, means = torch.var_mean(rows, dim=1, unbiased=False, keepdim=True)
    rows = (rows - means) / (variances + epsilon).sqrt()
    gain = gain_of(module)
    if gain is not None:
        rows = rows * module.get_parameter(gain).view(-1, 1)
    return rows.view_as(module.weight)


def centred(moment: Tensor) -> Tensor:
    """Return P M P with P = I - 11ᵀ/n: Σ rowᵀ row of rows without their means."""
    means = moment.mean(-1, keepdim=True)
    return moment - means - means.mT + means.mean(-2, keepdim=True)
