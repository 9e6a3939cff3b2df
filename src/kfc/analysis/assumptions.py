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
    is_spatial,
    offset_reach,
    products_by_offset,
)
from kfc.analysis.recording import LayerRecord
from kfc.checks import require_whole

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
    """Test all that apply: SUD, SH and SUA need locations.

    Args:
        record: of sampled or enumerated targets.
        reach: how far apart locations are looked at, in pixels along each axis.
        resamples: how many batches to draw from the examples, with replacement.
        seed: of these.
    """
    require_whole("resamples", resamples)
    bootstrap = Bootstrap(resamples, seed)
    derivatives, activations = derivative_maps(record), activation_maps(record)
    found = {"IAD": independence(record, bootstrap)}
    if is_spatial(record):
        found["SH"] = homogeneity(activations, derivatives, bootstrap)
        found["SUD"] = Assumption("SUD", spatial_correlation(derivatives, reach, bootstrap))
        found["SUA"] = Assumption(
            "SUA", spatial_correlation(activations.centred(), reach, bootstrap)
        )
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
        counts = torch.zeros(self.resamples, examples, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        return torch.cat([torch.ones(1, examples, dtype=torch.float64), counts])

    def means(self, per_example: Tensor) -> Tensor:
        """(1 + resamples, ...): the mean over each batch of what is given for each example."""
        examples = per_example.shape[0]
        weights = self.weights(examples).to(per_example) / examples
        return (weights @ per_example.flatten(1)).reshape(-1, *per_example.shape[1:])


def estimate(values: Tensor, *, least: float = 0.0) -> Estimate:
    """From the batch's own value, then those of its resamples.

    Magnitudes of small correlations come out too large, for chance adds to them. By how much shows
    when batches are drawn from the batch: that bias is taken off, of the value once, of the
    resamples twice.

    Args:
        least: the smallest value that there can be.
    """
    bias = values[1:].mean() - values[0]
    quantiles = torch.quantile(values[1:], values.new_tensor([0.025, 0.975]))
    three = torch.stack([values[0] - bias, *(quantiles - 2 * bias)]).clamp(min=least)
    return Estimate(*three.tolist())


def spatial_correlation(maps: Maps, reach: int, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """SUD and SUA: mean magnitude of the correlation between distinct locations of a map."""
    products = bootstrap.means(products_by_offset(maps, reach))
    correlation = correlations_by_offset(products, maps.size, reach).abs()
    middle = offset_reach(maps.size, reach)
    distance = _distances(middle).to(correlation.device)
    flat = correlation.flatten(2)  # (1 + resamples, maps, offsets)
    live = (at_location(products[0], middle) > 0).nonzero().flatten()
    flat = flat[:, live]
    return {
        "neighbouring locations": estimate(flat[..., distance == 1].mean((1, 2))),
        f"locations up to {max(middle)} apart": estimate(flat[..., distance > 0].mean((1, 2))),
    }


def _distances(reach: tuple[int, ...]) -> Tensor:
    """(offsets,): the sum of steps along each axis."""
    total = torch.zeros((), dtype=torch.long)
    for limit in reach:
        total = total.unsqueeze(-1) + torch.arange(-limit, limit + 1).abs()
    return total.flatten()


def homogeneity(activations: Maps, derivatives: Maps, bootstrap: Bootstrap) -> Assumption:
    """SH: how second moments differ between the locations of a map, relative to their mean."""
    spreads = {
        "derivatives": location_spread(derivatives, bootstrap),
        "activations": location_spread(activations, bootstrap),
    }
    worst = sorted(spreads.items(), key=lambda item: -item[1].value)
    return Assumption("SH", {f"second moments of {name}": spread for name, spread in worst})


def location_spread(maps: Maps, bootstrap: Bootstrap) -> Estimate:
    """The standard deviation of E[x(t)²] over locations t, relative to its mean over them.

    Less what the batch's own randomness contributes, which is twice as much in a resample.
    """
    squares = torch.cat([values.square().sum(0).flatten(2) for _, values in maps.chunks()])
    means = bootstrap.means(squares)  # (1 + resamples, maps, locations)
    overall = means.mean(-1)
    live = (overall[0] > 0).nonzero().flatten()
    noise = (squares.var(0) / len(squares)).mean(-1)
    noise = noise * torch.tensor([1.0] + [2.0] * bootstrap.resamples).to(noise).unsqueeze(1)
    variance = (means.var(-1, correction=0) - noise).clamp(min=0)
    relative = variance[:, live].sqrt() / overall[:, live].clamp(min=torch.finfo(means.dtype).tiny)
    return estimate(relative.mean(1))


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
    off_diagonal = (correlation.sum((1, 2)) - size).clamp(min=0) / (pairs or math.nan)
    variances = moments.diagonal(dim1=-2, dim2=-1)
    mean = variances.mean(-1)
    spread = (variances - mean.unsqueeze(-1)).square().mean(-1).sqrt() / mean
    return Assumption(
        "WD",
        {
            "correlation of distinct maps": estimate(off_diagonal),
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
        activation.append(activations.double().square().sum((1, 3)))
        derivative.append(derivatives.double().square().sum((0, 2, 4)))
    first, second = torch.cat(activation), torch.cat(derivative)  # (examples, |T|)
    measures: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "energies of a location": lambda a, b: _pooled_correlation(a, b, bootstrap),
        "energies of an example": lambda a, b: _pooled_correlation(
            a.sum(1, keepdim=True), b.sum(1, keepdim=True), bootstrap
        ),
    }
    return Assumption(
        "IAD",
        {name: estimate(measure(first, second), least=-1.0) for name, measure in measures.items()},
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
