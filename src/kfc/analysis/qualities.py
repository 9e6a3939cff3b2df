"""How close approximations of a layer's Fisher block are to the exact block: the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Quality:
    """The quality of one approximation F̂ of a block F.

    Numbers of several batches are means. The operator error, the cosine, the smallest eigenvalue
    and the spectrum are those of the first batch.

    Attributes:
        frobenius_error: ‖F̂ - F‖ / ‖F‖ in the Frobenius norm. From several batches, it is that of
            their expectations: squares of norms are products of two distinct batches, which contain
            no sampling errors. From a single batch, it is that of the batch.
        probe_error: the standard error of ``frobenius_error`` due to its random probes; 0 if it was
            computed exactly.
        operator_error: ‖F̂ - F‖ / ‖F‖ in the operator norm, to about 1% (Lanczos' method).
        cosine: the cosine of the angle between (F̂ + δ)⁻¹ g and the exact damped natural gradient.
            Either has a relative residual of 0.001 if it has to be found by products alone.
        decrease: the first-order decrease of the loss by a step along (F̂ + δ)⁻¹ g, relative to that
            of the exact natural gradient with the same vᵀ(F + δ)v; at most 1. vᵀFv is twice the KL
            divergence from the model before the step, to second order.
        trace_ratio: tr F̂ / tr F.
        smallest_eigenvalue: the smallest eigenvalue of F̂, relative to the largest magnitude.
        positive: whether F̂ is positive semi-definite, up to rounding, in every batch.
        spectrum: the eigenvalues of F̂, descending; ``None`` if they are not known.
        without_batch: (batches, 3), the trace ratio, Frobenius error and decrease without each
            batch in turn (jackknife); without rows for fewer than three batches.
    """

    frobenius_error: float
    probe_error: float
    operator_error: float
    cosine: float
    decrease: float
    trace_ratio: float
    smallest_eigenvalue: float
    positive: bool
    spectrum: Tensor | None
    without_batch: Tensor


@dataclass(frozen=True)
class LayerComparison:
    """The exact block of one layer, and the quality of each approximation.

    Attributes:
        layer: the layer's name in ``model.named_modules()``.
        shape: the shape (groups, I, n) of the layer's gradient.
        locations, offsets: |T| and |D|.
        batches: the number of batches.
        gradients: the number of gradients of single examples in the exact block of a batch.
        trace, operator_norm: those of the exact block of the first batch.
        spectrum: its eigenvalues, descending; ``None`` if it is too large.
        gain: gᵀ(F + δ)⁻¹g, twice the decrease of the loss that the exact block's quadratic model
            promises; the mean of the batches.
        plain_decrease: the ``Quality.decrease`` of the gradient itself.
        approximations: the qualities by name, as in ``APPROXIMATIONS``.
        left_out: the reason for each approximation that was too large or could not be solved.
    """

    layer: str
    shape: tuple[int, int, int]
    locations: int
    offsets: int
    batches: int
    gradients: int
    trace: float
    operator_norm: float
    spectrum: Tensor | None
    gain: float
    plain_decrease: float
    approximations: Mapping[str, Quality]
    left_out: Mapping[str, str]
