"""Second moments of patches from autocorrelations of maps, without the patches.

The block (d, d') of Ω is Σ_t a[t + d] a[t + d']ᵀ over the output locations t. Over *all* t that is
the autocorrelation C(d' - d), the same for every pair with the same difference. What the border
takes away are the pairs of t before the first location or after the last; along that dimension
both lie in a strip as wide as the kernel overhangs. With the strip's rows as channels, its
contribution is a second moment of patches again, along the other dimensions.

A stride is taken away first: the phases of the map become channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.spectral import PASS, autocorrelation, autocorrelation_cost

Side = Literal["before", "after"]
SIDES: tuple[Side, ...] = ("before", "after")

# A channel's energy times this must not be more than what an offset sees: then the differences are
# exact to about 1e-5 in float32.
LEAST_SEEN = 1e-2


@dataclass(frozen=True)
class Axis:
    """One spatial dimension of a convolution with stride 1, padded by zeros."""

    length: int
    kernel: int
    dilation: int
    padding: tuple[int, int]

    @property
    def reach(self) -> int:
        return self.kernel - 1

    def borderless(self) -> Axis:
        """With output locations wherever the kernel meets the map."""
        extent = self.dilation * self.reach
        return replace(self, padding=(extent, extent))

    def overhang(self, side: Side) -> int:
        """How many pixels at the border not every offset sees."""
        padding = self.padding[0 if side == "before" else 1]
        return max(0, self.dilation * self.reach - padding)

    def missing_pairs(self, side: Side) -> Iterator[tuple[slice, slice]]:
        """For each t beyond the border: the offsets that meet the strip, and where they do."""
        width = self.overhang(side)
        for beyond in range(1, width + 1):
            if side == "after":
                # t = last + beyond: offset d is at strip position beyond - 1 + d.
                stop = (width - beyond) // self.dilation + 1
                yield slice(0, stop), slice(beyond - 1, width, self.dilation)
            else:
                # t = -beyond: offset d is at d - padding - beyond, if that is not negative.
                first = -(-(self.padding[0] + beyond) // self.dilation)
                start = self.dilation * first - self.padding[0] - beyond
                stop = width - beyond + 1
                yield slice(first, self.kernel), slice(start, stop, self.dilation)


def patch_moment(maps: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """Σ over examples and locations of patchᵀ patch for stride 1.

    Args:
        maps: (M, groups, C, *map).

    Returns:
        (groups, C·|D|, C·|D|), and whether it can be trusted; see ``_survives_rounding``.
    """
    groups, channels = maps.shape[1:3]
    dims = len(axes)
    total, energy = _moment_of_pairs(maps, axes)
    # Channels before offsets: (groups, C, *D, C, *D).
    order = [2 * dims, 2 * dims + 1, *range(dims), 2 * dims + 2, *range(dims, 2 * dims)]
    width = channels * prod(axis.kernel for axis in axes)
    moment = total.permute(order).reshape(groups, width, width)
    seen = moment.diagonal(dim1=-2, dim2=-1).reshape(groups, channels, -1)
    return moment, _survives_rounding(energy, seen)


def _moment_of_pairs(maps: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """(*D, *D, groups, C, C), and each channel's energy, (groups, C).

    The offsets of the first factor come before those of the second. Channels are innermost, so
    that whole matrices are moved and added.
    """
    correlation = autocorrelation(maps, [a.reach for a in axes], [a.dilation for a in axes])
    energy = correlation[tuple(axis.reach for axis in axes)].diagonal(dim1=-2, dim2=-1)
    total = _by_offset_pairs(correlation, axes)
    for index, side in _border(axes):
        strip, rest = _strip_as_channels(maps, axes, index, side)
        part = _with_strip_as_axis(_moment_of_pairs(strip, rest)[0], axes[index], index, side)
        for offsets, positions in axes[index].missing_pairs(side):
            there, here = total, part
            for dim in (index, len(axes) + index):
                there, here = _sliced(there, dim, offsets), _sliced(here, dim, positions)
            there.sub_(here)
    return total, energy


def _survives_rounding(energy: Tensor, seen: Tensor) -> Tensor:
    """Whether the differences are as exact as sums would be.

    Rounding errors are in proportion to a channel's energy, (groups, C); what an offset sees of it,
    (groups, C, |D|), may be far less if most of it is in the strips. That does no harm in a channel
    that is weak beside the others: a unit that is only active at the border, say.
    """
    usual = seen.amin(-1).clamp_min(0).mean(-1)
    return (LEAST_SEEN * energy.unsqueeze(-1) <= seen.clamp_min(usual[:, None, None])).all()


def patch_moment_cost(examples: int, channels: int, axes: Sequence[Axis]) -> float:
    """Of ``patch_moment`` per group, in multiply-adds."""
    size, reach = [axis.length for axis in axes], [axis.reach for axis in axes]
    cost = autocorrelation_cost(examples, channels, size, reach, [a.dilation for a in axes])
    # Some ten passes over the result: gathered, borders taken away, put into order.
    cost += 10.0 * PASS * (channels * prod(axis.kernel for axis in axes)) ** 2
    for index, side in _border(axes):
        wide = channels * axes[index].overhang(side)
        cost += patch_moment_cost(examples, wide, _rest(axes, index))
    return cost


def coarse_axis(locations: int, kernel: int, stride: int, dilation: int) -> Axis:
    """What is left of a strided axis, without padding, when its phases are channels."""
    reach = dilation * (kernel - 1) // stride
    return Axis(locations + reach, reach + 1, 1, (0, 0))


def phases_to_channels(maps: Tensor, axes: Sequence[Axis], stride: Sequence[int]) -> Tensor:
    """(M, groups, C, *padded map) -> (M, groups, C·∏ stride, *coarse map) for coarse axes."""
    dims = len(axes)
    padding: list[int] = []
    for length, axis, step in zip(maps.shape[3:], axes, stride, strict=True):
        padding = [0, axis.length * step - length, *padding]
    shape = [n for axis, step in zip(axes, stride, strict=True) for n in (axis.length, step)]
    split = F.pad(maps, padding).reshape(*maps.shape[:3], *shape)
    phases, positions = range(4, 4 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
    return split.permute(0, 1, 2, *phases, *positions).flatten(2, 2 + dims)


def places_in_phases(
    channels: int, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Where (channel, *offset) lies among (channel, *phase, *coarse offset), flattened."""
    dims = len(kernel)
    offsets = []
    for index, (size, spacing) in enumerate(zip(kernel, dilation, strict=True)):
        shape = [1] * (1 + dims)
        shape[1 + index] = size
        offsets.append((torch.arange(size) * spacing).reshape(shape))
    place = torch.arange(channels).reshape(-1, *[1] * dims)
    for offset, step in zip(offsets, stride, strict=True):
        place = place * step + offset % step
    for offset, step in zip(offsets, stride, strict=True):
        coarse = offset // step
        place = place * (int(coarse.max()) + 1) + coarse
    return place.flatten()


