"""Second moments of the patches a convolution sees, mostly without making the patches.

A patch is the receptive field of one output location, flattened in the order of
``weight.reshape(out_channels, -1)``; a leading 1, the homogeneous coordinate, stands for the bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.checks import require_whole
from kfc.correlation import (
    Axis,
    coarse_axis,
    patch_moment,
    patch_moment_cost,
    phases_to_channels,
    places_in_phases,
)
from kfc.spectral import PASS, mirrored

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")

# Patches are made for a few examples at a time, so that they never take more than this.
CHUNK_ELEMENTS = 2**23

# A multiply-add of the autocorrelations, in many small products, costs about as much as this many
# of one large product; and their many operations, however small, as much as this many in all.
CORRELATION_HANDICAP = 2.0
CORRELATION_START = 1.3e8


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution: how its receptive fields lie on the input.

    Each tuple has one entry per spatial dimension; ``padding`` holds (before, after) pairs.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    padding_mode: PaddingMode = "zeros"

    @classmethod
    def of(
        cls,
        dims: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> Window:
        """From arguments as ``torch.nn.Conv*d`` takes them."""
        if padding_mode not in PADDING_MODES:
            raise ValueError(f"padding_mode must be one of {PADDING_MODES}, got {padding_mode!r}")
        kernel = _per_dimension(kernel_size, dims, "kernel_size")
        spacing = _per_dimension(dilation, dims, "dilation")
        pairs: tuple[tuple[int, int], ...]
        if padding == "valid":
            pairs = ((0, 0),) * dims
        elif padding == "same":
            if _per_dimension(stride, dims, "stride") != (1,) * dims:
                raise ValueError('padding="same" needs a stride of 1')
            overhang = [d * (k - 1) for k, d in zip(kernel, spacing, strict=True)]
            pairs = tuple((total // 2, total - total // 2) for total in overhang)
        elif isinstance(padding, str):
            raise ValueError(
                f'padding must be a number, a tuple, "same" or "valid", got {padding!r}'
            )
        else:
            pairs = tuple((p, p) for p in _per_dimension(padding, dims, "padding", low=0))
        return cls(
            kernel,
            _per_dimension(stride, dims, "stride"),
            pairs,
            spacing,
            groups,
            padding_mode,  # type: ignore[arg-type]
        )

    @property
    def dims(self) -> int:
        return len(self.kernel_size)

    def without_padding(self) -> Window:
        return replace(self, padding=((0, 0),) * self.dims, padding_mode="zeros")

    def locations(self, size: Sequence[int]) -> tuple[int, ...]:
        """|T| along each dimension, for maps of this size; an error if the kernel does not fit."""
        padded = [n + sum(pair) for n, pair in zip(size, self.padding, strict=True)]
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        if any(length < span for length, span in zip(padded, spans, strict=True)):
            raise ValueError(
                f"the padded map {tuple(padded)} is smaller than the kernel, which spans {spans}"
            )
        parts = zip(padded, spans, self.stride, strict=True)
        return tuple((length - span) // step + 1 for length, span, step in parts)

    def pad(self, inputs: Tensor) -> Tensor:
        """The inputs with their border made explicit."""
        if all(pair == (0, 0) for pair in self.padding):
            return inputs
        # torch lists the last dimension's padding first.
        flat = [amount for pair in reversed(self.padding) for amount in pair]
        if self.padding_mode == "zeros":
            return F.pad(inputs, flat)
        return F.pad(inputs, flat, mode=self.padding_mode)


def second_moment(
    inputs: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: bool = True,
    padding_mode: str = "zeros",
) -> Tensor:
    """Ω, the activation factor of a convolution (eqn 23): Σ over locations, mean over examples.

    Args:
        inputs: (M, J, *map) with one to three spatial dimensions.
        kernel_size: as in ``torch.nn.Conv*d``, and so are the others but ``bias``.
        stride: a number, or one per dimension.
        padding: a number, one per dimension, ``"same"`` or ``"valid"``.
        dilation: a number, or one per dimension.
        groups: of channels, each with its own patches.
        bias: whether patches carry the homogeneous coordinate, first.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.

    Returns:
        (n, n), or (groups, n, n) if there are several, with n = bias + J/groups · ∏ kernel_size;
        in float32 at least.
    """
    if not 3 <= inputs.dim() <= 5:
        raise ValueError(
            f"inputs must be (examples, channels, *map) with 1 to 3 spatial dimensions, got shape "
            f"{tuple(inputs.shape)}"
        )
    if inputs.shape[0] == 0:
        raise ValueError("the batch is empty")
    require_whole("groups", groups)
    if inputs.shape[1] % groups:
        raise ValueError(f"{inputs.shape[1]} channels cannot be split into {groups} groups")
    window = Window.of(
        inputs.dim() - 2, kernel_size, stride, padding, dilation, groups, padding_mode
    )
    with torch.autocast(inputs.device.type, enabled=False):
        total = window_moment(inputs, window, homogeneous=bias, diagonal=False)
    total = total / inputs.shape[0]
    return total[0] if groups == 1 else total


def window_moment(inputs: Tensor, window: Window, *, homogeneous: bool, diagonal: bool) -> Tensor:
    """Σ patchᵀ patch over examples and locations: (groups, n, n), or its diagonal, (groups, n).

    By the cheaper way, counted in multiply-adds: patches, a few examples at a time, or the maps'
    autocorrelations.
    """
    inputs = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    if not diagonal and correlation_pays(inputs, window):
        moment, trusted = moment_by_correlation(inputs, window)
        if trusted:
            return _with_first_moment(moment, inputs, window) if homogeneous else moment
    total: Tensor | None = None
    for rows in patch_chunks(inputs, window):
        part = row_moment(rows, homogeneous=homogeneous, diagonal=diagonal)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total if diagonal else mirrored(total)


def correlation_pays(inputs: Tensor, window: Window) -> bool:
    """Whether autocorrelations take less work than patches, in multiply-adds."""
    # Of one group; they share the start.
    channels = inputs.shape[1] // window.groups
    width = channels * prod(window.kernel_size)
    # Patches are written and read once.
    by_patches = len(inputs) * prod(window.locations(inputs.shape[2:])) * width * (width + 2 * PASS)
    axes = _axes_of_stride_one(inputs, window)
    by_correlation = patch_moment_cost(len(inputs), channels * prod(window.stride), axes)
    start = CORRELATION_START / window.groups
    return start + CORRELATION_HANDICAP * by_correlation < by_patches


def moment_by_correlation(inputs: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Σ patchᵀ patch, (groups, n, n), from autocorrelations, and whether it can be trusted.

    See :mod:`kfc.correlation`.
    """
    axes = _axes_of_stride_one(inputs, window)
    if window.padding_mode != "zeros" or max(window.stride) > 1:
        inputs = window.pad(inputs)
    maps = inputs.reshape(len(inputs), window.groups, -1, *inputs.shape[2:])
    if max(window.stride) == 1:
        return patch_moment(maps, axes)
    places = places_in_phases(maps.shape[2], window.kernel_size, window.stride, window.dilation).to(
        maps.device
    )
    moment, trusted = patch_moment(phases_to_channels(maps, axes, window.stride), axes)
    return moment[:, places][:, :, places], trusted


