"""Correlations as pictures: over space, and across maps (figures 1 and 2 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kfc.report.figures import Figure, Json, layout, line, plain
from kfc.report.styles import INK

# Perceptually uniform, and the same to the colour-blind.
COLOURS = "Viridis"
MOST_MAPS = 256
SHOWN_MAPS = 3
# Of the side of a figure of four; the rest is between them.
HALF = 0.45
AT_OFFSET = "%{z:.3f} at x offset %{x}, y offset %{y}"


def live_maps(offsets: Tensor) -> list[int]:
    """Those that are not all zeros."""
    live: list[int] = (offsets.flatten(1) != 0).any(1).nonzero().flatten().tolist()
    return live


def shown_maps(offsets: Tensor) -> list[int]:
    """A few, evenly among the live ones."""
    live = live_maps(offsets)
    if len(live) <= SHOWN_MAPS:
        return live
    return [live[(2 * k + 1) * len(live) // (2 * SHOWN_MAPS)] for k in range(SHOWN_MAPS)]


def offset_figure(id: str, title: str, offsets: Tensor) -> Figure:
    """Magnitudes of autocorrelations: of a few maps, and their mean over all live ones.

    Args:
        offsets: (maps, *offsets).
    """
    magnitude = offsets.abs()
    caption = ""
    while magnitude.dim() > 3:
        magnitude = magnitude[:, magnitude.shape[1] // 2]
        caption = "Where offsets along all dimensions but the last two are 0. "
    live, chosen = live_maps(offsets), shown_maps(offsets)
    pictures = {f"map {index}": magnitude[index] for index in chosen}
    pictures[f"mean of {len(live)} maps"] = magnitude[live].mean(0)
    caption += f"Of maps {_listed(chosen)} of {len(magnitude)}, counted from 0, and the mean"
    dead = len(magnitude) - len(live)
    caption += f", without dead maps ({dead})." if dead else "."
    if magnitude.dim() == 2:
        return _lines(id, title, caption, pictures)
    return _heat_maps(id, title, caption, pictures)


def cross_map_figure(id: str, title: str, matrix: Tensor) -> Figure:
    """Magnitudes of correlations between maps at the middle location, (maps, maps)."""
    step = -(-len(matrix) // MOST_MAPS)
    chosen = list(range(0, len(matrix), step))
    shape = _squares("map", "map", [(0.0, 1.0)], [(0.0, 1.0)])
    trace = {
        **_heat_map(matrix[::step, ::step].abs(), chosen, chosen),
        "name": "",
        "hovertemplate": "%{z:.3f} between maps %{y} and %{x}<extra></extra>",
    }
    caption = f"Between all pairs of {len(matrix)} maps, at the middle location."
    if step > 1:
        caption = f"Between every {step}th of {len(matrix)} maps, at the middle location."
    return Figure(id, title, caption, shape, [[trace]])


def _lines(id: str, title: str, caption: str, pictures: dict[str, Tensor]) -> Figure:
    traces = [
        line(index, name, _centred(len(values)), rounded(values), hovertemplate="%{y:.3f} at %{x}")
        for index, (name, values) in enumerate(pictures.items())
    ]
    shape = layout("offset", "correlation")
    shape["yaxis"]["range"] = [0, 1.05]
    shape |= {"showlegend": True, "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"}}
    return Figure(id, title, caption, shape, [traces])


def _heat_maps(id: str, title: str, caption: str, pictures: dict[str, Tensor]) -> Figure:
    """Four in a square; fewer if there are fewer maps."""
    columns = [(0.0, HALF), (1 - HALF, 1.0)] if len(pictures) > 1 else [(0.0, 1.0)]
    rows = [(1 - HALF, 1.0), (0.0, HALF)] if len(pictures) > 2 else [(0.0, 1.0)]
    shape = _squares("x offset", "y offset", columns, rows)
    traces = []
    for index, (name, values) in enumerate(pictures.items()):
        number = "" if index == 0 else str(index + 1)
        height, width = values.shape
        traces.append(
            {
                **_heat_map(values, _centred(width), _centred(height)),
                "name": plain(name),
                "xaxis": f"x{number}",
                "yaxis": f"y{number}",
                "hovertemplate": AT_OFFSET,
            }
        )
        shape["annotations"].append(_heading(name, f"x{number}", f"y{number}"))
    return Figure(id, title, caption, shape, [traces])


def _squares(
    x_title: str,
    y_title: str,
    columns: Sequence[tuple[float, float]],
    rows: Sequence[tuple[float, float]],
) -> Json:
    """Axes for pictures in rows and columns, each as high as wide, with one scale of colours."""
    shape = layout(x_title, y_title)
    del shape["height"]
    first_x, first_y = shape.pop("xaxis"), shape.pop("yaxis")
    places = [(row, column) for row in range(len(rows)) for column in range(len(columns))]
    for index, (row, column) in enumerate(places):
        number = "" if index == 0 else str(index + 1)
        own: Json = {"showgrid": False, "ticks": "outside", "nticks": 6, "constrain": "domain"}
        bottom, left = row == len(rows) - 1, column == 0
        shape[f"xaxis{number}"] = {
            **first_x,
            **own,
            "domain": list(columns[column]),
            "anchor": f"y{number}",
            "title": {"text": x_title if bottom else ""},
            "showticklabels": bottom,
        }
        shape[f"yaxis{number}"] = {
            **first_y,
            **own,
            "domain": list(rows[row]),
            "anchor": f"x{number}",
            "autorange": "reversed",
            "scaleanchor": f"x{number}",
            "title": {"text": y_title if left else ""},
            "showticklabels": left,
        }
    bar = {"thickness": 10, "outlinewidth": 0, "tickvals": [0, 0.25, 0.5, 0.75, 1]}
    shape["coloraxis"] = {"cmin": 0, "cmax": 1, "colorscale": COLOURS, "colorbar": bar}
    shape["annotations"] = []
    shape["margin"] = {"l": 44, "r": 8, "t": 26, "b": 46}
    return shape


def _heat_map(values: Tensor, x: Sequence[int], y: Sequence[int]) -> Json:
    return {
        "type": "heatmap",
        "x": list(x),
        "y": list(y),
        "z": [rounded(row) for row in values],
        "coloraxis": "coloraxis",
    }


def _heading(text: str, x: str, y: str) -> Json:
    return {
        "text": plain(text),
        "xref": f"{x} domain",
        "yref": f"{y} domain",
        "x": 0.5,
        "y": 1,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": INK},
    }


def rounded(values: Tensor) -> list[float | None]:
    """Three digits: colours show no more. What is no number becomes None."""
    finite = torch.isfinite(values).tolist()
    return [round(v, 3) if ok else None for v, ok in zip(values.tolist(), finite, strict=True)]


def _centred(length: int) -> list[int]:
    """Offsets, with 0 in the middle."""
    return list(range(-(length // 2), length - length // 2))


def _listed(indices: Sequence[int]) -> str:
    words = [str(index) for index in indices]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or "none"
