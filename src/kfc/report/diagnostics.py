"""What KFC did inside: the Fisher norm and its clipping, the factors of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from kfc.experiments.runs import Record
from kfc.report.figures import Figure, Json, layout, line, thinned
from kfc.report.styles import INK

NORM_CAPTION = (
    "The Fisher norm ν of updates before they were clipped, as last evaluated; dotted: C, above "
    "which an update is shortened."
)
FACTOR_CAPTION = "What updates were multiplied by so that ν stays below C; 1: nothing was clipped."
AT_UPDATE = "%{y:.3g} at update %{x}"
LAYER_MEASURES = {
    "pi": (
        "Balance π",
        "π",
        "π splits the damping between a layer's two factors: above 1 the activations' mean "
        "eigenvalue is the larger one.",
    ),
    "activation_trace": (
        "Trace of the activation factor",
        "trace of Ω",
        "Squared activations in the layer's patches, summed over locations, mean over examples.",
    ),
    "derivative_trace": (
        "Trace of the derivative factor",
        "trace of Γ",
        "Squared derivatives at the layer's outputs, mean over examples and locations. They shrink "
        "as the network becomes sure of its answers.",
    ),
    "block_trace": (
        "Trace of blocks",
        "trace",
        "Of layers whose Fisher block has no factors: normalisation layers, with a scale and a "
        "shift for each channel, and all layers of which only the diagonal is kept.",
    ),
}


# Fisher norm and clipping


def has_fisher_norm(record: Record) -> bool:
    return bool(_clip_rows(record))


def clipping_figures(records: Sequence[Record]) -> list[Figure]:
    """Of the runs that have a Fisher norm, each in the look of its index."""
    norms, factors = [], []
    limits: dict[float, int] = {}
    for index, record in enumerate(records):
        rows = thinned(_clip_rows(record))
        if not rows:
            continue
        norms.append(_clip_line(index, record, rows, "fisher_norm"))
        if any(row.get("clip_factor") is not None for row in rows):
            factors.append(_clip_line(index, record, rows, "clip_factor"))
        limit = record.config.options.get("fisher_clip")
        if limit:
            limits[limit] = max(limits.get(limit, 0), rows[-1]["update"])
    norms += [_limit_line(limit, last) for limit, last in limits.items()]
    norm_shape, factor_shape = layout("updates", "ν", log="y"), layout("updates", "clip factor")
    factor_shape["yaxis"]["range"] = [0, 1.05]
    return [
        Figure("fisher-norm", "Fisher norm", NORM_CAPTION, norm_shape, [norms]),
        Figure("clip-factor", "Clip factor", FACTOR_CAPTION, factor_shape, [factors]),
    ]


def _clip_rows(record: Record) -> list[Json]:
    """From the progress, which is more often; else from the evaluations."""
    evaluations = [
        {"update": row["update"], **(row.get("diagnostics") or {})} for row in record.evaluations
    ]
    for rows in (record.progress, evaluations):
        evaluated = [row for row in rows if row.get("fisher_norm") is not None]
        if evaluated:
            return evaluated
    return []


def _clip_line(index: int, record: Record, rows: Sequence[Json], measure: str) -> Json:
    updates = [row["update"] for row in rows]
    values = [row.get(measure) for row in rows]
    return line(index, record.name, updates, values, hovertemplate=AT_UPDATE)


def _limit_line(limit: float, last: int) -> Json:
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": f"C = {limit:g}",
        "x": [0, last],
        "y": [limit, limit],
        "text": ["", f"C = {limit:g}"],
        "textposition": "top left",
        "line": {"color": INK, "dash": "dot", "width": 1.5},
        "hovertemplate": "clipped above",
    }


# Layers


def has_layers(record: Record) -> bool:
    return any(map(_layers, record.evaluations))


def layer_figures(records: Sequence[Record]) -> list[Figure]:
    """A variant for each run, a line for each layer; a layer looks alike in all of them."""
    looks = {name: index for index, name in enumerate(layer_names(records))}
    figures = []
    for key, (title, label, caption) in LAYER_MEASURES.items():
        variants = [_layer_lines(record, key, looks) for record in records]
        if any(variants):
            shape = layout("updates", label, log="y")
            figures.append(Figure(f"layers-{key}", title, caption, shape, variants))
    return figures


def layer_names(records: Sequence[Record]) -> list[str]:
    rows = (row for record in records for row in record.evaluations)
    return list(dict.fromkeys(name for row in rows for name in _layers(row)))


def _layer_lines(record: Record, key: str, looks: dict[str, int]) -> list[Json]:
    rows = thinned([row for row in record.evaluations if _layers(row)])
    updates = [row["update"] for row in rows]
    lines = []
    for name, index in looks.items():
        values = [_typical(_layers(row).get(name, {}).get(key)) for row in rows]
        if any(value is not None for value in values):
            lines.append(line(index, name, updates, values, hovertemplate=AT_UPDATE))
    return lines


def _layers(row: Json) -> dict[str, Any]:
    layers: dict[str, Any] = (row.get("diagnostics") or {}).get("layers") or {}
    return layers


def _typical(value: Any) -> float | None:
    """The median over the groups of a convolution that has some."""
    if isinstance(value, list):
        finite = [item for item in value if item is not None]
        return median(finite) if finite else None
    return value  # type: ignore[no-any-return]
