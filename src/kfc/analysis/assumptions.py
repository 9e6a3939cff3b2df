"""Test the assumptions of the paper on a recorded layer (sections 3, 4.2 and 5.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kfc._helpers import require_whole, widest
from kfc.analysis.correlations import (
    DEFAULT_REACH,
    Maps,
    activation_maps,
    at_location,
    correlation_matrix,
    correlations_by_offset,
    cross_map_moments,
    derivative_maps,
    offset_reach,
    offset_steps,
    products_by_offset,
    ratio_or_zero,
)
from kfc.analysis.recording import CHUNK_ELEMENTS, LayerRecord

# By convention, an assumption "holds" below the first number, "roughly" below the second, and
# otherwise "fails".
THRESHOLDS = (0.1, 0.3)
DEFAULT_RESAMPLES = 200
# The largest number of maps whose pairs are kept, for every example and resample.
MOST_MAPS = 256


@dataclass(frozen=True)
class Estimate:
    """A number, and an interval that contains the true value for about 95% of batches."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Assumption:
    """The deviation of a layer from one assumption.

    Attributes:
        name: IAD, SH, SUD, SUA or WD.
        measures: numbers, by description, that are 0 if the assumption is exactly true. The first
            one decides the verdict.
    """

    name: str
    measures: Mapping[str, Estimate]

    @property
    def deciding(self) -> Estimate:
        """The measure that decides the verdict."""
        return next(iter(self.measures.values()))

    @property
    def verdict(self) -> str:
        """One of ``"holds"``, ``"roughly"``, ``"fails"`` and ``"unknown"`` (no estimate)."""
        size = abs(self.deciding.value)
        if math.isnan(size):
            return "unknown"
        return ("holds", "roughly", "fails")[sum(size >= limit for limit in THRESHOLDS)]


