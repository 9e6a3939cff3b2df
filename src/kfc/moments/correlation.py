"""Second moments of patches from autocorrelations of maps, without the patches.

Block (d, d') of Ω is Σ_t a[t + d] a[t + d']ᵀ over the output locations t. Summed over *all* t, this
is the autocorrelation C(d' - d), shared by every pair with the same difference. The terms with t
before the first or after the last location are then subtracted. Along that dimension, both their
pixels lie in a strip at the border, as wide as the kernel overhangs. With the strip's rows as
channels, these terms are a second moment of patches again, along the remaining dimensions.

A stride is removed first: the phases of the map become channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from kfc.moments.spectral import PASS, autocorrelation, autocorrelation_cost

# The smallest share of a channel's energy that an offset may see. It keeps the error of the
# differences near 1e-5 in float32.
LEAST_SEEN = 1e-2


@dataclass(frozen=True)
class Axis:
    """One spatial dimension of a convolution with stride 1, padded with zeros."""

    length: int
    kernel: int
    dilation: int
    padding: tuple[int, int]

    @property
    def reach(self) -> int:
        """The largest difference between two offsets of the kernel."""
        return self.kernel - 1

    def borderless(self) -> Axis:
        """Return this axis padded so that every location where the kernel meets the map counts."""
        extent = self.dilation * self.reach
        return replace(self, padding=(extent, extent))

    def overhang(self, end: int) -> int:
        """Return how many pixels some offsets miss, at the start (``end=0``) or the end (1)."""
        return max(0, self.dilation * self.reach - self.padding[end])

    def missing_pairs(self, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield, for each t beyond an end, the offsets inside the strip and their positions."""
        width, spacing = self.overhang(end), self.dilation
        for beyond in range(1, width + 1):
            # Offset d lies at position spacing · d + shift of the strip, if that is inside of it.
            shift = beyond - 1 if end else -(self.padding[0] + beyond)
            first = max(0, -(shift // spacing))
            stop = min(self.kernel, (width - 1 - shift) // spacing + 1)
            start, last = spacing * first + shift, spacing * (stop - 1) + shift
            yield slice(first, stop), slice(start, last + 1, spacing)


def patch_moment(maps: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """Return Σ over examples and locations of patchᵀ patch, for stride 1.

    Args:
        maps: (M, groups, C, *map).

    Returns:
        (groups, C·|D|, C·|D|), and whether it is accurate; see ``_survives_rounding``.
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


def patch_moment_cost(examples: int, channels: int, axes: Sequence[Axis]) -> float:
    """Estimate the multiply-adds of ``patch_moment`` per group."""
    size, reach = [axis.length for axis in axes], [axis.reach for axis in axes]
    cost = autocorrelation_cost(examples, channels, size, reach, [a.dilation for a in axes])
    # About ten passes over the result: gather it, subtract the borders, permute it.
    cost += 10.0 * PASS * (channels * prod(axis.kernel for axis in axes)) ** 2
    for index, end in _borders(axes):
        wide = channels * axes[index].overhang(end)
        cost += patch_moment_cost(examples, wide, _axes_of_strip(axes, index))
    return cost


def _moment_of_pairs(maps: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """Return the moment as (*D, *D, groups, C, C), and each channel's energy, (groups, C).

    The offsets of the first factor precede those of the second. Channels are innermost, so that
    whole matrices are moved and added.
    """
    correlation = autocorrelation(maps, [a.reach for a in axes], [a.dilation for a in axes])
    energy = correlation[tuple(axis.reach for axis in axes)].diagonal(dim1=-2, dim2=-1)
    total = _by_offset_pairs(correlation, axes)
    for index, end in _borders(axes):
        strip = _strip_as_channels(maps, axes[index], index, end)
        pairs, _ = _moment_of_pairs(strip, _axes_of_strip(axes, index))
        # (*rest, *rest, groups, width, C, width, C): move each factor's positions to its offsets.
        channels = maps.shape[2]
        part = pairs.unflatten(-1, (-1, channels)).unflatten(-3, (-1, channels))
        part = part.movedim(-2, len(axes) - 1 + index).movedim(-3, index)
        for offsets, positions in axes[index].missing_pairs(end):
            there, here = ([slice(None)] * 2 * len(axes) for _ in range(2))
            there[index] = there[len(axes) + index] = offsets
            here[index] = here[len(axes) + index] = positions
            total[tuple(there)].sub_(part[tuple(here)])
    return total, energy


def _by_offset_pairs(correlation: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Return (*D, *D, groups, C, C), at (d, d') the correlation at the difference d' - d."""
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


def _survives_rounding(energy: Tensor, seen: Tensor) -> Tensor:
    """Return whether the differences are as accurate as sums over patches.

    Rounding errors are proportional to a channel's energy, (groups, C). What an offset sees of it,
    (groups, C, |D|), may be far less if most of it lies in the strips. That is harmless in a
    channel that is weak compared with the others, such as a unit only active at the border.
    """
    usual = seen.amin(-1).clamp_min(0).mean(-1)
    return (LEAST_SEEN * energy.unsqueeze(-1) <= seen.clamp_min(usual[:, None, None])).all()


def _borders(axes: Sequence[Axis]) -> Iterator[tuple[int, int]]:
    """Yield the dimension and the end (0 or 1) of every strip at the border."""
    for index, axis in enumerate(axes):
        yield from ((index, end) for end in (0, 1) if axis.overhang(end))


def _axes_of_strip(axes: Sequence[Axis], index: int) -> list[Axis]:
    """Return the remaining axes of a strip along dimension ``index``.

    Terms beyond the border along two dimensions must be subtracted only once. The strips of the
    later dimension do so, and the earlier one counts in full there.
    """
    return [axis.borderless() for axis in axes[:index]] + list(axes[index + 1 :])


def _strip_as_channels(maps: Tensor, axis: Axis, index: int, end: int) -> Tensor:
    """Return the strip as (M, groups, width · C, *rest), with its positions as outer channels."""
    dim, width = 3 + index, axis.overhang(end)
    length = maps.shape[dim]
    kept = min(length, width)
    strip = maps.narrow(dim, length - kept if end else 0, kept)
    if kept < width:  # a map narrower than the strip continues with zeros
        missing = [width - kept, 0] if end else [0, width - kept]
        strip = F.pad(strip, [0, 0] * (maps.dim() - 1 - dim) + missing)
    return strip.movedim(dim, 2).flatten(2, 3)


def coarse_axis(locations: int, kernel: int, stride: int, dilation: int) -> Axis:
    """Return the axis that remains of a strided one, without padding, with phases as channels."""
    reach = dilation * (kernel - 1) // stride
    return Axis(locations + reach, reach + 1, 1, (0, 0))


def phases_to_channels(maps: Tensor, axes: Sequence[Axis], stride: Sequence[int]) -> Tensor:
    """Return (M, groups, C·∏ stride, *coarse map), given padded maps (M, groups, C, *map)."""
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
    """Return the index of every (channel, *offset) in (channel, *phase, *coarse offset)."""
    offsets = torch.meshgrid(
        *(torch.arange(k) * d for k, d in zip(kernel, dilation, strict=True)), indexing="ij"
    )
    place = torch.arange(channels).reshape(-1, *[1] * len(kernel))
    for offset, step in zip(offsets, stride, strict=True):
        place = place * step + offset % step
    for offset, step in zip(offsets, stride, strict=True):
        coarse = offset // step
        place = place * (int(coarse.max()) + 1) + coarse
    return place.flatten()
