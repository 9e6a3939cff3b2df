"""A self-contained page with the results as SVG figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

OURS_COLOUR, THEIRS_COLOUR, PLAIN_COLOUR = "#0072b2", "#8a8a8a", "#444444"

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
svg { width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: #222; }
figcaption, .small { color: #555; font-size: .9rem; } figure { margin: 0; }
td, th { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top; }
"""


def write_page(results: dict[str, Any], path: Path) -> None:
    """Write the results of a benchmark as a page."""
    parts = [f"<h1>kfc: benchmarks on {escape(results['network'])}, batch {results['batch']}</h1>"]
    about = {**results["machine"], **results["versions"]}
    parts.append(f'<p class="small">{escape(", ".join(f"{k} {v}" for k, v in about.items()))}</p>')
    if "steps" in results:
        caption = (
            "Time of a training step relative to that of SGD in the same round: medians, with "
            "quartiles as thin lines. Logarithmic axis."
        )
        parts += ["<h2>A training step</h2>", figure(bars(results["steps"]), caption)]
    if "default" in results:
        found = [f"{ratio:.2f} in steps {steps}" for steps, ratio in results["default"].items()]
        parts.append(f"<p>KFC with default settings, mean ratio to SGD: {', '.join(found)}.</p>")
    if "moments" in results:
        rows = [
            {
                "method": r["case"],
                "ratio": r["ratio"],
                "ratio_quartiles": r["ratio_quartiles"],
                "ours": True,
            }
            for r in results["moments"]
        ]
        caption = "Speed-up of patch moments over unfold-and-multiply. Logarithmic axis."
        parts += ["<h2>Patch moments</h2>", figure(bars(rows), caption)]
    for growth in results.get("growth", []):
        slopes = ", ".join(f"{name} {value:.2f}" for name, value in growth["slopes"].items())
        parts.append(f"<h2>Growth in {escape(growth['what'])}</h2>")
        parts.append(
            figure(lines(growth), f"Milliseconds, both axes logarithmic; slopes: {slopes}")
        )
    if "first" in results:
        parts += ["<h2>First step and memory</h2>", first_table(results["first"])]
    for method, why in results["failures"].items():
        parts.append(f"<p><strong>{escape(method)} failed:</strong> {escape(why)}</p>")
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>kfc benchmarks</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def figure(drawing: str, caption: str) -> str:
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def colour(name: str, ours: bool) -> str:
    if ours or name.startswith("KFC"):
        return OURS_COLOUR
    return PLAIN_COLOUR if name == "SGD" else THEIRS_COLOUR


def bars(rows: Sequence[dict[str, Any]]) -> str:
    """Return horizontal bars that start at 1, on a logarithmic axis."""
    left, width, height = 290, 800, 26
    most = max(row["ratio_quartiles"][1] for row in rows) * 1.15
    lowest = min(0.9, *(row["ratio_quartiles"][0] for row in rows))

    def place(value: float) -> float:
        part = math.log(value / lowest) / math.log(most / lowest)
        return left + part * (width - left - 60)

    drawn = []
    for tick in (1, 2, 5, 10, 20, 50, 100):
        if tick <= most:
            x, bottom = place(tick), height * len(rows)
            drawn.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}" stroke="#ddd"/>'
                f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>'
            )
    for index, row in enumerate(rows):
        y = height * index
        start, end = sorted((place(1), place(row["ratio"])))
        low, high = (place(value) for value in row["ratio_quartiles"])
        fill = colour(row["method"], row.get("ours", False))
        drawn.append(
            f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(row["method"])}</text>'
            f'<rect x="{start:.1f}" y="{y + 5}" width="{max(1.5, end - start):.1f}" height="16" '
            f'fill="{fill}"/>'
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 13}" y2="{y + 13}" stroke="#000"/>'
            f'<text x="{max(end, high) + 6:.1f}" y="{y + 17}">{row["ratio"]:.2f}</text>'
        )
    return f'<svg viewBox="0 0 {width} {height * len(rows) + 24}" role="img">{"".join(drawn)}</svg>'


def lines(growth: dict[str, Any]) -> str:
    """Return lines of times by size, on logarithmic axes."""
    left, right, width, height = 60, 640, 760, 260
    sizes = growth["sizes"]
    times = [value for values in growth["milliseconds"].values() for value in values]
    low, high = min(times) * 0.8, max(times) * 1.25

    def x(size: float) -> float:
        part = math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0])
        return left + 20 + part * (right - left - 40)

    def y(time: float) -> float:
        return height - 30 - math.log(time / low) / math.log(high / low) * (height - 50)

    drawn = []
    for size in sizes:
        drawn.append(
            f'<text x="{x(size):.0f}" y="{height - 8}" text-anchor="middle">{size:g}</text>'
        )
    for power in range(-1, 6):
        if low <= 10.0**power <= high:
            level = y(10.0**power)
            drawn.append(
                f'<line x1="{left}" x2="{right}" y1="{level:.0f}" y2="{level:.0f}" stroke="#ddd"/>'
                f'<text x="{left - 6}" y="{level + 4:.0f}" text-anchor="end">{10.0**power:g}</text>'
            )
    for name, values in growth["milliseconds"].items():
        points = [(x(size), y(value)) for size, value in zip(sizes, values, strict=True)]
        stroke = colour(name, name == "kfc")
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2.5"/>'
        )
        drawn += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{stroke}"/>' for a, b in points]
        drawn.append(
            f'<text x="{points[-1][0] + 10:.0f}" y="{points[-1][1] + 4:.0f}">{escape(name)}</text>'
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(drawn)}</svg>'


def first_table(rows: Sequence[dict[str, Any]]) -> str:
    body = "".join(
        f"<tr><td>{escape(r['method'])}</td>"
        f"<td>{(r['building'] + r['first_step']) / r['sgd_step']:.2f}</td>"
        f"<td>{r['mebibytes']:.0f}</td><td>{r['mebibytes'] / r['sgd_mebibytes']:.2f}</td></tr>"
        for r in rows
    )
    head = "<tr><th>method</th><th>building and first step / SGD step</th>"
    return f"<table>{head}<th>peak MiB</th><th>/ SGD's peak</th></tr>{body}</table>"
