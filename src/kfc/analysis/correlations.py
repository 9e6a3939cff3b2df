"""Correlations over space and between maps, as in figures 1 and 2 of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kfc._helpers import require_whole, widest
from kfc.analysis.recording import CHUNK_ELEMENTS, LayerRecord
from kfc.layers import ConvolutionLayer

DEFAULT_REACH = 7


class Maps:
    """Values on maps, (draws, examples, maps, *T).

    Sums over draws are expectations. Frames folded into the batch count as draws of their example.
    Only the first of several calls of a layer is used.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.maps = values.shape[2]
        self.size: tuple[int, ...] = tuple(values.shape[3:])

    @property
    def locations(self) -> int:
        return prod(self.size)

    def chunks(self) -> Iterator[Tensor]:
        """Yield the values of a few examples at a time, in the widest precision."""
        # In double precision, padded, with spectra of complex numbers
        step = max(1, CHUNK_ELEMENTS // max(1, self.values[:, 0].numel() * 16))
        return (part.to(widest(part.device)) for part in self.values.split(step, dim=1))


def activation_maps(record: LayerRecord) -> Maps:
    """Return the layer's inputs, (frames, examples, J, *T)."""
    return Maps(_as_maps(record, record.calls[0].inputs))


def derivative_maps(record: LayerRecord) -> Maps:
    """Return the derivatives at the pre-activations, (draws · frames, examples, I, *T)."""
    return Maps(torch.cat([_as_maps(record, d) for d in record.calls[0].derivatives]))


def _as_maps(record: LayerRecord, values: Tensor) -> Tensor:
    """Return (examples · frames, ...) as (frames, examples, maps, *T)."""
    by_example: Tensor = values.unflatten(0, (record.examples, -1)).transpose(0, 1)
    if isinstance(record.layer, ConvolutionLayer):
        return by_example
    return by_example.movedim(-1, 2)  # the dimensions between batch and units are locations


def is_spatial(record: LayerRecord) -> bool:
    """Return whether the layer's inputs or outputs have more than one location."""
    return max(activation_maps(record).locations, derivative_maps(record).locations) > 1


def offset_reach(size: Sequence[int], reach: int) -> tuple[int, ...]:
    """Return the largest offset along each axis: the reach, or less on smaller maps."""
    return tuple(min(reach, length - 1) for length in size)


def offset_steps(limits: Sequence[int]) -> Tensor:
    """Return the magnitude of every offset along each axis, (axes, *offsets)."""
    steps = [torch.arange(-limit, limit + 1).abs() for limit in limits]
    return torch.stack(torch.meshgrid(*steps, indexing="ij"))


def products_by_offset(maps: Maps, reach: int) -> Tensor:
    """Return Σ over draws, examples and locations u of x(u) x(u + δ), (maps, *offsets)."""
    require_whole("reach", reach, low=0)
    limits = offset_reach(maps.size, reach)
    dims = tuple(range(-len(maps.size), 0))
    padded = [length + limit for length, limit in zip(maps.size, limits, strict=True)]
    found = []
    for values in maps.chunks():
        spectra = torch.fft.rfftn(values, s=padded, dim=dims).abs().square().sum((0, 1))
        products = torch.fft.irfftn(spectra, s=padded, dim=dims)
        for dim, limit in zip(dims, limits, strict=True):
            products = products.roll(limit, dim).narrow(dim, 0, 2 * limit + 1)
        found.append(products)
    return torch.stack(found).sum(0)


def correlations_by_offset(products: Tensor, size: Sequence[int], reach: int) -> Tensor:
    """Return correlations from sums of products (..., maps, *offsets); 0 for maps of zeros."""
    limits = offset_reach(size, reach)
    lengths = torch.tensor(size).reshape(-1, *(1,) * len(size))
    pairs = (lengths - offset_steps(limits)).prod(0)
    means = products / pairs.to(products)
    variances = at_location(means, limits)
    return ratio_or_zero(means, variances.reshape(*variances.shape, *(1,) * len(size)))


def ratio_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, or 0 where the denominator is not positive."""
    known = denominator > 0
    return torch.where(known, numerator / torch.where(known, denominator, 1), 0)


def at_location(values: Tensor, location: Sequence[int]) -> Tensor:
    """Return the values (..., *T) at one location, (...)."""
    return values[(slice(None),) * (values.dim() - len(location)) + tuple(location)]


def autocorrelation(maps: Maps, reach: int = DEFAULT_REACH) -> Tensor:
    """Return the correlation of each map with itself at each offset, (maps, *offsets)."""
    return correlations_by_offset(products_by_offset(maps, reach), maps.size, reach)


def middle_moment(maps: Maps) -> Tensor:
    """Return Σ over draws and examples of x_i x_j at the middle location, (maps, maps)."""
    location = [length // 2 for length in maps.size]
    by_map = [at_location(values, location).flatten(0, 1) for values in maps.chunks()]
    return torch.stack([values.mT @ values for values in by_map]).sum(0)


def correlation_matrix(moments: Tensor) -> Tensor:
    """Return correlations from second moments (..., maps, maps); 0 for maps of zeros."""
    scale = moments.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    return ratio_or_zero(moments, scale.unsqueeze(-1) * scale.unsqueeze(-2))


@dataclass(frozen=True)
class Correlations:
    """Correlations of one layer, as in figures 1 and 2 of the paper.

    Attributes:
        derivative_offsets: the autocorrelation of each derivative map, (I, *offsets); ``None`` if
            the maps have a single location.
        activation_offsets: the same for activations, (J, *offsets), uncentred as in the paper.
        derivative_maps: correlations between derivative maps at the middle location, (I, I).
        activation_maps: the same for activations, (J, J).
    """

    derivative_offsets: Tensor | None
    activation_offsets: Tensor | None
    derivative_maps: Tensor
    activation_maps: Tensor


def correlations(record: LayerRecord, reach: int = DEFAULT_REACH) -> Correlations:
    """Return autocorrelations up to ``reach`` pixels, and correlations between maps."""
    both = derivative_maps(record), activation_maps(record)
    offsets = [autocorrelation(maps, reach) if maps.locations > 1 else None for maps in both]
    across = [correlation_matrix(middle_moment(maps)) for maps in both]
    return Correlations(offsets[0], offsets[1], across[0], across[1])
