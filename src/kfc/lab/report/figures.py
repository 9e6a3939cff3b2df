"""Figures as plain plotly descriptions, which ``page.js`` draws, and the styles they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

Json = dict[str, Any]
Item = TypeVar("Item")

INK = "#1a1a1a"
MAX_LABEL_LENGTH = 40
MAX_POINTS = 1500

# The first colours are those of Okabe and Ito, which are safe for colour-blind readers. Lines use
# colours with a contrast to white of at least 3; areas have an outline.
LINE_COLOURS = (
    *("#0072B2", "#D55E00", "#008A5E", "#B8478E", "#000000"),
    *("#5E3FBF", "#8A7B00", "#8B4A20", "#6E6E6E", "#0B7A8A", "#B3123A"),
)
AREA_COLOURS = (
    *("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00"),
    *("#CC79A7", "#999999", "#882255", "#44AA99", "#DDCC77", "#332288"),
)
# The lengths of the three lists have no common divisor, so the first 385 lines all look different.
DASHES = ("", "7 4", "2 3", "9 3 2 3", "14 5")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross")


@dataclass(frozen=True)
class Figure:
    """A plotly figure.

    Attributes:
        variants: lists of traces, one of which is drawn; empty if ``page.js`` makes the traces.
        title: empty, as the caption, if the template of the page has the text.
    """

    id: str
    layout: Json
    variants: Sequence[list[Json]] = ()
    title: str = ""
    caption: str = ""


def line_style(index: int) -> tuple[str, str, str]:
    """Return the colour, dash lengths in pixels (empty if solid) and marker of line ``index``."""
    colour, dash = LINE_COLOURS[index % len(LINE_COLOURS)], DASHES[index % len(DASHES)]
    return colour, dash, MARKERS[index % len(MARKERS)]


def area_style(index: int) -> tuple[str, bool]:
    """Return the colour of area ``index``, and whether it is hatched."""
    rounds, colour = divmod(index, len(AREA_COLOURS))
    return AREA_COLOURS[colour], rounds % 2 == 1


def layout(x_title: str, y_title: str, *, log: str = "", height: int = 340) -> Json:
    """Return a plotly layout with two axes, in the style of ``page.js``.

    Args:
        log: the axes with a logarithmic scale: "", "x", "y" or "xy".
    """
    axes = {
        f"{axis}axis": {"title": {"text": title}, "type": "log" if axis in log else "linear"}
        for axis, title in (("x", x_title), ("y", y_title))
    }
    return {**axes, "height": height}


def line(index: int, name: str, x: Sequence[Any], y: Sequence[Any], **options: Any) -> Json:
    """Return a trace in the style of line ``index``; ``options`` are added to it.

    Args:
        name: any text; it is escaped.
    """
    colour, lengths, marker = line_style(index)
    dash = ",".join(f"{length}px" for length in lengths.split()) or "solid"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(name),
        "x": x,
        "y": y,
        "line": {"color": colour, "dash": dash, "width": 2},
        "marker": {"color": colour, "symbol": marker, "size": 7, "maxdisplayed": 12},
        "hovertemplate": "%{y:.3g} at update %{x}",
        **options,
    }


def is_constant(figure: Figure) -> bool:
    """Return whether all lines of the figure have several points, and none of them changes."""
    lines = [
        [value for value in trace["y"] if value is not None]
        for variant in figure.variants
        for trace in variant
    ]
    return bool(lines) and all(len(y) > 1 and len(set(y)) == 1 for y in lines)


def plain(text: str, max_length: int = MAX_LABEL_LENGTH) -> str:
    """Return text in one line for a label, escaped because plotly interprets HTML in labels."""
    words = " ".join(text.split())
    short = words if len(words) <= max_length else words[: max_length - 1] + "…"
    return escape(short, quote=False)


def thinned(items: Sequence[Item], most: int = MAX_POINTS) -> Sequence[Item]:
    """Return every n-th item and the last one, so that about ``most`` remain."""
    step = -(-len(items) // most)
    return items if step <= 1 else [*items[:-1:step], items[-1]]