def _axes_of_stride_one(inputs: Tensor, window: Window) -> tuple[Axis, ...]:
    """The axes that ``moment_by_correlation`` works along."""
    if max(window.stride) > 1:
        locations = window.locations(inputs.shape[2:])
        strided = zip(locations, window.kernel_size, window.stride, window.dilation, strict=True)
        return tuple(coarse_axis(*axis) for axis in strided)
    size, padding = tuple(inputs.shape[2:]), window.padding
    if window.padding_mode != "zeros":
        size = tuple(n + sum(pair) for n, pair in zip(size, padding, strict=True))
        padding = ((0, 0),) * window.dims
    plain = zip(size, window.kernel_size, window.dilation, padding, strict=True)
    return tuple(Axis(*axis) for axis in plain)


def _with_first_moment(moment: Tensor, inputs: Tensor, window: Window) -> Tensor:
    """Add the homogeneous coordinate to a moment (groups, n, n) of these inputs' patches."""
    total = window.pad(_sum_over_examples(inputs))
    (sums,) = patch_chunks(total, window.without_padding())
    return _bordered(moment, sums.sum(1), count=len(inputs) * sums.shape[1])


def _sum_over_examples(inputs: Tensor) -> Tensor:
    """(1, J, *map), as a product with ones: in either memory format one pass, without strides."""
    ones = inputs.new_ones(1, len(inputs))
    channels_last = inputs.movedim(1, -1)
    if channels_last.is_contiguous():
        return (ones @ channels_last.flatten(1)).reshape(1, *channels_last.shape[1:]).movedim(-1, 1)
    return (ones @ inputs.flatten(1)).reshape(1, *inputs.shape[1:])


def row_moment(rows: Tensor, *, homogeneous: bool, diagonal: bool) -> Tensor:
    """Σ rowᵀ row for rows (groups, R, n), with a leading 1 on every row if ``homogeneous``."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    moment = rows.square().sum(1) if diagonal else rows.transpose(1, 2) @ rows
    if not homogeneous:
        return moment
    count = rows.shape[1]
    if diagonal:
        return F.pad(moment, (1, 0), value=count)
    return _bordered(moment, rows.sum(1), count)


def _bordered(moment: Tensor, sums: Tensor, count: int) -> Tensor:
    """The moment (groups, n, n) of rows as that of rows with a leading 1, from their sum."""
    groups, width = sums.shape
    result = moment.new_empty(groups, 1 + width, 1 + width)
    result[:, 1:, 1:] = moment
    result[:, 0, 0] = count
    result[:, 0, 1:] = result[:, 1:, 0] = sums
    return result


def patch_chunks(inputs: Tensor, window: Window) -> Iterator[Tensor]:
    """The patches of a few examples at a time: (groups, examples · |T|, J/groups · |D|)."""
    padded = window.pad(inputs)
    per_example = _windows(padded[:1], window).numel()
    step = max(1, CHUNK_ELEMENTS // max(1, per_example))
    dims, groups = window.dims, window.groups
    for start in range(0, len(padded), step):
        windows = _windows(padded[start : start + step], window)
        # (M, groups, J/groups, *T, *D) -> (groups, M, *T, J/groups, *D)
        windows = windows.reshape(len(windows), groups, -1, *windows.shape[2:])
        locations = range(3, 3 + dims)
        offsets = range(3 + dims, 3 + 2 * dims)
        windows = windows.permute(1, 0, *locations, 2, *offsets)
        width = windows.shape[2 + dims :].numel()
        yield windows.reshape(groups, -1, width)


def _windows(padded: Tensor, window: Window) -> Tensor:
    """A view (M, J, *T, *D) of every receptive field."""
    view = padded
    for axis, (size, step, spacing) in enumerate(
        zip(window.kernel_size, window.stride, window.dilation, strict=True)
    ):
        view = view.unfold(2 + axis, spacing * (size - 1) + 1, step)[..., ::spacing]
    return view


def _per_dimension(
    value: int | Sequence[int], dims: int, name: str, low: int = 1
) -> tuple[int, ...]:
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values = values * dims
    if len(values) != dims:
        raise ValueError(f"{name} must be a number or {dims} of them, got {value!r}")
    for number in values:
        require_whole(name, number, low)
    return values
