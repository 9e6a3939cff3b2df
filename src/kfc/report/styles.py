"""How lines and areas look: never told apart by colour alone."""

from __future__ import annotations

from dataclasses import dataclass

INK = "#1a1a1a"
# Of Okabe and Ito's colours, safe for the colour-blind, those with a contrast of 3 to white.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")
# Areas have an outline, so that all of them will do.
AREA_COLOURS = (
    *("#56B4E9", "#E69F00", "#009E73", "#F0E442"),
    *("#0072B2", "#D55E00", "#CC79A7", "#999999"),
)
# The lists' lengths have no common divisor: 210 lines go by before two look alike.
DASHES = ("", "7 4", "2 3", "9 3 2 3", "14 5", "5 2 1 2 1 2")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross")

_SWATCH_MARKERS = {
    "circle": "M15 8a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "square": "M15 5h6v6h-6z",
    "diamond": "M18 4l4 4-4 4-4-4z",
    "triangle-up": "M18 4l4 7h-8z",
    "x": "M15 4l3 3 3-3 1 1-3 3 3 3-1 1-3-3-3 3-1-1 3-3-3-3z",
    "triangle-down": "M18 12l4-7h-8z",
    "cross": "M17 4h2v3h3v2h-3v3h-2V9h-3V7h3z",
}


@dataclass(frozen=True)
class LineStyle:
    """
    Attributes:
        dash: lengths in pixels, as SVG has them; empty for a solid line.
    """

    colour: str
    dash: str
    marker: str

    def as_plotly(self) -> dict[str, str]:
        lengths = [f"{length}px" for length in self.dash.split()]
        dash = ",".join(lengths) or "solid"
        return {"colour": self.colour, "dash": dash, "marker": self.marker}


def line_style(index: int) -> LineStyle:
    return LineStyle(
        LINE_COLOURS[index % len(LINE_COLOURS)],
        DASHES[index % len(DASHES)],
        MARKERS[index % len(MARKERS)],
    )


def line_swatch(index: int) -> str:
    """The line with its marker, for a legend in HTML."""
    style = line_style(index)
    return (
        '<svg class="swatch" width="36" height="16" aria-hidden="true">'
        f'<path d="M0 8H36" stroke="{style.colour}" stroke-width="2" '
        f'stroke-dasharray="{style.dash}"/>'
        f'<path d="{_SWATCH_MARKERS[style.marker]}" fill="{style.colour}"/></svg>'
    )


def area_colour(index: int) -> str:
    return AREA_COLOURS[index % len(AREA_COLOURS)]


def area_hatched(index: int) -> bool:
    """Every other time through the colours."""
    return index // len(AREA_COLOURS) % 2 == 1


def area_swatch(index: int) -> str:
    hatching = f'<path d="M1 7L7 1M1 13L13 1M7 13L13 7" stroke="{INK}"/>'
    return (
        '<svg class="swatch" width="14" height="14" aria-hidden="true">'
        f'<rect x=".5" y=".5" width="13" height="13" fill="{area_colour(index)}" stroke="{INK}"/>'
        f"{hatching if area_hatched(index) else ''}</svg>"
    )
