"""Products of matrices with the recorded activations of a layer, without patches.

A convolution multiplies its patches faster than they can be unfolded. Images of vectors and their
adjoints are computed by convolutions of the recorded maps, and by matrix products for all other
layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from kfc.analysis.recording import LayerCall, LayerRecord
from kfc.layers import ConvolutionLayer

FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
WEIGHT_GRADIENT = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


class Activations:
    """The rows (1, a_t) of a record, as a linear map.

    Locations t are those of all calls and frames of an example, in the order of
    ``LayerRecord.activation_rows()``.
    """

    def __init__(self, record: LayerRecord) -> None:
        self.record = record
        self._trained = record.layer.trained_roles()

    def images(self, matrix: Tensor, part: slice) -> Tensor:
        """Return V (1, a_t) for some examples, (examples, groups, |T|, k).

        Args:
            matrix: V, (groups, k, n).
        """
        count = part.stop - part.start
        found = [self._forward(call, matrix, part, count) for call in self._calls]
        return torch.cat(found, dim=2) if len(found) > 1 else found[0]

    def adjoint(self, images: Tensor, part: slice) -> Tensor:
        """Return Σ over examples and t of y_t (1, a_t)ᵀ, (groups, k, n).

        Args:
            images: y, (examples, groups, |T|, k), of the same part of the examples.
        """
        sizes = [self._locations(call) for call in self._calls]
        parts = zip(self._calls, images.split(sizes, dim=2), strict=True)
        first, *others = (self._backward(call, some, part) for call, some in parts)
        return sum(others, first)

    @property
    def _calls(self) -> tuple[LayerCall, ...]:
        return self.record.calls

    def _locations(self, call: LayerCall) -> int:
        rows = self.record.layer.derivative_rows(call.outputs).shape[1]
        return rows // self.record.examples

    def _source(self, call: LayerCall, part: slice) -> Tensor:
        inputs, outputs = self.record.selected(call, part)
        return self.record.layer.row_source(inputs, outputs)

    def _split(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the columns of the bias, (groups, k, 1), and of the weight, if trained."""
        homogeneous = int("bias" in self._trained)
        bias, weight = matrix.tensor_split([homogeneous], dim=2)
        return (bias if homogeneous else None), (weight if "weight" in self._trained else None)

    def _forward(self, call: LayerCall, matrix: Tensor, part: slice, count: int) -> Tensor:
        layer, (bias, weight) = self.record.layer, self._split(matrix)
        locations, (groups, width) = self._locations(call), matrix.shape[:2]
        if weight is None:
            images = matrix.new_zeros(count, groups, locations, width)
        elif isinstance(layer, ConvolutionLayer):
            window = layer.window()
            maps = window.pad(self._source(call, part))
            kernel = window.in_kernel_order(weight, [2]).flatten(0, 1)
            kernel = kernel.unflatten(1, (-1, *window.kernel_size))
            found = FORWARD[window.dims](
                maps, kernel, None, window.stride, 0, window.dilation, groups
            )
            # (examples · frames, groups · k, *T) -> (examples, groups, frames · |T|, k)
            by_group = found.reshape(count, -1, groups, width, found[0, 0].numel())
            images = by_group.permute(0, 2, 1, 4, 3).reshape(count, groups, locations, width)
        else:
            rows = layer.activation_rows(self._source(call, part))  # (groups, rows, J)
            images = (rows @ weight.mT).unflatten(1, (count, locations)).transpose(0, 1)
        return images if bias is None else images.add_(bias.mT)

    def _backward(self, call: LayerCall, images: Tensor, part: slice) -> Tensor:
        layer, (count, groups, _, width) = self.record.layer, images.shape
        columns = []
        if "bias" in self._trained:
            columns.append(images.sum((0, 2)).unsqueeze(-1))
        if "weight" not in self._trained:
            return columns[0]
        if isinstance(layer, ConvolutionLayer):
            window = layer.window()
            maps = window.pad(self._source(call, part))
            size = call.derivatives.shape[-window.dims :]
            frames = len(maps) // count
            # The inverse of the permutation in ``_forward()``.
            back = images.unflatten(2, (frames, -1)).permute(0, 2, 1, 4, 3)
            back = back.reshape(len(maps), groups * width, *size)
            kernel = (groups * width, maps.shape[1] // groups, *window.kernel_size)
            found = WEIGHT_GRADIENT[window.dims](  # type: ignore[no-untyped-call]
                maps, kernel, back, window.stride, 0, window.dilation, groups
            )
            by_group = found.reshape(groups, width, -1)
            columns.append(window.in_kernel_order(by_group, [2]))
        else:
            rows = layer.activation_rows(self._source(call, part))
            columns.append(images.transpose(0, 1).flatten(1, 2).mT @ rows)
        return torch.cat(columns, dim=2)
