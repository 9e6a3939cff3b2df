"""Autocorrelations of maps, computed exactly in the frequency domain.

C(e) = Σ_u a[u] a[u + e]ᵀ for every offset e up to a reach. Summed directly, each offset costs one
product over all maps. In the frequency domain one product per frequency covers all offsets (the
correlation theorem), and maps padded by the reach do not wrap around. The transforms are products
with small matrices of sines and cosines: maps are small, and these products leave the frequencies
outermost, where the next product needs them. ``torch.fft`` would also compute the offsets that are
not needed; here its inverse is 5 to 10 times slower.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import inf, pi, prod

import torch
from torch import Tensor

# Elements of the spectra that are computed at a time, so that they stay in the processor's cache.
CHUNK_ELEMENTS = 2**20
# Elements of the cross spectra that are held at a time.
BLOCK_ELEMENTS = 2**24
# Elements of a dense inverse transform, at most. Each is cached.
INVERSE_ELEMENTS = 2**20
# Cost of a pass over memory, in multiply-adds per element.
PASS = 20
# The width of the blocks of a symmetric product.
GRAM_BLOCK = 512
# The longest map whose transform, a dense matrix, is still cheap.
LONGEST = 512


def autocorrelation(maps: Tensor, reach: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Return Σ over examples and positions u of a[u] a[u + e·dilation]ᵀ, with zeros outside maps.

    Args:
        maps: (M, groups, C, *map) with n spatial dimensions, possibly none.
        reach: the largest offset along each dimension.
        dilation: the spacing of offsets along each dimension.

    Returns:
        (*(2 reach + 1), groups, C, C), offset e at index reach + e; C(-e) equals C(e)ᵀ exactly.
    """
    groups, channels, *size = maps.shape[1:]
    if not size:
        examples = maps.transpose(0, 1)
        return gram(examples)
    periods = _periods(size, reach, dilation)
    axes = tuple(zip(periods, reach, dilation, strict=True))
    dense = _dense_dimensions(periods, reach)
    inverse = _inverse_transform(axes[:dense], True, maps.dtype, maps.device)
    columns, matrices = prod(periods[1:dense]), groups * channels**2
    half = maps.new_zeros(inverse.shape[1], prod(2 * r + 1 for r in reach[dense:]) * matrices)
    # A few frequencies of the first dimension at a time, to bound the memory of their products.
    block = max(1, BLOCK_ELEMENTS // (2 * prod(periods[1:]) * matrices))
    count = periods[0] // 2 + 1
    for start in range(0, count, block):
        rows = slice(start, min(start + block, count))
        cross = _invert_axes(_cross_spectrum(maps, periods, rows), axes[dense:], matrices)
        for matrix, part in zip(inverse, cross, strict=True):
            used = matrix[:, rows.start * columns : rows.stop * columns]
            half.addmm_(used, part.reshape(-1, half.shape[1]))
    return _with_mirror_image(half.reshape(-1, groups, channels, channels), reach)


def autocorrelation_cost(
    examples: int, channels: int, size: Sequence[int], reach: Sequence[int], dilation: Sequence[int]
) -> float:
    """Estimate the multiply-adds of ``autocorrelation`` per group; infinite for maps too long."""
    if not size:
        return examples * channels**2
    if max(size) > LONGEST:
        return inf
    periods = _periods(size, reach, dilation)
    frequencies = _frequencies(periods)
    # The inverse transform and about seven passes over the cross spectra, whatever the batch size.
    fixed = (2.0 * prod(_half_offsets(reach)) + 7 * PASS) * frequencies * channels**2
    cost = 2.0 * frequencies * channels**2
    done, left = 1, prod(size)
    for axis, (length, period) in enumerate(zip(size, periods, strict=True)):
        left //= length
        count = period // 2 + 1 if axis == 0 else period
        cost += channels * done * (2 * count) * (length if axis == 0 else 2 * length) * left
        done *= count
    return examples * cost + fixed


def _cross_spectrum(maps: Tensor, periods: Sequence[int], rows: slice) -> tuple[Tensor, Tensor]:
    """Return twice the real and twice the imaginary part of Σ over examples of conj(A) Aᵀ.

    Each is (frequencies · groups, C, C). A = X + iY is the spectrum at the frequencies ``rows`` of
    the first dimension and all of the others. The real part XᵀX + YᵀY is symmetric, the imaginary
    part XᵀY - YᵀX antisymmetric, so both follow from their sum (X - Y)ᵀX + (X + Y)ᵀY: two real
    products instead of four.
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


def _spectrum(maps: Tensor, periods: Sequence[int], rows: slice) -> Tensor:
    """Return the spectrum of maps (M, groups, C, *map) at the frequencies of ``_cross_spectrum``.

    Its shape is (frequencies · groups, 2 M, C), real parts before imaginary parts.
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


# Cached tensors must be usable outside of inference mode, wherever they are first needed.
@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _transform(
    length: int, period: int, first: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the Fourier transform along one dimension, with real and imaginary rows alternating.

    The first one maps real values to half the frequencies, (2 (period // 2 + 1), length); a later
    one maps real and imaginary values to all frequencies, (2 period, 2 length).
    """
    count = period // 2 + 1 if first else period
    angles = _angles(torch.arange(count), torch.arange(length), period)
    cos, sin = angles.cos(), angles.sin()
    if first:
        real, imaginary = cos, -sin
    else:
        real, imaginary = torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)
    return torch.stack([real, imaginary], dim=1).flatten(0, 1).to(device, dtype)


def _dense_dimensions(periods: Sequence[int], reach: Sequence[int]) -> int:
    """Return how many leading dimensions to invert with one matrix, and not one by one.

    For large maps, above all those with three dimensions, one matrix for all of them would take far
    more memory than the maps.
    """
    for dims in range(len(periods), 1, -1):
        entries = 2 * prod(_half_offsets(reach[:dims])) * _frequencies(periods[:dims])
        if entries <= INVERSE_ELEMENTS:
            return dims
    return 1


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _inverse_transform(
    axes: tuple[tuple[int, int, int], ...], halved: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the matrices that turn the real and the imaginary part of spectra into offsets.

    Args:
        axes: (period, reach, dilation) of each dimension.
        halved: whether the first dimension has half the frequencies and needs only e >= 0.

    Returns:
        (2, offsets, frequencies), cosines before negative sines.
    """
    dims = len(axes)
    angles = torch.zeros([1] * 2 * dims, dtype=torch.float64)
    for axis, (period, reach, dilation) in enumerate(axes):
        half = halved and axis == 0
        offsets = torch.arange(0 if half else -reach, reach + 1) * dilation
        frequencies = torch.arange(period // 2 + 1 if half else period)
        shape = [1] * 2 * dims
        shape[axis], shape[dims + axis] = len(offsets), len(frequencies)
        angles = angles + _angles(offsets, frequencies, period).reshape(shape)
    weights = torch.ones(angles.shape[dims], dtype=torch.float64)
    if halved:
        # A frequency also stands for its conjugate, unless it is its own. The factor of two is left
        # out, because the cross spectra are doubled already.
        weights[0] = 0.5
        if axes[0][0] % 2 == 0:
            weights[-1] = 0.5
    weights = weights.reshape(-1, *[1] * (dims - 1)) / prod(period for period, *_ in axes)
    parts = torch.stack([weights * angles.cos(), -weights * angles.sin()])
    return parts.flatten(1 + dims).flatten(1, dims).to(device, dtype)


def _invert_axes(
    parts: tuple[Tensor, Tensor], axes: Sequence[tuple[int, int, int]], width: int
) -> tuple[Tensor, Tensor]:
    """Invert the last dimensions of two parts (..., *periods, width), last dimension first."""
    real, imaginary = parts
    for axis in reversed(axes):
        cos, minus_sin = _inverse_transform((axis,), False, real.dtype, real.device)
        real, imaginary = (x.reshape(-1, axis[0], width) for x in (real, imaginary))
        real, imaginary = (
            cos @ real + minus_sin @ imaginary,
            cos @ imaginary - minus_sin @ real,
        )
        width *= len(cos)
    return real, imaginary


def _angles(first: Tensor, second: Tensor, period: int) -> Tensor:
    """Return 2π first·second / period, reduced modulo 2π in integers, before any rounding."""
    return torch.outer(first, second).remainder(period).double() * (2 * pi / period)


def _periods(size: Sequence[int], reach: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Return periods long enough that no offset within reach wraps around."""
    return tuple(s + r * d for s, r, d in zip(size, reach, dilation, strict=True))


def _frequencies(periods: Sequence[int]) -> int:
    """Count the frequencies: half of the first dimension's suffice, because maps are real."""
    return (periods[0] // 2 + 1) * prod(periods[1:])


def _half_offsets(reach: Sequence[int]) -> tuple[int, ...]:
    """Return the number of offsets per dimension, with only e >= 0 along the first."""
    return (reach[0] + 1, *(2 * r + 1 for r in reach[1:]))


def _with_mirror_image(half: Tensor, reach: Sequence[int]) -> Tensor:
    """Return all offsets, (*(2 reach + 1), groups, C, C), by C(-e) = C(e)ᵀ.

    ``half`` has those with e >= 0 along the first dimension, (offsets, groups, C, C).
    """
    full = [2 * r + 1 for r in reach]
    zero, ahead = half[prod(full[1:]) // 2 :].split([1, prod(full) // 2])
    whole = torch.cat([ahead.flip(0).mT, mirrored(zero), ahead])
    return whole.reshape(*full, *half.shape[1:])


def gram(rows: Tensor) -> Tensor:
    """Return rowsᵀ rows, (groups, n, n), of rows (groups, R, n), exactly symmetric.

    If n is large, only blocks on and above the diagonal are computed.
    """
    size = rows.shape[-1]
    if size <= GRAM_BLOCK:
        return mirrored(rows.mT @ rows)
    result = rows.new_empty(len(rows), size, size)
    for start in range(0, size, GRAM_BLOCK):
        own, after = slice(start, start + GRAM_BLOCK), slice(start + GRAM_BLOCK, None)
        panel = rows[..., own].mT @ rows[..., start:]
        block, rest = panel.tensor_split([GRAM_BLOCK], dim=-1)
        result[:, own, own] = mirrored(block)
        result[:, own, after] = rest
        result[:, after, own] = rest.mT
    return result


def mirrored(matrix: Tensor) -> Tensor:
    """Return an exactly symmetric matrix: the upper triangle copied to the lower one."""
    return matrix.triu() + matrix.triu(1).mT