def _border(axes: Sequence[Axis]) -> Iterator[tuple[int, Side]]:
    """The strips at the border: along which dimension, on which side."""
    for index, axis in enumerate(axes):
        for side in SIDES:
            if axis.overhang(side):
                yield index, side


def _rest(axes: Sequence[Axis], index: int) -> list[Axis]:
    """The axes of a strip along the one with this index.

    What lies beyond the border along two of them must go once only: with the earlier one's strips,
    so that in the later one's strips, all of the earlier one counts.
    """
    return [axis.borderless() for axis in axes[:index]] + list(axes[index + 1 :])


def _strip_as_channels(
    maps: Tensor, axes: Sequence[Axis], index: int, side: Side
) -> tuple[Tensor, list[Axis]]:
    """(M, groups, width · C, *rest), positions in the strip as outer channels; and its axes."""
    strip = _strip(maps, 3 + index, side, axes[index].overhang(side))
    return strip.movedim(3 + index, 2).flatten(2, 3), _rest(axes, index)


def _with_strip_as_axis(pairs: Tensor, axis: Axis, index: int, side: Side) -> Tensor:
    """(*rest, *rest, groups, width · C, width · C) -> (*D, *D, groups, C, C).

    But along the axis with this index, with positions in the strip in place of offsets.
    """
    width = axis.overhang(side)
    channels = pairs.shape[-1] // width
    rest = (pairs.dim() - 3) // 2
    split = pairs.reshape(*pairs.shape[:-2], width, channels, width, channels)
    # (*rest, *rest, groups, width, C, width, C): the second factor's positions go first.
    return split.movedim(-2, rest + index).movedim(-3, index)


def _strip(maps: Tensor, dim: int, side: Side, width: int) -> Tensor:
    """The outermost rows along a dimension; zeros stand in where the map has fewer."""
    length = maps.shape[dim]
    kept = min(length, width)
    strip = maps.narrow(dim, 0 if side == "before" else length - kept, kept)
    if kept == width:
        return strip
    missing = [0, width - kept] if side == "before" else [width - kept, 0]
    return F.pad(strip, [0, 0] * (maps.dim() - 1 - dim) + missing)


def _sliced(tensor: Tensor, dim: int, part: slice) -> Tensor:
    return tensor[(slice(None),) * dim + (part,)]


def _by_offset_pairs(correlation: Tensor, axes: Sequence[Axis]) -> Tensor:
    """(*differences, groups, C, C) -> (*D, *D, groups, C, C): at (d, d'), that of d' - d."""
    if not axes:
        return correlation
    dims = len(axes)
    index = []
    for position, axis in enumerate(axes):
        offsets = torch.arange(axis.kernel, device=correlation.device)
        shape = [1] * 2 * dims
        shape[position] = shape[dims + position] = axis.kernel
        index.append((offsets - offsets[:, None] + axis.reach).reshape(shape))
    return correlation[tuple(index)]