def assumptions(
    record: LayerRecord,
    *,
    reach: int = DEFAULT_REACH,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> dict[str, Assumption]:
    """Test every assumption for which the layer has enough locations or maps, by name.

    Args:
        record: a record of at least two examples, with sampled or enumerated targets.
        reach: the largest distance between locations, in pixels along each axis.
        resamples: the number of batches to draw from the examples, with replacement.
        seed: the seed of these draws.
    """
    require_whole("resamples", resamples)
    if record.examples < 2:
        raise ValueError("the record must have at least two examples, got one")
    bootstrap = Bootstrap(resamples, seed)
    derivatives, activations = derivative_maps(record), activation_maps(record)
    found = {"IAD": independence(record, bootstrap)}
    spatial = {"derivatives": derivatives, "activations": activations}
    spatial = {name: maps for name, maps in spatial.items() if maps.locations > 1}
    if spatial:
        found["SH"] = homogeneity(spatial, bootstrap)
    if "derivatives" in spatial:
        found["SUD"] = Assumption("SUD", spatial_correlation(derivatives, reach, bootstrap))
    if "activations" in spatial:
        centred = activations.centred()
        found["SUA"] = Assumption("SUA", spatial_correlation(centred, reach, bootstrap))
    if derivatives.maps > 1:
        found["WD"] = whiteness(derivatives, bootstrap)
    return found


class Bootstrap:
    """Statistics of batches that are drawn from the examples, with replacement.

    Every result has 1 + ``resamples`` rows; the first one is that of the batch itself.
    """

    def __init__(self, resamples: int, seed: int) -> None:
        self.resamples = resamples
        self.seed = seed

    def weights(self, examples: int) -> Tensor:
        """Return how often each example was drawn, (1 + resamples, examples)."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(examples, (self.resamples, examples), generator=generator)
        counts = torch.zeros(self.resamples, examples)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        return torch.cat([torch.ones(1, examples), counts])

    def means(self, per_example: Tensor) -> Tensor:
        """Return the mean over each batch, (1 + resamples, ...)."""
        weights = self.weights(len(per_example)).to(per_example) / len(per_example)
        means: Tensor = torch.tensordot(weights, per_example, dims=1)
        return means

    def squared_means(self, per_example: Tensor) -> Tensor:
        """Return the mean of products of two distinct examples, (1 + resamples, ...)."""
        flat = per_example.flatten(1)
        weights = self.weights(len(flat)).to(flat)
        pairs = weights.sum(1, keepdim=True).square() - weights.square().sum(1, keepdim=True)
        products = (weights @ flat).square() - weights.square() @ flat.square()
        # A batch of two may consist of one example, drawn twice.
        return (products / pairs.clamp(min=1)).reshape(len(weights), *per_example.shape[1:])

    def split(self, maps: Maps, elements_per_map: int) -> Iterator[Maps]:
        """Yield a few maps at a time, to bound the memory of their statistics."""
        return maps.split(max(1, CHUNK_ELEMENTS // ((1 + self.resamples) * elements_per_map)))


def estimate(values: Tensor, *, least: float = 0.0, most: float = math.inf) -> Estimate:
    """Return an estimate from the value of the batch, followed by those of its resamples.

    Chance increases the magnitudes of small correlations. This bias is estimated from the
    resamples, and subtracted once from the value and twice from the resamples. The results are
    clamped to the possible values, from ``least`` to ``most``.
    """
    bias = values[1:].mean() - values[0]
    quantiles = torch.quantile(values[1:], values.new_tensor([0.025, 0.975]))
    three = torch.stack([values[0] - bias, *(quantiles - 2 * bias)]).clamp(least, most)
    return Estimate(*three.tolist())


def spatial_correlation(maps: Maps, reach: int, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Measure SUD or SUA: the mean magnitude of correlations between locations of a map."""
    middle = offset_reach(maps.size, reach)
    distance = offset_steps(middle).sum(0).flatten()
    found = []
    for some in bootstrap.split(maps, len(distance)):
        products = bootstrap.means(products_by_offset(some, reach))
        live = (at_location(products[0], middle) > 0).nonzero().flatten()
        size = correlations_by_offset(products[:, live], maps.size, reach).abs().flatten(2)
        chosen = (distance == 1, distance > 0)
        found.append(torch.stack([size[..., c.to(size.device)].mean(2) for c in chosen]))
    near, within_reach = torch.cat(found, dim=2).mean(2)
    return {
        "neighbouring locations": estimate(near, most=1.0),
        f"locations up to {max(middle)} apart": estimate(within_reach, most=1.0),
    }


def homogeneity(maps: Mapping[str, Maps], bootstrap: Bootstrap) -> Assumption:
    """Measure SH: the spread of second moments over locations; the larger one comes first."""
    spreads = {name: location_spread(some, bootstrap) for name, some in maps.items()}
    worst = sorted(spreads.items(), key=lambda item: -item[1].value)
    return Assumption("SH", {f"second moments of {name}": spread for name, spread in worst})


def location_spread(maps: Maps, bootstrap: Bootstrap) -> Estimate:
    """Return the standard deviation of E[x(t)²] over locations t, relative to its mean.

    This is the root mean square over maps. Squares of expectations are estimated without bias, as
    means of products of two distinct examples.
    """
    found = []
    for some in bootstrap.split(maps, maps.locations):
        squares = torch.cat([values.square().sum(0).flatten(2) for values in some.chunks()])
        squares = squares[:, (squares.sum((0, 2)) > 0).nonzero().flatten()]
        means = squares.mean(-1, keepdim=True)
        variance = bootstrap.squared_means(squares - means).mean(-1)
        # A resample may contain no example with values other than zero.
        found.append(ratio_or_zero(variance, bootstrap.squared_means(means).squeeze(-1)))
    # The mean over maps comes before the root, since the estimate for a single map may be negative.
    return estimate(torch.cat(found, dim=1).mean(1).clamp(min=0).sqrt())


def whiteness(derivatives: Maps, bootstrap: Bootstrap) -> Assumption:
    """Measure WD: the correlations between maps, and the spread of their variances.

    If there are more than ``MOST_MAPS`` maps, an even selection is used.
    """
    step = math.ceil(derivatives.maps / MOST_MAPS)
    some = Maps(derivatives.values[:, :, ::step])
    moments = bootstrap.means(cross_map_moments(some))
    live = (moments[0].diagonal() > 0).nonzero().flatten()
    moments = moments[:, live][:, :, live]
    pairs = len(live) * (len(live) - 1)
    correlation = correlation_matrix(moments).abs()
    own = correlation.diagonal(dim1=-2, dim2=-1).sum(-1)
    off_diagonal = (correlation.sum((1, 2)) - own) / (pairs or math.nan)
    variances = moments.diagonal(dim1=-2, dim2=-1)
    mean = variances.mean(-1)
    spread = (variances - mean.unsqueeze(-1)).square().mean(-1).sqrt() / mean
    measures = {
        "correlation of distinct maps": estimate(off_diagonal, most=1.0),
        "spread of the maps' variances": estimate(spread),
    }
    return Assumption("WD", measures)


def independence(record: LayerRecord, bootstrap: Bootstrap) -> Assumption:
    """Measure IAD: the correlation over examples of ‖a_t‖² and E‖Ds_t‖².

    One measure is pooled over locations t, the other is that of sums over locations.
    """
    parts = []
    for _, activations, derivatives in record.row_chunks():
        wide = widest(activations.device)
        activation = activations.to(wide).square().sum((1, 3))
        derivative = derivatives.to(wide).square().sum((0, 2, 4))
        parts.append(torch.stack([activation, derivative]))
    energies = torch.cat(parts, dim=1)  # (2, examples, |T|)
    both = {
        "energies of a location": energies,
        "energies of an example": energies.sum(2, keepdim=True),
    }
    measures = {
        name: estimate(_pooled_correlation(pair[0], pair[1], bootstrap), least=-1.0, most=1.0)
        for name, pair in both.items()
    }
    return Assumption("IAD", measures)


def _pooled_correlation(first: Tensor, second: Tensor, bootstrap: Bootstrap) -> Tensor:
    """Return the correlation, (1 + resamples,), of two quantities (examples, locations).

    Covariances are those within locations, summed over locations.
    """
    parts = torch.stack([first, second, first * second, first.square(), second.square()], dim=1)
    one, two, both, square_one, square_two = bootstrap.means(parts).unbind(1)
    covariance = (both - one * two).sum(-1)
    variances = (square_one - one.square()).sum(-1), (square_two - two.square()).sum(-1)
    scale = (variances[0].clamp(min=0) * variances[1].clamp(min=0)).sqrt()
    return ratio_or_zero(covariance, scale)
