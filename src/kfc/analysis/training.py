"""The curvature that training would have after the statistics of a recorded layer."""

from __future__ import annotations

import sys

from torch import Tensor

from kfc.analysis.recording import LayerRecord
from kfc.curvature import options
from kfc.curvature.ekfac import EKFACCurvature, MeasuredInverse
from kfc.curvature.kronecker import Factors
from kfc.curvature.layer import LayerCurvature

# As in training, but never with the diagonal in place of a wide factor.
KFC = options.Kronecker(max_factor_size=sys.maxsize)
SUA = options.SUA(max_factor_size=sys.maxsize)
PRONG = options.PRONG(max_factor_size=sys.maxsize)
EKFAC = options.EKFAC(max_factor_size=sys.maxsize)
DIAGONAL = options.Diagonal()


def curvature_of(record: LayerRecord, approximation: options.Approximation) -> LayerCurvature:
    """Return the curvature of the layer, with the statistics of the record as running averages."""
    curvature = approximation.for_layer(record.layer)
    _gather(record, curvature)
    return curvature


def _gather(record: LayerRecord, curvature: LayerCurvature) -> None:
    """Replace the running averages, and what the inverse measures, by those of the record."""
    statistics = curvature.statistics(fresh=False)
    kept = [statistics.forward(call.inputs, call.outputs) for call in record.calls]
    for draw in range(record.draws):
        for call, of_call in zip(record.calls, kept, strict=True):
            statistics.backward(of_call, call.derivatives[draw], record.examples)
        statistics.end_draw()
    moments = statistics.moments(record.examples)
    curvature.average_in(tuple(moment.to_mean_() for moment in moments), decay=0.0)


def running_averages(
    record: LayerRecord, approximation: options.Approximation
) -> tuple[Tensor, ...]:
    running = curvature_of(record, approximation).state.running
    assert running is not None
    return running


def factors(record: LayerRecord, approximation: options.Kronecker) -> Factors:
    """Return Ω and Γ, (groups, n, n) and (groups, I, I)."""
    found = curvature_of(record, approximation).factors()
    assert found is not None
    activation, derivative = (f if f.dim() == 3 else f.diag_embed() for f in found)
    return Factors(activation, derivative)


def diagonal(record: LayerRecord) -> Tensor:
    """Return the mean squares of the entries of gradients, (groups, I, n)."""
    (squares,) = running_averages(record, DIAGONAL)
    return squares.reshape(record.shape)


def measured_inverse(record: LayerRecord) -> MeasuredInverse:
    """Return the inverse of EKFAC: bases, and the second moments of gradients in them."""
    curvature = curvature_of(record, EKFAC)
    assert isinstance(curvature, EKFACCurvature)
    assert curvature.state.running is not None
    # The moments refer to the bases of an inverse, so that they need a second pass.
    curvature.adopt_inverse(curvature.invert(curvature.state.running, damping=0.0), damping=0.0)
    _gather(record, curvature)
    assert isinstance(curvature.state.inverse, MeasuredInverse)
    return curvature.state.inverse
