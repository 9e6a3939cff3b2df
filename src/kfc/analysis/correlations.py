"""Correlations over space and across maps: figures 1 and 2 of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kfc.analysis.recording import LayerRecord
from kfc.checks import require_whole, widest
from kfc.layers import ConvolutionHandler

DEFAULT_REACH = 7


class Maps:
    """Values on maps, (draws, examples, maps, *T), a few examples at a time.

    Sums over draws are expectations. Frames folded into the batch are draws of their example, and
    of several calls of a layer the first is taken.
    """

    def __init__(self, values: Tensor, centre: Tensor | None = None) -> None:
        self._values = values
        self._centre = centre
        self.examples = values.shape[1]
        self.maps = values.shape[2]
        self.size: tuple[int, ...] = tuple(values.shape[3:])

    @property
    def locations(self) -> int:
        return prod(self.size)

    def centred(self) -> Maps:
        """Less each map's mean over draws, examples and locations."""
        dims = (0, 1, *range(3, self._values.dim()))
        mean = self._values.mean(dims, dtype=widest(self._values.device))
        return Maps(self._values, mean.reshape(-1, *(1,) * len(self.size)))

    def at_most(self, count: int) -> Maps:
        """All maps, or evenly chosen ones."""
        step = max(1, -(-self.maps // count))
        return self._some(slice(None, None, step))

    def a_few_at_a_time(self, count: int) -> Iterator[Maps]:
        """All maps, at most so many together."""
        for start in range(0, self.maps, count):
            yield self._some(slice(start, start + count))

    def _some(self, part: slice) -> Maps:
        centre = None if self._centre is None else self._centre[part]
        return Maps(self._values[:, :, part], centre)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """(part, values in the widest precision)"""
        elements = self._values[:, 0].numel() * 4
        step = max(1, (1 << 25) // max(1, elements))
        for start in range(0, self.examples, step):
            part = slice(start, min(start + step, self.examples))
            values = self._values[:, part].to(widest(self._values.device))
            yield part, values if self._centre is None else values - self._centre


def activation_maps(record: LayerRecord) -> Maps:
    """The layer's inputs, (frames, examples, J, *T)."""
    return Maps(_as_maps(record, record.calls[0].inputs))


def derivative_maps(record: LayerRecord) -> Maps:
    """Derivatives in the layer's pre-activations, (draws · frames, examples, I, *T)."""
    return Maps(torch.cat([_as_maps(record, d) for d in record.calls[0].derivatives]))


def _as_maps(record: LayerRecord, values: Tensor) -> Tensor:
    """(examples · frames, ...) -> (frames, examples, maps, *T)"""
    by_example: Tensor = values.unflatten(0, (record.examples, -1)).transpose(0, 1)
    if isinstance(record.handler, ConvolutionHandler):
        return by_example
    return by_example.movedim(-1, 2)  # what lies between the batch and the units are locations


def is_spatial(record: LayerRecord) -> bool:
    """Whether the layer's inputs or outputs have more than one location."""
    return max(activation_maps(record).locations, derivative_maps(record).locations) > 1


def offset_reach(size: Sequence[int], reach: int) -> tuple[int, ...]:
    return tuple(min(reach, length - 1) for length in size)


def products_by_offset(maps: Maps, reach: int) -> Tensor:
    """(examples, maps, *offsets): Σ over draws and locations u of x(u) x(u + δ), |δ| ≤ reach."""
    require_whole("reach", reach, low=0)
    limits = offset_reach(maps.size, reach)
    dims = tuple(range(-len(maps.size), 0))
    padded = [length + limit for length, limit in zip(maps.size, limits, strict=True)]
    found = []
    for _, values in maps.chunks():
        spectra = torch.fft.rfftn(values, s=padded, dim=dims).abs().square().sum(0)
        products = torch.fft.irfftn(spectra, s=padded, dim=dims)
        for dim, limit in zip(dims, limits, strict=True):
            products = products.roll(limit, dim).narrow(dim, 0, 2 * limit + 1)
        found.append(products)
    return torch.cat(found)


def pairs_by_offset(size: Sequence[int], reach: int) -> Tensor:
    """(*offsets): how many pairs of locations lie at each offset."""
    counts = torch.ones(())
    for length, limit in zip(size, offset_reach(size, reach), strict=True):
        along = length - torch.arange(-limit, limit + 1.0).abs()
        counts = counts.unsqueeze(-1) * along
    return counts


def correlations_by_offset(products: Tensor, size: Sequence[int], reach: int) -> Tensor:
    """From sums of products (..., maps, *offsets), their correlations; 0 for maps of zeros."""
    pairs = pairs_by_offset(size, reach).to(products)
    means = products / pairs
    variances = at_location(means, offset_reach(size, reach)).reshape(
        *means.shape[: -len(size)], *(1,) * len(size)
    )
    return torch.where(variances > 0, means / torch.where(variances > 0, variances, 1), 0)


def at_location(values: Tensor, location: Sequence[int]) -> Tensor:
    """(..., *T) -> (...)"""
    for index in reversed(location):
        values = values.select(-1, index)
    return values


def autocorrelation(maps: Maps, reach: int = DEFAULT_REACH) -> Tensor:
    """(maps, *offsets): the correlation of each map with itself, moved by each offset."""
    return correlations_by_offset(products_by_offset(maps, reach).sum(0), maps.size, reach)


def cross_map_moments(maps: Maps) -> Tensor:
    """(examples, maps, maps): Σ over draws and locations of x_i x_j."""
    found = []
    for _, values in maps.chunks():
        by_map = values.flatten(3) if maps.size else values.unsqueeze(-1)
        by_map = by_map.permute(1, 2, 0, 3).flatten(2)
        found.append(by_map @ by_map.mT)
    return torch.cat(found)


def cross_map_moment_at(maps: Maps, location: Sequence[int]) -> Tensor:
    """(maps, maps): Σ over draws and examples of x_i x_j at one location."""
    parts = []
    for _, values in maps.chunks():
        by_map = at_location(values, location).flatten(0, 1)
        parts.append(by_map.mT @ by_map)
    return torch.stack(parts).sum(0)


def correlation_matrix(moments: Tensor) -> Tensor:
    """Second moments (..., maps, maps) as correlations; 0 for maps of zeros."""
    scale = moments.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    both = scale.unsqueeze(-1) * scale.unsqueeze(-2)
    return torch.where(both > 0, moments / torch.where(both > 0, both, 1), 0)


@dataclass(frozen=True)
class Correlations:
    """What figures 1 and 2 show of one layer.

    Attributes:
        derivative_offsets: (I, *offsets), autocorrelation of each derivative map; ``None`` if the
            maps have a single location.
        activation_offsets: (J, *offsets), likewise of activations, uncentred as in the paper.
        derivative_maps: (I, I), correlations between derivative maps at the middle location.
        activation_maps: (J, J), likewise of activations.
    """

    derivative_offsets: Tensor | None
    activation_offsets: Tensor | None
    derivative_maps: Tensor
    activation_maps: Tensor


def correlations(record: LayerRecord, reach: int = DEFAULT_REACH) -> Correlations:
    """Autocorrelations over space, and correlations between maps at the middle location."""
    both = derivative_maps(record), activation_maps(record)
    offsets = [autocorrelation(maps, reach) if maps.locations > 1 else None for maps in both]
    across = []
    for maps in both:
        middle = [length // 2 for length in maps.size]
        across.append(correlation_matrix(cross_map_moment_at(maps, middle)))
    return Correlations(offsets[0], offsets[1], across[0], across[1])
