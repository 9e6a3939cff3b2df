"""Where the time of an update goes."""

from __future__ import annotations

from collections.abc import Sequence

from kfc.experiments.runs import Record
from kfc.report.figures import Figure, Json, layout, plain, rounded
from kfc.report.formats import MISSING, number
from kfc.report.styles import INK, area_colour, area_hatched, area_swatch
from kfc.report.summary import Row

# In the order in which they happen.
PARTS = (
    *("data", "forward", "statistics", "backward", "forward and backward", "averages", "inverses"),
    *("check", "natural gradient", "model", "clip", "update", "reduction ratio", "optimizer"),
)
HATCHING = {"shape": "/", "fillmode": "overlay", "fgcolor": INK, "size": 6, "solidity": 0.2}
CAPTION = "Milliseconds for one update by part, the mean over the whole run."


def cost_by_part(record: Record) -> dict[str, float]:
    """Milliseconds for one update, the mean over all updates."""
    totals: dict[str, float] = {}
    before = 0
    for row in record.evaluations:
        for part, seconds in (row.get("step_seconds") or {}).items():
            totals[part] = totals.get(part, 0.0) + (seconds or 0.0) * (row["update"] - before)
        before = row["update"]
    return {part: 1000 * total / before for part, total in totals.items()} if before else {}


def all_parts(costs: Sequence[dict[str, float]]) -> list[str]:
    found = {part for cost in costs for part in cost}
    return [part for part in PARTS if part in found] + sorted(found - set(PARTS))


def cost_figure(records: Sequence[Record]) -> Figure | None:
    costs = [cost_by_part(record) for record in records]
    parts = all_parts(costs)
    if not parts:
        return None
    shape = layout("milliseconds for one update", "", height=110 + 38 * len(records))
    shape["barmode"] = "stack"
    shape["yaxis"] |= {
        "tickvals": list(range(len(records))),
        "ticktext": [plain(record.name, longest=14) for record in records],
        "range": [len(records) - 0.4, -0.6],
        "showgrid": False,
        "fixedrange": True,
    }
    names = [plain(record.name) for record in records]
    bars = [_bars(index, part, costs, names) for index, part in enumerate(parts)]
    return Figure("costs", "Parts of an update", CAPTION, shape, [bars])


def _bars(index: int, part: str, costs: Sequence[dict[str, float]], names: list[str]) -> Json:
    return {
        "type": "bar",
        "orientation": "h",
        "name": plain(part),
        "y": list(range(len(costs))),
        "x": rounded([cost.get(part, 0.0) for cost in costs]),
        "customdata": names,
        "hovertemplate": "%{customdata}: %{x:.3g} ms",
        "marker": {
            "color": area_colour(index),
            "line": {"color": INK, "width": 0.5},
            **({"pattern": HATCHING} if area_hatched(index) else {}),
        },
    }


def cost_rows(records: Sequence[Record]) -> list[Row]:
    """Milliseconds and shares; the first row is the header, the last the total."""
    costs = [cost_by_part(record) for record in records]
    rows: list[Row] = [("part", *(record.name for record in records))]
    rows += [(part, *(_share(cost, part) for cost in costs)) for part in all_parts(costs)]
    totals = (f"{number(sum(cost.values()))} ms" if cost else MISSING for cost in costs)
    return [*rows, ("all", *totals)]


def _share(cost: dict[str, float], part: str) -> str:
    if part not in cost:
        return MISSING
    total = sum(cost.values())
    return f"{number(cost[part])} ms ({cost[part] / total if total else 0:.0%})"


def cost_swatches(records: Sequence[Record]) -> dict[str, str]:
    """By part: the table is the figure's legend too."""
    parts = all_parts([cost_by_part(record) for record in records])
    return {part: area_swatch(index) for index, part in enumerate(parts)}
