"""Heat maps of correlations over space and between maps (figures 1 and 2 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from torch import Tensor

from kfc.lab.report.figures import INK, Figure, Json, layout, line, plain

MOST_MAPS = 256
SHOWN_MAPS = 3


def offset_figure(id: str, title: str, offsets: Tensor) -> Figure:
    """Return the magnitudes of autocorrelations of a few maps, and their mean over all live maps.

    Args:
        offsets: correlations by map and offset, (maps, *offsets).
    """
    magnitude = offsets.abs()
    slices = ""
    while magnitude.dim() > 3:
        magnitude = magnitude[:, magnitude.shape[1] // 2]
        slices = " The offset is 0 in all dimensions but the last two."
    live, chosen = live_maps(offsets), shown_maps(offsets)
    pictures = {f"map {index}": magnitude[index] for index in chosen}
    pictures[f"mean of {len(live)} maps"] = magnitude[live].mean(0)
    shown = ", ".join(map(str, chosen)) or "none"
    caption = f"Maps {shown} of {len(magnitude)}, counted from 0, and the mean of all maps"
    dead = len(magnitude) - len(live)
    caption += f" but {dead} dead ones.{slices}" if dead else f".{slices}"
    draw = _line_plot if magnitude.dim() == 2 else _heat_maps
    return Figure(id, *draw(pictures), title, caption)


def cross_map_figure(id: str, title: str, matrix: Tensor) -> Figure:
    """Return the magnitudes of correlations between maps at the middle location, (maps, maps)."""
    step = -(-len(matrix) // MOST_MAPS)
    chosen = range(0, len(matrix), step)
    at = "%{z:.3f} between maps %{y} and %{x}<extra></extra>"
    trace = _heat_map(matrix[::step, ::step].abs(), chosen, chosen, hovertemplate=at)
    which = "all" if step == 1 else f"one in {step} of"
    caption = f"Correlations between {which} {len(matrix)} maps at the middle location."
    return Figure(id, _heat_map_layout("map", "map", 1, 1), [[trace]], title, caption)


def live_maps(offsets: Tensor) -> list[int]:
    """Return the indices of the maps that are not all zero."""
    live: list[int] = (offsets.flatten(1) != 0).any(1).nonzero().flatten().tolist()
    return live


def shown_maps(offsets: Tensor) -> list[int]:
    """Return the indices of a few live maps, evenly spaced."""
    live = live_maps(offsets)
    if len(live) <= SHOWN_MAPS:
        return live
    return [live[(2 * k + 1) * len(live) // (2 * SHOWN_MAPS)] for k in range(SHOWN_MAPS)]


def _line_plot(pictures: dict[str, Tensor]) -> tuple[Json, list[list[Json]]]:
    """Return the layout and traces for maps with one spatial dimension."""
    at = "%{y:.3f} at %{x}"
    traces = [
        line(index, name, _centred(len(values)), _rounded(values), hovertemplate=at)
        for index, (name, values) in enumerate(pictures.items())
    ]
    shape = layout("offset", "correlation")
    shape["yaxis"]["range"] = [0, 1.05]
    shape |= {"showlegend": True, "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"}}
    return shape, [traces]


def _heat_maps(pictures: dict[str, Tensor]) -> tuple[Json, list[list[Json]]]:
    """Return the layout and traces of up to four heat maps, in two rows if there are over two."""
    rows, columns = 1 + (len(pictures) > 2), min(len(pictures), 2)
    shape = _heat_map_layout("x offset", "y offset", rows, columns)
    at = "%{z:.3f} at x offset %{x}, y offset %{y}"
    traces = []
    for index, (name, values) in enumerate(pictures.items()):
        x, y = f"x{_suffix(index)}", f"y{_suffix(index)}"
        height, width = map(_centred, values.shape)
        own = {"name": plain(name), "xaxis": x, "yaxis": y}
        traces.append(_heat_map(values, width, height, hovertemplate=at, **own))
        above = {"xref": f"{x} domain", "yref": f"{y} domain", "x": 0.5, "y": 1}
        font = {"size": 12, "color": INK}
        shape["annotations"].append(
            {**above, "text": plain(name), "yanchor": "bottom", "showarrow": False, "font": font}
        )
    return shape, [traces]


def _heat_map_layout(x_title: str, y_title: str, rows: int, columns: int) -> Json:
    """Return a layout with square axes in rows and columns, which share one colour scale."""
    size = {"rows": rows, "columns": columns}
    bar = {"thickness": 10, "outlinewidth": 0, "tickvals": [0, 0.25, 0.5, 0.75, 1]}
    shape: Json = {
        "grid": {**size, "pattern": "independent", "xgap": 0.18, "ygap": 0.18},
        # Viridis is perceptually uniform, and safe for colour-blind readers.
        "coloraxis": {"cmin": 0, "cmax": 1, "colorscale": "Viridis", "colorbar": bar},
        "annotations": [],
        "margin": {"l": 44, "r": 8, "t": 26, "b": 46},
    }
    own = {"showgrid": False, "ticks": "outside", "nticks": 6, "constrain": "domain"}
    for index, (row, column) in enumerate(product(range(rows), range(columns))):
        suffix, bottom, left = _suffix(index), row == rows - 1, column == 0
        shape[f"xaxis{suffix}"] = {
            **own,
            "title": {"text": x_title if bottom else ""},
            "showticklabels": bottom,
        }
        shape[f"yaxis{suffix}"] = {
            **own,
            "title": {"text": y_title if left else ""},
            "showticklabels": left,
            "autorange": "reversed",
            "scaleanchor": f"x{suffix}",
        }
    return shape


def _suffix(index: int) -> str:
    """Return the suffix of plotly's axis names: empty, 2, 3, ..."""
    return "" if index == 0 else str(index + 1)


def _heat_map(values: Tensor, x: Sequence[int], y: Sequence[int], **options: Any) -> Json:
    trace = {"type": "heatmap", "x": x, "y": y, "z": _rounded(values), "coloraxis": "coloraxis"}
    return {**trace, **options}


def _rounded(values: Tensor) -> list[float]:
    """Round to three decimals, more than colours show."""
    rounded: list[float] = values.double().round(decimals=3).tolist()
    return rounded


def _centred(length: int) -> list[int]:
    """Return offsets with 0 in the middle."""
    return list(range(-(length // 2), length - length // 2))
