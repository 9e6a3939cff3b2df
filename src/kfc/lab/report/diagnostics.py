"""Costs and diagnostics of updates: Fisher norm, adapted parameters, factors of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from kfc.lab.report.figures import (
    INK,
    Figure,
    Json,
    area_style,
    is_constant,
    layout,
    line,
    plain,
    thinned,
)
from kfc.lab.report.tables import MISSING, Row, number
from kfc.lab.runs import Record

# In the order in which they happen.
PARTS = (
    *("first estimate", "data", "forward", "statistics", "backward", "forward and backward"),
    *("averages", "inverses"),
    *("check", "natural gradient", "model", "clip", "update", "reduction ratio", "optimizer"),
)
HATCHING = {"shape": "/", "fillmode": "overlay", "fgcolor": INK, "size": 6, "solidity": 0.2}
# (key of a progress row, label of the vertical axis, axes with a logarithmic scale)
ADAPTATION = (
    ("lr", "α", "y"),
    ("momentum", "μ", ""),
    ("model_damping", "λ", "y"),
    ("factor_damping", "γ", "y"),
    ("reduction_ratio", "ρ", ""),
)
# Keys of a layer's diagnostics, and labels of the vertical axes.
LAYERS = {
    "pi": "π",
    "activation_trace": "trace of Ω",
    "derivative_trace": "trace of Γ",
    "block_trace": "trace",
}

# The name and rows of each run.
Runs = Sequence[tuple[str, Sequence[Json]]]
Costs = dict[str, float]

# Costs


def cost_section(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return stacked bars and a table of costs, or ``None`` if no run recorded any."""
    costs = [cost_by_part(record) for record in records]
    parts = _all_parts(costs)
    if not parts:
        return None
    shape = layout("milliseconds per update", "", height=110 + 38 * len(records))
    shape["barmode"] = "stack"
    shape["yaxis"] |= {
        "tickvals": list(range(len(records))),
        "ticktext": [plain(record.name, max_length=14) for record in records],
        "range": [len(records) - 0.4, -0.6],
        "showgrid": False,
        "fixedrange": True,
    }
    bars = []
    for index, part in enumerate(parts):
        colour, hatched = area_style(index)
        marker = {"color": colour, "line": {"color": INK, "width": 0.5}}
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(part),
                "y": list(range(len(records))),
                "x": [cost.get(part, 0.0) for cost in costs],
                "customdata": [plain(record.name) for record in records],
                "hovertemplate": "%{customdata}: %{x:.3g} ms",
                "marker": marker | ({"pattern": HATCHING} if hatched else {}),
            }
        )
    figures = [Figure("costs", shape, [bars])]
    return {"figures": figures, "rows": cost_rows(records), "parts": len(parts)}


def cost_by_part(record: Record) -> Costs:
    """Return the milliseconds per update of each part, averaged over all updates.

    The first estimate of the factors is divided by the number of updates too.
    """
    totals: Costs = {}
    if record.estimate is not None:
        totals["first estimate"] = record.estimate["seconds"]
    before = 0
    for row in record.evaluations:
        for part, seconds in (row.get("step_seconds") or {}).items():
            totals[part] = totals.get(part, 0.0) + (seconds or 0.0) * (row["update"] - before)
        before = row["update"]
    return {part: 1000 * total / before for part, total in totals.items()} if before else {}


def cost_rows(records: Sequence[Record]) -> list[Row]:
    """Return a table with a row for each part and one for the total, and a column for each run."""
    costs = [cost_by_part(record) for record in records]
    rows = [("part", *(record.name for record in records))]
    for part in _all_parts(costs):
        cells = (
            f"{number(cost[part])} ms ({cost[part] / (sum(cost.values()) or 1):.0%})"
            if part in cost
            else MISSING
            for cost in costs
        )
        rows.append((part, *cells))
    sums = (f"{number(sum(cost.values()))} ms" if cost else MISSING for cost in costs)
    return [*rows, ("all", *sums)]


def _all_parts(costs: Sequence[Costs]) -> list[str]:
    found = {part for cost in costs for part in cost}
    return [part for part in PARTS if part in found] + sorted(found - set(PARTS))


# One line for each run


