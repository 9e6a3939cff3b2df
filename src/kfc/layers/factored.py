"""Layers whose Fisher block is a Kronecker product: linear layers and convolutions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from kfc.kronecker import INVERSES, Factors, KroneckerInverse, factor_balance, trace
from kfc.layers.base import Handler, Inverse, Moment, Statistics
from kfc.patches import Window, patch_chunks, row_moment, window_moment


class KroneckerHandler(Handler):
    """A layer that multiplies rows of its input by one matrix (bias, weight), I x (1 + J|D|).

    Subclasses say how inputs, derivatives and the weight become rows and matrices, each with a
    leading dimension for groups (1 for most layers). The bias and its homogeneous coordinate,
    diagonals for wide factors, ties and frozen parts are taken care of here. The parameters are
    the module's ``weight`` and ``bias``.
    """

    treatment = "Kronecker factors"
    roles = ("bias", "weight")

    @property
    def groups(self) -> int:
        return 1

    def row_source(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """What rows are made of: the inputs of a call, unless the layer changes them first."""
        return inputs

    @abstractmethod
    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        """Σ rowᵀ row, (groups, n, n), over what each output location sees, (groups, rows, n).

        ``homogeneous`` rows begin with a 1; of a ``diagonal`` only (groups, n) is wanted.
        ``kfc.patches.row_moment`` does both.
        """

    def activation_rows(self, source: Tensor) -> Tensor:
        """(groups, rows, J|D|): what each output location sees.

        ``activation_moment`` usually has a cheaper way; this is for gradients of single examples.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its rows are, which gradients of single "
            "examples need: give it activation_rows"
        )

    @abstractmethod
    def derivative_rows(self, derivatives: Tensor) -> Tensor:
        """(groups, rows, I): the derivatives with respect to each output location."""

    def example_gradients(self, source: Tensor, derivatives: Tensor, examples: int) -> Tensor:
        """(examples, groups, I, n): Σ_t Ds_t (1, a_t) of each example, for the trained parameters.

        Args:
            source: what ``row_source`` made of a call's inputs; its rows lie example by example.
            derivatives: with respect to the call's outputs.
        """
        trained = self.trained()
        columns = self.derivative_rows(derivatives.to(self.dtype))
        # (groups, examples · locations, I) -> (examples, groups, locations, I)
        columns = columns.unflatten(1, (examples, -1)).transpose(0, 1)
        parts = [columns.sum(2).unsqueeze(-1)] if "bias" in trained else []
        if "weight" in trained:
            rows = self.activation_rows(source.to(self.dtype)).unflatten(1, (examples, -1))
            parts.append(columns.mT @ rows.transpose(0, 1))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def pixel_rows(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """(groups, pixels, J): the activations at each location of the inputs.

        By default each output location sees a single pixel.
        """
        return self.activation_rows(self.row_source(inputs, outputs))

    def offset_counts(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Σ over a call's rows of the boundary counts β, (1 + |D|, 1 + |D|).

        How many rows see a pixel at both of two offsets of the kernel: see ``kfc.stationary``. By
        default there is one offset, which always sees one.
        """
        rows = self.derivative_rows(outputs).shape[1]
        return inputs.new_full((2, 2), rows, dtype=self.dtype)

    @abstractmethod
    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        """(groups, I, J|D|)"""

    @abstractmethod
    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        """The reverse of ``weight_to_matrix``."""

    def statistics(self) -> Statistics:
        return _KroneckerStatistics(self)

    def sizes(self) -> tuple[int, int]:
        """(n, m): how wide Ω and Γ are for the parameters trained now."""
        _, rows, columns = self.weight_to_matrix(self.weight).shape
        trained = self.trained()
        return ("bias" in trained) + ("weight" in trained) * columns, rows

    def are_wide(self) -> tuple[bool, bool]:
        """Whether Ω and Γ are kept as diagonals."""
        activation, derivative = self.sizes()
        return activation > self.max_factor_size, derivative > self.max_factor_size

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            (self.groups, size) if wide else (self.groups, size, size)
            for size, wide in zip(self.sizes(), self.are_wide(), strict=True)
        )

    def note(self) -> str:
        names = ("activation", "derivative")
        wide = [name for name, is_wide in zip(names, self.are_wide(), strict=True) if is_wide]
        if not wide:
            return ""
        return f"{' and '.join(wide)} factor wider than {self.max_factor_size}: diagonal only"

    def summary(self, running: tuple[Tensor, ...]) -> dict[str, Any]:
        factors = Factors(*running)
        names = ("pi", "activation_trace", "derivative_trace")
        values = (factor_balance(factors), *map(trace, factors))
        return {
            name: value.item() if value.numel() == 1 else value.tolist()
            for name, value in zip(names, values, strict=True)
        }

    def invert(self, running: tuple[Tensor, ...], damping: float, kind: str) -> Inverse:
        return INVERSES[kind].of(Factors(*running), damping)

    def redamp(
        self, inverse: Inverse, running: tuple[Tensor, ...], damping: float, kind: str
    ) -> Inverse:
        assert isinstance(inverse, KroneckerInverse)
        return inverse.redamped(Factors(*running), damping)

    def inverse_shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        return INVERSES[kind].shapes(*self.shapes())

    def restore_inverse(self, tensors: Mapping[str, Tensor], kind: str) -> KroneckerInverse:
        return INVERSES[kind](tensors)

    def natural_gradient(
        self, inverse: Inverse, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Γ_damped⁻¹ V Ω_damped⁻¹ (eqn 10) with V = (bias, weight)."""
        parts = []
        if "bias" in gradients:
            parts.append(gradients["bias"].reshape(self.groups, -1, 1))
        if "weight" in gradients:
            parts.append(self.weight_to_matrix(gradients["weight"]))
        solution = inverse.apply(torch.cat(parts, dim=2) if len(parts) > 1 else parts[0])
        result = {}
        if "bias" in gradients:
            result["bias"] = solution[:, :, 0].reshape(-1)
            solution = solution[:, :, 1:]
        if "weight" in gradients:
            result["weight"] = self.weight_from_matrix(solution)
        return result


class _KroneckerStatistics(Statistics):
    """Ω: sum over rows, mean over examples. Γ: mean over rows (Theorem 2, eqn 23)."""

    def __init__(self, handler: KroneckerHandler) -> None:
        self.handler = handler
        self.trained = handler.trained()
        self.wide_activation, self.wide_derivative = handler.are_wide()
        self.activation: Tensor | None = None
        self.derivative: Tensor | None = None
        self.rows = 0

    def forward(self, inputs: Tensor, outputs: Tensor) -> list[Tensor | None]:
        """The call's part of Ω, in a list that ``backward`` empties when it takes it."""
        if "weight" not in self.trained:
            return [None]
        source = self.handler.row_source(inputs.detach().to(self.handler.dtype), outputs)
        moment = self.handler.activation_moment(
            source, homogeneous="bias" in self.trained, diagonal=self.wide_activation
        )
        return [moment]

    def backward(self, kept: list[Tensor | None], derivatives: Tensor, examples: int) -> None:
        rows = self.handler.derivative_rows(derivatives.detach().to(self.handler.dtype))
        moment = row_moment(rows, homogeneous=False, diagonal=self.wide_derivative)
        self.derivative = moment if self.derivative is None else self.derivative.add_(moment)
        if kept:
            self._count(kept.pop(), rows.shape[1])

    def _count(self, activation: Tensor | None, rows: int) -> None:
        self.rows += rows
        if activation is None:
            # The bias alone is trained: the row of every location is just the leading 1.
            assert self.derivative is not None
            activation = self.derivative.new_full((self.handler.groups, 1, 1), rows)
        self.activation = activation if self.activation is None else self.activation + activation

    def end_draw(self) -> None:
        pass

    def moments(self, examples: int) -> tuple[Moment, ...]:
        if self.activation is None or self.derivative is None:
            return ()
        return Moment(self.activation, examples), Moment(self.derivative, self.rows)


class LinearHandler(KroneckerHandler):
    """``nn.Linear``: all dimensions between the first and the last count as locations."""

    def activation_rows(self, source: Tensor) -> Tensor:
        return source.reshape(1, -1, source.shape[-1])

    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        rows = self.activation_rows(source)
        return row_moment(rows, homogeneous=homogeneous, diagonal=diagonal)

    def derivative_rows(self, derivatives: Tensor) -> Tensor:
        return derivatives.reshape(1, -1, derivatives.shape[-1])

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(0)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.squeeze(0)


class ConvolutionHandler(KroneckerHandler):
    """``nn.Conv1d/2d/3d``: a row is a patch of the input; one pair of factors per group."""

    module: _ConvNd

    @property
    def groups(self) -> int:
        return self.module.groups

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

    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        return window_moment(source, self.window(), homogeneous=homogeneous, diagonal=diagonal)

    def activation_rows(self, source: Tensor) -> Tensor:
        return torch.cat(list(patch_chunks(source, self.window())), dim=1)

    def pixel_rows(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        return self.derivative_rows(inputs)  # inputs lie in memory as outputs do

    def offset_counts(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """By counting: the second moment of the patches of a map of ones."""
        maps = self.with_batch(inputs)
        ones = maps.new_ones(1, 1, *maps.shape[2:], dtype=self.dtype)
        source, window = self.row_source(ones, outputs), replace(self.window(), groups=1)
        counts = window_moment(source, window, homogeneous=True, diagonal=False).squeeze(0)
        return len(maps) * self._in_kernel_order(counts)

    def _in_kernel_order(self, counts: Tensor) -> Tensor:
        return counts

    def derivative_rows(self, derivatives: Tensor) -> Tensor:
        # (M, groups · I, *T) -> (groups, M · |T|, I)
        maps = self.with_batch(derivatives)
        by_group = maps.reshape(len(maps), self.groups, maps.shape[1] // self.groups, -1)
        return by_group.permute(1, 0, 3, 2).flatten(1, 2)

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.weight.shape)

    def with_batch(self, maps: Tensor) -> Tensor:
        """Convolutions also take a single example without its batch dimension."""
        return maps if maps.dim() == self.dims + 2 else maps.unsqueeze(0)


class TransposedConvolutionHandler(ConvolutionHandler):
    """``nn.ConvTranspose1d/2d/3d``: a convolution over the input with zeros stuffed in between.

    Row i of the matrix is (bias_i, weight[:, i].flatten()); locations are output locations.
    """

    module: _ConvTransposeNd

    def window(self) -> Window:
        conv = self.module
        ones = (1,) * self.dims
        none = ((0, 0),) * self.dims
        return Window(conv.kernel_size, ones, none, conv.dilation, conv.groups)

    def row_source(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Zeros between the pixels, and as many around them as the kernel reaches the outputs."""
        conv, maps = self.module, self.with_batch(inputs)
        sizes = [s * (n - 1) + 1 for n, s in zip(maps.shape[2:], conv.stride, strict=True)]
        stuffed = maps.new_zeros(*maps.shape[:2], *sizes)
        everything = slice(None)
        spaced = tuple(slice(None, None, stride) for stride in conv.stride)
        place = (everything, everything, *spaced)
        stuffed[place] = maps
        padding: list[int] = []
        for axis in reversed(range(self.dims)):
            extent = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            before = extent - int(conv.padding[axis])
            # Not from output_padding: a call's output_size= may ask for another.
            locations = outputs.shape[axis - self.dims]
            padding += [before, locations + extent - before - sizes[axis]]
        return F.pad(stuffed, padding)

    def activation_moment(self, source: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
        total = super().activation_moment(source, homogeneous=homogeneous, diagonal=diagonal)
        # A transposed convolution reads its kernel backwards.
        maps = self.module.in_channels // self.groups
        order = self._reversed_offsets(maps, homogeneous=homogeneous, device=total.device)
        return total[:, order] if diagonal else total[:, order][:, :, order]

    def activation_rows(self, source: Tensor) -> Tensor:
        maps = self.module.in_channels // self.groups
        order = self._reversed_offsets(maps, homogeneous=False, device=source.device)
        return super().activation_rows(source)[:, :, order]

    def _in_kernel_order(self, counts: Tensor) -> Tensor:
        order = self._reversed_offsets(1, homogeneous=True, device=counts.device)
        return counts[order][:, order]

    def _reversed_offsets(self, maps: int, *, homogeneous: bool, device: torch.device) -> Tensor:
        index = torch.arange(maps * self.weight[0, 0].numel(), device=device)
        index = index.reshape(maps, -1).flip(1).flatten()
        return F.pad(index + 1, (1, 0)) if homogeneous else index

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        # (groups · J, I, *D) -> (groups, I, J · |D|)
        parts = weight.reshape(self.groups, -1, *weight.shape[1:])
        return parts.transpose(1, 2).flatten(2)

    def weight_from_matrix(self, matrix: Tensor) -> Tensor:
        outputs, inputs = matrix.shape[1], self.module.in_channels // self.groups
        parts = matrix.reshape(self.groups, outputs, inputs, *self.module.kernel_size)
        return parts.transpose(1, 2).flatten(0, 1)
