"""What figures share: they are plain plotly descriptions, drawn by ``page.js``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

from kfc.report.styles import INK, line_style

Json = dict[str, Any]
Item = TypeVar("Item")

GRID = "#e3e3e3"
LONGEST_LABEL = 40
MOST_POINTS = 1500


@dataclass(frozen=True)
class Figure:
    """
    Attributes:
        variants: lists of plotly traces, of which one is drawn; none: the page's script makes them.
    """

    id: str
    title: str
    caption: str
    layout: Json
    variants: Sequence[list[Json]] = ()


def layout(x_title: str, y_title: str, *, log: str = "", height: int = 340) -> Json:
    """
    Args:
        log: the axes with a logarithmic scale: "", "x", "y" or "xy".
    """
    axes = {
        f"{axis}axis": {
            "title": {"text": title},
            "type": "log" if axis in log else "linear",
            "automargin": True,
            "zeroline": False,
            "gridcolor": GRID,
            "linecolor": INK,
            "exponentformat": "power",
        }
        for axis, title in (("x", x_title), ("y", y_title))
    }
    return {
        **axes,
        "height": height,
        "margin": {"l": 56, "r": 14, "t": 14, "b": 48},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"namelength": -1, "bgcolor": "#ffffff", "font": {"color": INK}},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
    }


def line(index: int, name: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Json:
    """A trace in the style of that index; ``name`` is anybody's text."""
    style = line_style(index).as_plotly()
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(name),
        "x": rounded(x),
        "y": rounded(y),
        "line": {"color": style["colour"], "dash": style["dash"], "width": 2},
        "marker": {
            "color": style["colour"],
            "symbol": style["marker"],
            "size": 7,
            "maxdisplayed": 12,
        },
        **more,
    }


def plain(text: str, longest: int = LONGEST_LABEL) -> str:
    """Text that plotly shows as it is, though it takes some HTML in labels."""
    words = " ".join(text.split())
    return escape(words if len(words) <= longest else words[: longest - 1] + "…", quote=False)


def rounded(values: Sequence[Any]) -> list[Any]:
    """Six digits are more than a figure shows, and half of what floats take in a file.

    What is no number becomes None, which is left out.
    """
    return [_rounded(v) if isinstance(v, float) else v for v in values]


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def thinned(items: Sequence[Item], most: int = MOST_POINTS) -> Sequence[Item]:
    """Every n-th, with the last one."""
    step = -(-len(items) // most)
    return items if step <= 1 else [*items[:-1:step], items[-1]]
