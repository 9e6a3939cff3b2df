"""Convolutions and transposed convolutions, whose rows are patches of their input."""

import math
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from kfc.layers.base import MatrixLayer
from kfc.moments.patches import Window, patch_chunks, window_moment


class ConvolutionLayer(MatrixLayer):
    """``nn.Conv1d/2d/3d``: a row is a patch of the input; one pair of factors per group."""

    module: _ConvNd

    @property
    def groups(self) -> int:
        return self.module.groups

    @property
    def offsets(self) -> int:
        return prod(self.module.kernel_size)

    @property
    def dims(self) -> int:
        return len(self.module.kernel_size)

    def window(self) -> Window:
        conv = self.module
        return Window.of(
            self.dims,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            conv.padding_mode,
        )

    def row_source(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        return self.with_batch(inputs)

    def rows_first(self, values: Tensor, examples: int) -> Tensor:
        return self.with_batch(values)

    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        window = self.window()
        return window_moment(source, window, homogeneous=homogeneous, diagonal=diagonal, fold=True)

    def block_moment(self, source: Tensor, blocks: int, *, homogeneous: bool) -> Tensor:
        window = self.window()
        blocked = replace(window, groups=window.groups * blocks)
        return window_moment(source, blocked, homogeneous=homogeneous, diagonal=False)

    def activation_rows(self, source: Tensor) -> Tensor:
        window = self.window()
        return window.in_kernel_order(torch.cat(list(patch_chunks(source, window)), dim=1), [2])

    def pixel_rows(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        return self.derivative_rows(inputs)  # inputs have the layout of outputs

    def boundary_counts(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return the second moment of the patches of a map of ones."""
        maps = self.with_batch(inputs)
        ones = maps.new_ones(1, 1, *maps.shape[2:], dtype=self.dtype)
        source, window = self.row_source(ones, outputs), replace(self.window(), groups=1)
        counts = window_moment(source, window, homogeneous=True, diagonal=False)
        return len(maps) * counts.squeeze(0)

    def derivative_rows(self, derivatives: Tensor) -> Tensor:
        # (M, groups · I, *T) -> (groups, M · |T|, I)
        maps = self.with_batch(derivatives)
        by_group = maps.reshape(len(maps), self.groups, maps.shape[1] // self.groups, -1)
        return by_group.permute(1, 0, 3, 2).flatten(1, 2)

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.weight.shape)

    def is_channels_last(self, weight: Tensor) -> bool:
        return not weight.is_contiguous() and weight.movedim(1, -1).is_contiguous()

    def with_batch(self, maps: Tensor) -> Tensor:
        """Return maps with a batch dimension, which a single example may lack."""
        return maps if maps.dim() == self.dims + 2 else maps.unsqueeze(0)


class SameConvolutionLayer(ConvolutionLayer):
    """A convolution over its input after ``pad_same()``, as ``Conv2dSame`` of timm.

    The module's own padding has no effect.
    """

    def window(self) -> Window:
        conv = self.module
        return Window.of(
            self.dims, conv.kernel_size, conv.stride, 0, conv.dilation, groups=conv.groups
        )

    def row_source(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        conv = self.module
        return pad_same(self.with_batch(inputs), conv.kernel_size, conv.stride, conv.dilation)


def pad_same(
    maps: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return maps with zeros around them, so that there is a location per stride of pixels.

    An odd number of zeros has one more at the end.
    """
    padding: list[int] = []
    for size, kernel, step, spacing in zip(
        maps.shape[2:], kernel_size, stride, dilation, strict=True
    ):
        last = (math.ceil(size / step) - 1) * step
        total = max(last + spacing * (kernel - 1) + 1 - size, 0)
        padding = [total // 2, total - total // 2, *padding]
    return F.pad(maps, padding)


class TransposedConvolutionLayer(ConvolutionLayer):
    """``nn.ConvTranspose1d/2d/3d``: a convolution over the input with zeros between its pixels.

    Row i of the matrix is (bias_i, weight[:, i].flatten()); locations are output locations.
    """

    module: _ConvTransposeNd

    def window(self) -> Window:
        conv = self.module
        ones, no_padding = (1,) * self.dims, ((0, 0),) * self.dims
        return Window(
            conv.kernel_size, ones, no_padding, conv.dilation, conv.groups, backwards=True
        )

    def row_source(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return the input with zeros between its pixels and around them, in the kernel's reach."""
        conv, maps = self.module, self.with_batch(inputs)
        sizes = [s * (n - 1) + 1 for n, s in zip(maps.shape[2:], conv.stride, strict=True)]
        stuffed = maps.new_zeros(*maps.shape[:2], *sizes)
        stuffed[tuple(slice(None, None, step) for step in (1, 1, *conv.stride))] = maps
        padding: list[int] = []
        for axis in reversed(range(self.dims)):
            extent = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            before = extent - int(conv.padding[axis])
            # Not from output_padding: the call's output_size= may override it.
            locations = outputs.shape[axis - self.dims]
            padding += [before, locations + extent - before - sizes[axis]]
        return F.pad(stuffed, padding)

    def is_channels_last(self, weight: Tensor) -> bool:
        return False  # the rows of the matrix are not rows of the weight

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        # (groups · J, I, *D) -> (groups, I, J · |D|)
        parts = weight.reshape(self.groups, -1, *weight.shape[1:])
        return parts.transpose(1, 2).flatten(2)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        outputs, inputs = matrix.shape[1], self.module.in_channels // self.groups
        parts = matrix.reshape(self.groups, outputs, inputs, *self.module.kernel_size)
        return parts.transpose(1, 2).flatten(0, 1)
