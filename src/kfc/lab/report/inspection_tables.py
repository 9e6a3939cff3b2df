"""Tables about an inspected network, for the terminal and for a page."""

from __future__ import annotations

import math
from dataclasses import astuple

from kfc.analysis import APPROXIMATIONS, Assumption, LayerComparison
from kfc.lab.inspection.results import Inspection
from kfc.lab.report.tables import MISSING, Row, number

ASSUMPTIONS = {
    "IAD": "independent activations and derivatives: the correlation over examples between the "
    "squared activations and the squared derivatives at a location.",
    "SH": "spatial homogeneity: the standard deviation of second moments over the locations of a "
    "map, relative to their mean; the larger of the values for activations and derivatives.",
    "SUD": "spatially uncorrelated derivatives: the mean magnitude of the correlation between "
    "neighbouring locations of a derivative map.",
    "SUA": "spatially uncorrelated activations: the same for activation maps, with their means "
    "subtracted.",
    "WD": "white derivatives: the mean magnitude of the correlation between different derivative "
    "maps.",
}
QUALITIES = (
    *("approximation", "assumes", "Frobenius error", "operator error"),
    *("cosine", "decrease", "trace ratio", "PSD"),
)


def verdict_rows(inspection: Inspection) -> list[Row]:
    """Return a table with a row for each layer and a column for each assumption."""
    rows: list[Row] = [("layer", *ASSUMPTIONS)]
    for layer in inspection.layers:
        tested = layer.assumptions or {}
        rows.append((layer.name, *(_verdict(tested.get(name)) for name in ASSUMPTIONS)))
    return rows


def _verdict(tested: Assumption | None) -> str:
    """Format a verdict with its interval, for example "roughly 0.12 (0.09 to 0.15)"."""
    if tested is None:
        return MISSING
    estimate = tested.deciding
    if math.isnan(estimate.value):
        return tested.verdict
    # Adding 0.0 turns -0.0 into 0.0.
    value, low, high = (f"{round(v, 2) + 0.0:.2f}" for v in astuple(estimate))
    return f"{tested.verdict} {value} ({low} to {high})"


def quality_rows(comparison: LayerComparison) -> list[Row]:
    """Return a table with a row for each approximation of a layer's Fisher block."""
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
    """Return notes about what was left out, and why."""
    notes = []
    for layer in inspection.layers:
        notes += [f"{layer.name}: {note}" for note in layer.notes]
        if {layer.examples, layer.compared_examples} - {0, inspection.settings.examples}:
            notes.append(
                f"{layer.name}: {layer.examples} examples for the assumptions and "
                f"{layer.compared_examples} for the blocks, as many as fit into the memory"
            )
    return notes
