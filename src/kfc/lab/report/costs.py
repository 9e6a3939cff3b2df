"""How the time of an update divides into its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfc.lab.report.figures import INK, Figure, Json, area_style, layout, plain, rounded
from kfc.lab.report.tables import MISSING, Row, number
from kfc.lab.runs import Record

Costs = dict[str, float]

# In the order in which they happen.
PARTS = (
    *("data", "forward", "statistics", "backward", "forward and backward", "averages", "inverses"),
    *("check", "natural gradient", "model", "clip", "update", "reduction ratio", "optimizer"),
)
HATCHING = {"shape": "/", "fillmode": "overlay", "fgcolor": INK, "size": 6, "solidity": 0.2}


def cost_section(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the data of the section on costs, or ``None`` if no run recorded any."""
    costs = [cost_by_part(record) for record in records]
    parts = _all_parts(costs)
    if not parts:
        return None
    figure = _cost_figure([record.name for record in records], costs, parts)
    return {"figures": [figure], "rows": cost_rows(records), "parts": len(parts)}


def cost_by_part(record: Record) -> Costs:
    """Return the milliseconds per update of each part, averaged over all updates."""
    totals: Costs = {}
    before = 0
    for row in record.evaluations:
        for part, seconds in (row.get("step_seconds") or {}).items():
            totals[part] = totals.get(part, 0.0) + (seconds or 0.0) * (row["update"] - before)
        before = row["update"]
    return {part: 1000 * total / before for part, total in totals.items()} if before else {}


def cost_rows(records: Sequence[Record]) -> list[Row]:
    """Return a table with a row for each part and one for the total, and a column for each run."""
    costs = [cost_by_part(record) for record in records]
    totals = (f"{number(sum(cost.values()))} ms" if cost else MISSING for cost in costs)
    return [
        ("part", *(record.name for record in records)),
        *((part, *(_share(cost, part) for cost in costs)) for part in _all_parts(costs)),
        ("all", *totals),
    ]


def _share(cost: Costs, part: str) -> str:
    if part not in cost:
        return MISSING
    total = sum(cost.values())
    return f"{number(cost[part])} ms ({cost[part] / total if total else 0:.0%})"


def _all_parts(costs: Sequence[Costs]) -> list[str]:
    found = {part for cost in costs for part in cost}
    return [part for part in PARTS if part in found] + sorted(found - set(PARTS))


def _cost_figure(names: Sequence[str], costs: Sequence[Costs], parts: Sequence[str]) -> Figure:
    """Return stacked bars, one for each run."""
    shape = layout("milliseconds per update", "", height=110 + 38 * len(names))
    shape["barmode"] = "stack"
    shape["yaxis"] |= {
        "tickvals": list(range(len(names))),
        "ticktext": [plain(name, max_length=14) for name in names],
        "range": [len(names) - 0.4, -0.6],
        "showgrid": False,
        "fixedrange": True,
    }
    bars = [_bars(index, part, costs, names) for index, part in enumerate(parts)]
    return Figure("costs", shape, [bars])


def _bars(index: int, part: str, costs: Sequence[Costs], names: Sequence[str]) -> Json:
    style = area_style(index)
    return {
        "type": "bar",
        "orientation": "h",
        "name": plain(part),
        "y": list(range(len(costs))),
        "x": rounded([cost.get(part, 0.0) for cost in costs]),
        "customdata": [plain(name) for name in names],
        "hovertemplate": "%{customdata}: %{x:.3g} ms",
        "marker": {
            "color": style.colour,
            "line": {"color": INK, "width": 0.5},
            **({"pattern": HATCHING} if style.hatched else {}),
        },
    }