def clipping_section(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the data of the section on clipping, or ``None`` if no run has a Fisher norm."""
    runs = [(record.name, _fisher_norm_rows(record)) for record in records]
    limits: dict[float, int] = {}
    for record, (_, rows) in zip(records, runs, strict=True):
        if rows and (limit := record.config.method.options.get("clip")):
            limits[limit] = max(limits.get(limit, 0), rows[-1]["update"])
    norms = _run_lines(runs, "fisher_norm")
    norms += [_limit_line(limit, last) for limit, last in limits.items()]
    factor_layout = layout("updates", "clip factor")
    factor_layout["yaxis"]["range"] = [0, 1.05]
    figures = [
        Figure("fisher-norm", layout("updates", "ν", log="y"), [norms]),
        Figure("clip-factor", factor_layout, [_run_lines(runs, "clip_factor")]),
    ]
    return _section(runs, figures)


def adaptation_section(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the data of the section on KFAC's adaptation, or ``None`` if no run adapts."""
    runs = [
        (r.name, [row for row in r.progress if row.get("model_damping") is not None])
        for r in records
    ]
    figures = [
        Figure(f"adaptation-{key}", layout("updates", label, log=log), [_run_lines(runs, key)])
        for key, label, log in ADAPTATION
    ]
    changes = _run_lines(_decreases(runs, "model_change"), "model_change")
    for trace in _run_lines(_decreases(runs, "objective_change"), "objective_change"):
        trace["line"]["dash"] = "dot"
        changes.append(trace)
    shape = layout("updates", "decrease", log="y")
    return _section(runs, [*figures, Figure("adaptation-changes", shape, [changes])])


def _section(runs: Runs, figures: list[Figure]) -> dict[str, Any] | None:
    legend = [(index, name) for index, (name, rows) in enumerate(runs) if rows]
    return {"legend": legend, **without_constants(figures)} if legend else None


def without_constants(figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the figures with lines that change, and the values of the others by their ids."""
    constants = {}
    for figure in figures:
        if is_constant(figure):
            known = {v for variant in figure.variants for trace in variant for v in trace["y"]}
            constants[figure.id] = ", ".join(number(v) for v in sorted(known - {None}))
    return {
        "figures": [figure for figure in figures if figure.id not in constants],
        "constants": {id: value for id, value in constants.items() if value},
    }


def _run_lines(runs: Runs, key: str) -> list[Json]:
    """Return a line for each run with values of ``key``, in the style of its index."""
    lines = []
    for index, (name, rows) in enumerate(runs):
        known = [row for row in thinned(rows) if row.get(key) is not None]
        if known:
            updates = [row["update"] for row in known]
            lines.append(line(index, name, updates, [row[key] for row in known]))
    return lines


def _decreases(runs: Runs, key: str) -> Runs:
    """Return the magnitudes of the changes ``key`` that are negative."""
    return [
        (name, [{**row, key: -row[key]} for row in rows if (row.get(key) or 0.0) < 0])
        for name, rows in runs
    ]


def _fisher_norm_rows(record: Record) -> list[Json]:
    """Return rows with a Fisher norm: progress rows, which are frequent, or else evaluations."""
    evaluations = [
        {"update": row["update"], **(row.get("diagnostics") or {})} for row in record.evaluations
    ]
    frequent, rare = (
        [row for row in rows if row.get("fisher_norm") is not None]
        for rows in (record.progress, evaluations)
    )
    return frequent or rare


def _limit_line(limit: float, last_update: int) -> Json:
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": f"C = {limit:g}",
        "x": [0, last_update],
        "y": [limit, limit],
        "text": [f"C = {limit:g}", ""],
        "textposition": "top right",
        "line": {"color": INK, "dash": "dot", "width": 1.5},
        "hovertemplate": "clipped above",
    }


# One line for each layer


def layer_section(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the data of the section on layers, or ``None`` if no run has diagnostics of layers.

    Each figure has a variant for each run, in which a layer always has the same style.
    """
    records = [record for record in records if any(map(_layers, record.evaluations))]
    if not records:
        return None
    rows = (row for record in records for row in record.evaluations)
    layers = list(dict.fromkeys(layer for row in rows for layer in _layers(row)))
    figures = [
        Figure(f"layers-{key}", layout("updates", label, log="y"), variants)
        for key, label in LAYERS.items()
        if any(variants := [_layer_lines(record, key, layers) for record in records])
    ]
    names = [record.name for record in records]
    legend = list(enumerate(_titles(records, layers)))
    return {"runs": names, "legend": legend, **without_constants(figures)}


def _titles(records: Sequence[Record], layers: Sequence[str]) -> list[str]:
    """Return the name of each layer with its kind, such as "conv1: Conv2d 3→32"."""
    kinds: dict[str, str] = {}
    for record in records:
        for row in record.evaluations:
            kinds |= {name: own["kind"] for name, own in _layers(row).items() if "kind" in own}
    return [f"{layer}: {kinds[layer]}" if layer in kinds else layer for layer in layers]


def _layer_lines(record: Record, key: str, layers: Sequence[str]) -> list[Json]:
    rows = thinned([row for row in record.evaluations if _layers(row)])
    updates = [row["update"] for row in rows]
    lines = []
    for index, layer in enumerate(layers):
        values = [_over_groups(_layers(row).get(layer, {}).get(key)) for row in rows]
        if any(value is not None for value in values):
            lines.append(line(index, layer, updates, values))
    return lines


def _layers(row: Json) -> dict[str, Any]:
    layers: dict[str, Any] = (row.get("diagnostics") or {}).get("layers") or {}
    return layers


def _over_groups(value: Any) -> Any:
    """Return a number as it is; of a list, with one number per group, return the median."""
    if not isinstance(value, list):
        return value
    finite = [item for item in value if item is not None]
    return median(finite) if finite else None
