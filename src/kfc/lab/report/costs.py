"""The cost of an update, divided into its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfc.lab.report.figures import INK, Figure, Json, area_style, layout, plain
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
    bars: list[Json] = []
    for index, part in enumerate(parts):
        colour, hatched = area_style(index)
        marker = {"color": colour, "line": {"color": INK, "width": 0.5}}
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(part),
                "y": list(range(len(names))),
                "x": [cost.get(part, 0.0) for cost in costs],
                "customdata": [plain(name) for name in names],
                "hovertemplate": "%{customdata}: %{x:.3g} ms",
                "marker": marker | ({"pattern": HATCHING} if hatched else {}),
            }
        )
    return Figure("costs", shape, [bars])
