"""Autocorrelations of maps by way of their spectrum: exact, and cheaper than any sum over offsets.

C(e) = Σ_u a[u] a[u + e]ᵀ for all offsets e up to a reach. Summed directly, every offset costs a
product of all maps. In the frequency domain it is one product per frequency, for all offsets at
once (the correlation theorem); with maps padded by the reach, nothing wraps around. The transforms
are products with small matrices of sines and cosines: maps are small, and the products leave the
frequencies where the next product wants them, outermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, pi, prod

import torch
from torch import Tensor

# Examples are transformed a few at a time, so that their spectra stay in the cache.
CHUNK_ELEMENTS = 2**20
# What cross spectra may take; more frequencies than that are done one block after the other.
BLOCK_ELEMENTS = 2**24
# A pass over memory costs about as much as this many multiply-adds for each element.
PASS = 20
# Transforms are dense matrices, cheap for small maps only.
LONGEST = 512


def autocorrelation(maps: Tensor, reach: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Σ over examples and positions u of a[u] a[u + e·dilation]ᵀ; zero outside the maps.

    Args:
        maps: (M, groups, C, *map) with n spatial dimensions, possibly none.
        reach: the largest offset along each dimension.

    Returns:
        (*(2 reach + 1), groups, C, C), offset e at index reach + e; C(-e) is exactly C(e)ᵀ.
    """
    groups, channels, size = maps.shape[1], maps.shape[2], tuple(maps.shape[3:])
    if not size:
        examples = maps.transpose(0, 1)
        return mirrored(examples.mT @ examples)
    periods = _periods(size, reach, dilation)
    back = _inverse_transform(periods, tuple(reach), tuple(dilation), maps.dtype, maps.device)
    half = maps.new_zeros(back.shape[1], groups * channels**2)
    others = prod(periods[1:])
    # Frequencies of the first dimension a few at a time, so that their products stay small.
    block = max(1, BLOCK_ELEMENTS // (2 * others * groups * channels**2))
    for start in range(0, periods[0] // 2 + 1, block):
        rows = slice(start, min(start + block, periods[0] // 2 + 1))
        cross = _cross_spectrum(maps, periods, rows)
        for part, products in zip(back, cross, strict=True):
            products = products.reshape(-1, groups * channels**2)
            half.addmm_(part[:, rows.start * others : rows.stop * others], products)
    return _with_mirror_image(half.reshape(*_half_offsets(reach), groups, channels, channels))


def _cross_spectrum(maps: Tensor, periods: Sequence[int], rows: slice) -> tuple[Tensor, Tensor]:
    """Σ over examples of conj(A) Aᵀ, twice its real and its imaginary part.

    Each is (frequencies · groups, C, C). A = X + iY is the spectrum at the given frequencies of the
    first dimension and all of the others. The real part XᵀX + YᵀY is symmetric, the imaginary part
    XᵀY - YᵀX antisymmetric: their sum (X - Y)ᵀX + (X + Y)ᵀY tells both, for two real products
    instead of four.
    """
    groups, channels = maps.shape[1:3]
    frequencies = (rows.stop - rows.start) * prod(periods[1:])
    step = max(1, CHUNK_ELEMENTS // (2 * frequencies * groups * channels))
    total = maps.new_zeros(frequencies * groups, channels, channels)
    for some in maps.split(step):
        spectrum = _spectrum(some, periods, rows)
        real, imaginary = spectrum.chunk(2, dim=1)
        partner = torch.empty_like(spectrum)
        less, more = partner.chunk(2, dim=1)
        torch.sub(real, imaginary, out=less)
        torch.add(real, imaginary, out=more)
        total.baddbmm_(partner.mT, spectrum)
    return total + total.mT, total - total.mT


def autocorrelation_cost(
    examples: int, channels: int, size: Sequence[int], reach: Sequence[int], dilation: Sequence[int]
) -> float:
    """Of ``autocorrelation`` per group, in multiply-adds; infinite for maps too long for it."""
    if not size:
        return examples * channels**2
    if max(size) > LONGEST:
        return inf
    periods = _periods(size, reach, dilation)
    frequencies = _frequencies(periods)
    # The way back, and some seven passes over the cross spectra, do not grow with the batch.
    fixed = (2.0 * prod(_half_offsets(reach)) + 7 * PASS) * frequencies * channels**2
    cost = 2.0 * frequencies * channels**2
    done, left = 1, prod(size)
    for axis, (length, period) in enumerate(zip(size, periods, strict=True)):
        left //= length
        count = period // 2 + 1 if axis == 0 else period
        cost += channels * done * (2 * count) * (length if axis == 0 else 2 * length) * left
        done *= count
    return examples * cost + fixed


def _periods(size: Sequence[int], reach: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Long enough that no offset within reach wraps around."""
    return tuple(s + r * d for s, r, d in zip(size, reach, dilation, strict=True))


def _frequencies(periods: Sequence[int]) -> int:
    """Of the first dimension only half: the maps are real."""
    return (periods[0] // 2 + 1) * prod(periods[1:])


def _half_offsets(reach: Sequence[int]) -> tuple[int, ...]:
    """Of the first dimension only e >= 0: the other half is its mirror image."""
    return (reach[0] + 1, *(2 * r + 1 for r in reach[1:]))


def _spectrum(maps: Tensor, periods: Sequence[int], rows: slice) -> Tensor:
    """(frequencies · groups, 2 M, C), real parts before imaginary, of maps (M, groups, C, *map).

    Of the first dimension only the frequencies in ``rows``.
    """
    examples, groups, channels, *size = maps.shape
    # Positions outermost: each transform is then one product with long, contiguous rows.
    values = maps.permute(*range(3, maps.dim()), 0, 1, 2).reshape(size[0], -1)
    first = _transform(size[0], periods[0], True, maps.dtype, maps.device)
    values = first[2 * rows.start : 2 * rows.stop] @ values
    done = rows.stop - rows.start
    for length, period in zip(size[1:], periods[1:], strict=True):
        matrix = _transform(length, period, False, maps.dtype, maps.device)
        values = matrix @ values.reshape(done, 2 * length, -1)
        done *= period
    parts = values.reshape(done, 2, examples, groups, channels).permute(0, 3, 1, 2, 4)
    return parts.reshape(done * groups, 2 * examples, channels)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _transform(
    length: int, period: int, first: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The Fourier transform along one dimension, real and imaginary rows in turn.

    The first one takes real values and gives half the frequencies, (2 (period // 2 + 1), length);
    a later one takes real and imaginary values, (2 period, 2 length).
    """
    count = period // 2 + 1 if first else period
    angles = _angles(torch.arange(count), torch.arange(length), period)
    cos, sin = angles.cos(), angles.sin()
    if first:
        real, imaginary = cos, -sin
    else:
        real, imaginary = torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)
    return torch.stack([real, imaginary], dim=1).flatten(0, 1).to(device, dtype)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _inverse_transform(
    periods: tuple[int, ...],
    reach: tuple[int, ...],
    dilation: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """From ``_cross_spectrum``'s two parts to half the offsets, (2, offsets, frequencies)."""
    dims = len(periods)
    angles = torch.zeros([1] * 2 * dims, dtype=torch.float64)
    for axis, (period, far, spacing) in enumerate(zip(periods, reach, dilation, strict=True)):
        offsets = torch.arange(0 if axis == 0 else -far, far + 1) * spacing
        frequencies = torch.arange(period // 2 + 1 if axis == 0 else period)
        shape = [1] * 2 * dims
        shape[axis], shape[dims + axis] = len(offsets), len(frequencies)
        angles = angles + _angles(offsets, frequencies, period).reshape(shape)
    # A frequency stands for its conjugate too, but for those that are their own; half of that,
    # for the cross spectra are twice what they should be.
    weights = torch.ones(periods[0] // 2 + 1, dtype=torch.float64)
    weights[0] = 0.5
    if periods[0] % 2 == 0:
        weights[-1] = 0.5
    weights = weights.reshape(-1, *[1] * (dims - 1)) / prod(periods)
    parts = (weights * angles.cos(), -weights * angles.sin())
    count = prod(_half_offsets(reach))
    return torch.stack([part.reshape(count, -1) for part in parts]).to(device, dtype)


def _angles(first: Tensor, second: Tensor, period: int) -> Tensor:
    """2π first·second / period, reduced before it is rounded."""
    return torch.outer(first, second).remainder(period).double() * (2 * pi / period)


def _with_mirror_image(half: Tensor) -> Tensor:
    """All offsets from those with e >= 0 along the first dimension, by C(-e) = C(e)ᵀ."""
    dims = list(range(half.dim() - 3))
    other = half.mT.flip(dims)
    # On e = 0 along the first dimension both are there: keep one of each pair.
    ahead = _ahead(half.shape[1 : len(dims)], half.device)
    seam = torch.where(ahead[..., None, None, None], half[0], other[-1])
    zero = seam[tuple(n // 2 for n in half.shape[1 : len(dims)])]
    zero.copy_(mirrored(zero))
    return torch.cat([other[:-1], seam.unsqueeze(0), half[1:]])


def mirrored(matrix: Tensor) -> Tensor:
    """Symmetric to the bit: the lower triangle is the upper one."""
    return matrix.triu() + matrix.triu(1).mT


def _ahead(shape: Sequence[int], device: torch.device) -> Tensor:
    """Which offsets of the seam come at or after zero, in reading order."""
    index = torch.arange(prod(shape), device=device).reshape(tuple(shape))
    return index >= prod(shape) // 2
