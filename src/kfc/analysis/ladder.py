"""What each assumption of the paper loses, on a ladder of nested approximations.

exact, + IAD, + SUD, + SH (= KFC), + SUA, + WD (= PRONG): every rung assumes what the rung before
assumes, and one assumption more. WD contains SUD, so that its own step is measured beside the
ladder: from IAD to IAD + WD.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfc.analysis.blocks import DEFAULT_MAX_GIB
from kfc.analysis.comparison import DEFAULT_PROBES, Comparison, loss_gradient
from kfc.analysis.qualities import LayerComparison, Quality
from kfc.analysis.recording import factored_layers, record_layer
from kfc.fisher.heads import Output
from kfc.fisher.likelihoods import Likelihood

LADDER = {"iad": "IAD", "iad-sud": "SUD", "kfc": "SH", "sua": "SUA", "prong": "WD"}
"""The approximation of each rung, with the assumption it adds to the rung before."""

STEPS = {
    "IAD": ("exact", "iad"),
    "SUD": ("iad", "iad-sud"),
    "SH": ("iad-sud", "kfc"),
    "SUA": ("kfc", "sua"),
    "WD": ("iad", "iad-wd"),
}
"""The two approximations that differ by an assumption alone; "exact" is the exact block."""

# By convention, an assumption "holds" if it loses less than the first number, "roughly" if less
# than the second, and otherwise "fails".
THRESHOLDS = (0.1, 0.3)
# Quantiles of Student's distribution for 95% intervals, by degrees of freedom from 1.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Estimate:
    """A number, and an interval that contains the true value for about 95% of batches.

    The ends of the interval are NaN if there are fewer than three batches.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def from_batches(cls, value: float, without: Tensor, other_error: float = 0.0) -> Estimate:
        """Return an estimate from the values without each batch in turn (jackknife).

        Args:
            without: (batches,), or nothing for fewer than three batches.
            other_error: a standard error that does not come from the choice of the batches.
        """
        count = len(without)
        if count < 3:
            return cls(value)
        spread = float((without - without.mean()).square().sum()) * (count - 1) / count
        freedom = count - 1
        quantile = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.5 / freedom
        reach = quantile * math.sqrt(spread + other_error**2)
        return cls(value, value - reach, value + reach)


@dataclass(frozen=True)
class Step:
    """What one assumption loses, given those of the rung below.

    Attributes:
        assumption: IAD, SUD, SH, SUA or WD.
        trace: 1 - min(r, 1 / r) for the ratio r of the traces above and below: the part of the
            trace that is lost, or added.
        frobenius: the increase of the error in the Frobenius norm, relative to the exact block.
        decrease: how much less a step v lowers the loss at the same vᵀ(F + δ)v, as a part of what
            the exact natural gradient gives.
    """

    assumption: str
    trace: Estimate
    frobenius: Estimate
    decrease: Estimate

    @property
    def measure(self) -> str:
        """The name of the loss that decides the verdict.

        It is the one whose interval begins highest, or the largest if there are no intervals.
        """
        losses = {name: each for name, each in vars(self).items() if name != "assumption"}
        sizes = {
            name: each.value if math.isnan(each.low) else each.low for name, each in losses.items()
        }
        unknown = [name for name, size in sizes.items() if math.isnan(size)]
        return unknown[0] if unknown else max(sizes, key=lambda name: sizes[name])

    @property
    def deciding(self) -> Estimate:
        """The loss that decides the verdict."""
        found: Estimate = getattr(self, self.measure)
        return found

    @property
    def verdict(self) -> str:
        """One of ``"holds"``, ``"roughly"``, ``"fails"``, ``"unclear"`` and ``"unknown"``.

        It is unclear if the interval begins where the assumption holds and ends where it fails,
        and unknown if there is no estimate.
        """
        loss, (low, high) = self.deciding, THRESHOLDS
        if math.isnan(loss.value):
            return "unknown"
        if loss.low < low and loss.high >= high:
            return "unclear"
        return ("holds", "roughly", "fails")[(loss.value >= low) + (loss.value >= high)]


