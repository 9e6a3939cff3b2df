"""Which of the paper's assumptions hold for a layer, and how well (sections 3, 4.2 and 5.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
    products_by_offset,
)
from kfc.analysis.recording import CHUNK_ELEMENTS, LayerRecord
from kfc.checks import require_whole, widest

# A convention, to be read with the numbers: below the first an assumption "holds", below the
# second "roughly", else it "fails".
THRESHOLDS = (0.1, 0.3)
DEFAULT_RESAMPLES = 200
# Pairs of maps are kept for every example and resample.
MOST_MAPS = 256


@dataclass(frozen=True)
class Estimate:
    """A number, and an interval that holds the truth in about 95 of 100 batches (bootstrap)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Assumption:
    """How far one assumption is from true; every measure is 0 if it is exactly true.

    Attributes:
        name: IAD, SH, SUD, SUA or WD.
        measures: by what they are; the first one decides the verdict.
    """

    name: str
    measures: Mapping[str, Estimate]

    @property
    def deciding(self) -> Estimate:
        return next(iter(self.measures.values()))

    @property
    def verdict(self) -> str:
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
    """Test all for which there is something to compare: locations, or maps.

    Args:
        record: of sampled or enumerated targets, for two examples at least.
        reach: how far apart locations are looked at, in pixels along each axis.
        resamples: how many batches to draw from the examples, with replacement.
        seed: of these.
    """
    require_whole("resamples", resamples)
    if record.examples < 2:
        raise ValueError("a single example says nothing about a distribution; give two at least")
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
    """Statistics of batches that are drawn from the examples, with replacement."""

    def __init__(self, resamples: int, seed: int) -> None:
        self.resamples = resamples
        self.seed = seed

    def weights(self, examples: int) -> Tensor:
        """(1 + resamples, examples): how often each is drawn; the first row is the batch itself."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(examples, (self.resamples, examples), generator=generator)
        counts = torch.zeros(self.resamples, examples)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        return torch.cat([torch.ones(1, examples), counts])

    def squared_means(self, per_example: Tensor) -> Tensor:
        """(1 + resamples, ...): the mean over each batch of products of two distinct examples."""
        flat = per_example.flatten(1)
        weights = self.weights(len(flat)).to(flat)
        pairs = weights.sum(1, keepdim=True).square() - weights.square().sum(1, keepdim=True)
        products = (weights @ flat).square() - weights.square() @ flat.square()
        # A resample of two examples may have drawn one of them only.
        return (products / pairs.clamp(min=1)).reshape(len(weights), *per_example.shape[1:])

    def maps_at_a_time(self, elements_per_map: int) -> int:
        """So many maps' statistics, of all resamples, are of a moderate size."""
        return max(1, CHUNK_ELEMENTS // ((1 + self.resamples) * elements_per_map))

    def means(self, per_example: Tensor) -> Tensor:
        """(1 + resamples, ...): the mean over each batch of what is given for each example."""
        examples = per_example.shape[0]
        weights = self.weights(examples).to(per_example) / examples
        means = weights @ per_example.flatten(1)
        return means.reshape(len(weights), *per_example.shape[1:])


def estimate(values: Tensor, *, least: float = 0.0, most: float = math.inf) -> Estimate:
    """From the batch's own value, then those of its resamples.

    Magnitudes of small correlations come out too large, for chance adds to them. By how much shows
    when batches are drawn from the batch: that bias is taken off, of the value once, of the
    resamples twice.

    Args:
        least, most: the range of possible values.
    """
    bias = values[1:].mean() - values[0]
    quantiles = torch.quantile(values[1:], values.new_tensor([0.025, 0.975]))
    three = torch.stack([values[0] - bias, *(quantiles - 2 * bias)]).clamp(least, most)
    return Estimate(*three.tolist())


def spatial_correlation(maps: Maps, reach: int, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """SUD and SUA: mean magnitude of the correlation between distinct locations of a map."""
    middle = offset_reach(maps.size, reach)
    distance = _distances(middle)
    near, all_of_them = [], []
    for some in maps.a_few_at_a_time(bootstrap.maps_at_a_time(len(distance))):
        products = bootstrap.means(products_by_offset(some, reach))
        live = (at_location(products[0], middle) > 0).nonzero().flatten()
        correlation = correlations_by_offset(products[:, live], maps.size, reach).abs().flatten(2)
        near.append(correlation[..., distance.to(live.device) == 1].mean(2))
        all_of_them.append(correlation[..., distance.to(live.device) > 0].mean(2))
    return {
        "neighbouring locations": estimate(torch.cat(near, dim=1).mean(1), most=1.0),
        f"locations up to {max(middle)} apart": estimate(
            torch.cat(all_of_them, dim=1).mean(1), most=1.0
        ),
    }


def _distances(reach: tuple[int, ...]) -> Tensor:
    """(offsets,): the sum of steps along each axis."""
    total = torch.zeros((), dtype=torch.long)
    for limit in reach:
        total = total.unsqueeze(-1) + torch.arange(-limit, limit + 1).abs()
    return total.flatten()


def homogeneity(maps: Mapping[str, Maps], bootstrap: Bootstrap) -> Assumption:
    """SH: how second moments differ between the locations of a map, relative to their mean."""
    spreads = {name: location_spread(some, bootstrap) for name, some in maps.items()}
    worst = sorted(spreads.items(), key=lambda item: -item[1].value)
    return Assumption("SH", {f"second moments of {name}": spread for name, spread in worst})


def location_spread(maps: Maps, bootstrap: Bootstrap) -> Estimate:
    """The standard deviation of E[x(t)²] over locations t, relative to its mean over them.

    Root mean square over maps. Squares of expectations are means of products of two distinct
    examples, which chance makes neither larger nor smaller.
    """
    variances = []
    for some in maps.a_few_at_a_time(bootstrap.maps_at_a_time(maps.locations)):
        squares = torch.cat([values.square().sum(0).flatten(2) for _, values in some.chunks()])
        squares = squares[:, (squares.sum((0, 2)) > 0).nonzero().flatten()]
        means = squares.mean(-1, keepdim=True)
        variance = bootstrap.squared_means(squares - means).mean(-1)
        square = bootstrap.squared_means(means).squeeze(-1)
        # Resamples may have drawn hardly an example on which a map is alive.
        variances.append(torch.where(square > 0, variance / torch.where(square > 0, square, 1), 0))
    # Over all maps before the root: of each on its own, chance below zero would be lost.
    return estimate(torch.cat(variances, dim=1).mean(1).clamp(min=0).sqrt())


def whiteness(derivatives: Maps, bootstrap: Bootstrap) -> Assumption:
    """WD: derivatives of distinct maps uncorrelated, and all of one variance.

    Of layers with many maps or units some are looked at, evenly chosen.
    """
    moments = bootstrap.means(cross_map_moments(derivatives.at_most(MOST_MAPS)))
    live = (moments[0].diagonal() > 0).nonzero().flatten()
    moments = moments[:, live][:, :, live]
    size = moments.shape[-1]
    correlation = correlation_matrix(moments).abs()
    pairs = size * (size - 1)
    own = correlation.diagonal(dim1=-2, dim2=-1).sum(-1)
    off_diagonal = (correlation.sum((1, 2)) - own) / (pairs or math.nan)
    variances = moments.diagonal(dim1=-2, dim2=-1)
    mean = variances.mean(-1)
    spread = (variances - mean.unsqueeze(-1)).square().mean(-1).sqrt() / mean
    return Assumption(
        "WD",
        {
            "correlation of distinct maps": estimate(off_diagonal, most=1.0),
            "spread of the maps' variances": estimate(spread),
        },
    )


def independence(record: LayerRecord, bootstrap: Bootstrap) -> Assumption:
    """IAD: how the squares of activations and derivatives at a location vary together.

    The correlation over examples of ‖a_t‖² with E‖Ds_t‖², pooled over locations t; and that of
    their sums over the locations.
    """
    activation, derivative = [], []
    for _, activations, derivatives in record.row_chunks():
        wide = widest(activations.device)
        activation.append(activations.to(wide).square().sum((1, 3)))
        derivative.append(derivatives.to(wide).square().sum((0, 2, 4)))
    first, second = torch.cat(activation), torch.cat(derivative)  # (examples, |T|)
    measures: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "energies of a location": lambda a, b: _pooled_correlation(a, b, bootstrap),
        "energies of an example": lambda a, b: _pooled_correlation(
            a.sum(1, keepdim=True), b.sum(1, keepdim=True), bootstrap
        ),
    }
    return Assumption(
        "IAD",
        {
            name: estimate(measure(first, second), least=-1.0, most=1.0)
            for name, measure in measures.items()
        },
    )


def _pooled_correlation(first: Tensor, second: Tensor, bootstrap: Bootstrap) -> Tensor:
    """(1 + resamples,): of two quantities (examples, locations), each with its location's mean."""
    parts = torch.stack([first, second, first * second, first.square(), second.square()], dim=1)
    means = bootstrap.means(parts)  # (1 + resamples, 5, locations)
    one, two, both, square_one, square_two = means.unbind(1)
    covariance = (both - one * two).sum(-1)
    variances = (square_one - one.square()).sum(-1), (square_two - two.square()).sum(-1)
    scale = (variances[0].clamp(min=0) * variances[1].clamp(min=0)).sqrt()
    return torch.where(scale > 0, covariance / torch.where(scale > 0, scale, 1), 0)
