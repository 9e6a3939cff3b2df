"""Parts of SVG figures: the document, lines, texts, and panels with two axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

GRID, FRAME = "#e5e7eb", "#9ca3af"


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return an SVG document; the title is its text for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="system-ui, sans-serif" font-size="12" role="img" aria-labelledby="t">',
            f'<title id="t">{escape(title, quote=False)}</title>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    """Return a text; ``anchor`` says which part of it is at x: start, middle or end."""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}"{at}>{escape(content, quote=False)}</text>'


def segment(x1: float, x2: float, y1: float, y2: float, stroke: str) -> str:
    return f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" stroke="{stroke}"/>'


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from values to pixels.

    Attributes:
        low, high: the values at its ends.
        start, stop: the pixels there.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return the pixel of a value; values beyond the ends are placed there."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low)
        return round(self.start + share * (self.stop - self.start), 1)

    def ticks(self) -> list[float]:
        """Return round values, few enough for their labels not to touch."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            span = self.high / self.low
            steps = (1, 2, 5) if span < 20 else (1, 3) if span < 1000 else (1,)
            values = [step * 10.0**power for power in powers for step in steps]
        else:
            size = 10.0 ** math.floor(math.log10((self.high - self.low) / 5))
            step = next(s * size for s in (1, 2, 5, 10) if (self.high - self.low) / (s * size) <= 6)
            values = [step * count for count in range(math.floor(self.high / step) + 1)]
        return [float(f"{each:.6g}") for each in values if self.low <= each <= self.high]


@dataclass(frozen=True)
class Line:
    """A curve of a panel: points (x, y) in order, its colour, and the lengths of its dashes."""

    points: Sequence[tuple[float, float]]
    colour: str
    dashes: str = ""


@dataclass(frozen=True)
class Panel:
    """A rectangle with two axes, in which lines are drawn.

    Attributes:
        goals: values of y with a dotted line across.
    """

    x: Axis
    y: Axis
    x_title: str
    y_title: str
    goals: Sequence[float] = ()

    def draw(self, lines: Sequence[Line]) -> list[str]:
        """Return the frame, the axes and the lines, without points above the panel."""
        left, right, bottom, top = self.x.start, self.x.stop, self.y.start, self.y.stop
        parts = []
        for value in self.y.ticks():
            y = self.y.place(value)
            parts.append(segment(left, right, y, y, GRID))
            parts.append(text(left - 6, y + 4, f"{value:g}", "end"))
        for value in self.x.ticks():
            x = self.x.place(value)
            parts.append(segment(x, x, top, bottom, GRID))
            parts.append(text(x, bottom + 16, f"{value:,g}", "middle"))
        parts.append(
            f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" '
            f'fill="none" stroke="{FRAME}"/>'
        )
        parts.append(text((left + right) / 2, bottom + 34, self.x_title, "middle"))
        parts.append(text(left, top - 8, self.y_title))
        for value in self.goals:
            y = self.y.place(value)
            parts.append(
                f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="black" '
                'stroke-dasharray="1 4"/>'
            )
        return [*parts, *filter(None, map(self._polyline, lines))]

    def _polyline(self, line: Line) -> str:
        """Return a line; empty if it has fewer than two points."""
        inside = [(x, y) for x, y in line.points if y <= self.y.high]
        points = " ".join(f"{self.x.place(x)},{self.y.place(y)}" for x, y in inside)
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="{line.colour}" '
            f'stroke-width="2"{dashes}/>'
            if len(inside) > 1
            else ""
        )