def rung_estimates(quality: Quality) -> tuple[Estimate, Estimate, Estimate]:
    """Return an approximation's trace ratio, Frobenius error and decrease, with intervals."""
    traces, errors, decreases = quality.without_batch.unbind(1)
    return (
        Estimate.from_batches(quality.trace_ratio, traces),
        Estimate.from_batches(quality.frobenius_error, errors, quality.probe_error),
        Estimate.from_batches(quality.decrease, decreases),
    )


def ladder_steps(comparison: LayerComparison) -> dict[str, Step]:
    """Return what each assumption loses, by name.

    Assumptions without meaning for the layer are omitted: SUD and SH if it has a single location,
    SUA if its kernel has a single offset. So are those of approximations that were left out.
    """
    exact = _exact_quality(comparison)
    known = {"exact": exact, **comparison.approximations}
    omitted = set()
    if comparison.locations == 1:
        omitted |= {"SUD", "SH"}
    if comparison.offsets == 1:
        omitted.add("SUA")
    return {
        name: _step(name, known[below], known[above])
        for name, (below, above) in STEPS.items()
        if name not in omitted and below in known and above in known
    }


def _exact_quality(comparison: LayerComparison) -> Quality:
    """Return the quality of the exact block itself."""
    rows = comparison.batches if comparison.batches > 2 else 0
    perfect = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64).expand(rows, 3)
    return Quality(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, True, comparison.spectrum, perfect)


def _step(name: str, below: Quality, above: Quality) -> Step:
    traces, errors, decreases = range(3)
    first, second = below.without_batch, above.without_batch
    return Step(
        name,
        Estimate.from_batches(
            float(_lost(torch.tensor(above.trace_ratio), torch.tensor(below.trace_ratio))),
            _lost(second[:, traces], first[:, traces]),
        ),
        Estimate.from_batches(
            above.frobenius_error - below.frobenius_error,
            second[:, errors] - first[:, errors],
            math.hypot(above.probe_error, below.probe_error),
        ),
        Estimate.from_batches(
            below.decrease - above.decrease, first[:, decreases] - second[:, decreases]
        ),
    )


def _lost(above: Tensor, below: Tensor) -> Tensor:
    """Return 1 - min(r, 1 / r) for the ratio r."""
    ratio = above / below
    return 1 - torch.minimum(ratio, 1 / ratio)


def measure_ladder(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    layers: Iterable[str] | None = None,
    *,
    loss: Callable[[Tensor, Any], Tensor],
    damping: float = 1e-3,
    likelihood: str | Likelihood = "categorical",
    samples: int | None = None,
    output: Output | None = None,
    seed: int = 0,
    probes: int = DEFAULT_PROBES,
    max_gib: float = DEFAULT_MAX_GIB,
) -> Mapping[str, LayerComparison]:
    """Compare the rungs of the ladder with the exact block, over several batches.

    ``ladder_steps()`` returns what each assumption loses. Intervals need three batches or more.

    Args:
        batches: pairs of inputs, as in ``record_layer``, and targets.
        layers: names in ``model.named_modules()``; by default all layers with Kronecker factors.
        loss: returns the loss, a scalar, of the model's outputs and the targets of a batch. Natural
            gradients are those of its gradient.

    The other arguments are those of ``compare_approximations``.
    """
    pairs = list(batches)
    found = {}
    for layer in factored_layers(model) if layers is None else layers:
        comparison = Comparison(
            [*LADDER, "iad-wd"],
            damping=damping,
            probes=probes,
            seed=seed,
            max_gib=max_gib,
            batches=len(pairs),
        )
        for index, (inputs, targets) in enumerate(pairs):
            record = record_layer(
                model,
                inputs,
                layer,
                likelihood=likelihood,
                samples=samples,
                output=output,
                seed=seed + index,
            )
            of_outputs = partial(_swapped, loss, targets)
            comparison.add(record, loss_gradient(model, inputs, record, of_outputs, output))
        found[layer] = comparison.result()
    return found


def _swapped(loss: Callable[[Tensor, Any], Tensor], targets: Any, outputs: Tensor) -> Tensor:
    return loss(outputs, targets)
