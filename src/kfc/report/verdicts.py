"""An inspection's tables, in rows for a terminal or a page: the first row is the header."""

from __future__ import annotations

import math
from dataclasses import astuple

from kfc.analysis import APPROXIMATIONS, Assumption, LayerComparison
from kfc.experiments.findings import Inspection
from kfc.report.formats import MISSING, number
from kfc.report.summary import Row

ASSUMPTIONS = {
    "IAD": "independent activations and derivatives: the correlation, over examples, between the "
    "squared activations and the squared derivatives of a location.",
    "SH": "spatial homogeneity: how much second moments differ between the locations of a map, as "
    "a standard deviation relative to their mean; of activations or derivatives, what is worse.",
    "SUD": "spatially uncorrelated derivatives: the mean magnitude of the correlation between "
    "neighbouring locations of a derivative map.",
    "SUA": "spatially uncorrelated activations: the same of activation maps, less their means.",
    "WD": "white derivatives: the mean magnitude of the correlation between distinct derivative "
    "maps.",
}
VERDICTS = ("holds", "roughly", "fails")
READING = (
    "The number is 0 if the assumption is exactly true; below 0.1 it is said to hold, below 0.3 to "
    "hold roughly, else it fails. In brackets, an interval that holds the truth in about 95 of 100 "
    "batches, from 200 resamples of the examples. A dash: there is nothing to compare, as "
    "with a single location or a single map."
)
QUALITIES = (
    *("approximation", "assumes", "Frobenius error", "operator error"),
    *("cosine", "decrease", "trace ratio", "PSD"),
)
QUALITY_READING = (
    "Errors are ‖F̂ - F‖ / ‖F‖ in the Frobenius norm (± its standard error, where it is estimated) "
    "and in the operator norm. Cosine: between the natural gradients that F̂ and F give. Decrease: "
    "by how much a step along F̂'s natural gradient lowers the loss, relative to F's at the same KL "
    "divergence; 1 is the best there is. Trace ratio: tr F̂ / tr F. PSD: whether F̂ is positive "
    "semi-definite."
)


def verdict_rows(inspection: Inspection) -> list[Row]:
    """A row for each layer, a column for each assumption."""
    rows: list[Row] = [("layer", *ASSUMPTIONS)]
    for layer in inspection.layers:
        tested = layer.assumptions or {}
        cells = (verdict(tested.get(name)) for name in ASSUMPTIONS)
        rows.append((layer.name, *cells))
    return rows


def verdict(found: Assumption | None) -> str:
    """Such as "roughly 0.12 (0.09 to 0.15)"."""
    if found is None:
        return MISSING
    measure = found.deciding
    if math.isnan(measure.value):
        return found.verdict
    value, low, high = (f"{round(v, 2) + 0.0:.2f}" for v in astuple(measure))
    return f"{found.verdict} {value} ({low} to {high})"


def quality_rows(comparison: LayerComparison) -> list[Row]:
    """A row for each approximation."""
    rows: list[Row] = [QUALITIES]
    for name, quality in comparison.approximations.items():
        error = _number(quality.frobenius_error)
        if quality.frobenius_uncertainty > 0:
            error += f" ± {quality.frobenius_uncertainty:.1g}"
        others = (quality.operator_error, quality.cosine, quality.decrease, quality.trace_ratio)
        kind = APPROXIMATIONS[name]
        positive = "yes" if quality.positive else "no"
        rows.append((kind.title, kind.assumes, error, *map(_number, others), positive))
    return rows


def _number(value: float) -> str:
    return number(value) if math.isfinite(value) else MISSING


def notes_of(inspection: Inspection) -> list[str]:
    """What was left out, and why."""
    notes = []
    for layer in inspection.layers:
        notes += [f"{layer.name}: {note}" for note in layer.notes]
        if {layer.examples, layer.compared_examples} - {0, inspection.settings.examples}:
            notes.append(
                f"{layer.name}: {layer.examples} examples for the assumptions and "
                f"{layer.compared_examples} for the blocks, as many as fit into the memory"
            )
    return notes
