"""A self-contained HTML page with the curves of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kfc.experiments.training import Run
from kfc.report.table import summary_rows

# Okabe and Ito's colours, told apart by the colour-blind too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

MEASURES = (
    ("train_loss", "training loss"),
    ("test_loss", "test loss"),
    ("train_error", "training error (%)"),
    ("test_error", "test error (%)"),
)
AXES = (("updates", "updates"), ("seconds", "seconds of training"))

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 75rem; margin: 2rem auto;
  padding: 0 1rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; white-space: nowrap; }}
th, td {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
@media (max-width: 40rem) {{
  table {{ white-space: normal; font-size: .85rem; }}
  th, td {{ padding: .3rem; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{introduction}</p>
<div class="scroll">{table}</div>
{figures}
</body>
</html>
"""


def write_page(path: Path, title: str, introduction: str, runs: Sequence[Run]) -> None:
    """Write the page; it needs no network to be read."""
    figures = []
    for index, (axis, label) in enumerate(AXES):
        figure = curves(runs, axis, label)
        html = figure.to_html(
            full_html=False,
            include_plotlyjs=index == 0,
            default_width="100%",
            config={"responsive": True},
        )
        figures.append(f'<div class="scroll">{html}</div>')
    page = PAGE.format(
        title=escape(title),
        introduction=escape(introduction),
        table=_table(summary_rows(runs)),
        figures="\n".join(figures),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def curves(runs: Sequence[Run], axis: str, label: str) -> go.Figure:
    """Loss and error, training and test, against one axis."""
    figure = make_subplots(rows=2, cols=2, subplot_titles=[title for _, title in MEASURES])
    for colour, run in zip(COLOURS, runs, strict=False):
        for index, (measure, _) in enumerate(MEASURES):
            figure.add_scatter(
                x=[getattr(evaluation, axis) for evaluation in run.evaluations],
                y=[getattr(evaluation, measure) for evaluation in run.evaluations],
                name=run.name,
                legendgroup=run.name,
                showlegend=index == 0,
                mode="lines+markers",
                line={"color": colour},
                row=index // 2 + 1,
                col=index % 2 + 1,
            )
    figure.update_xaxes(title_text=label)
    figure.update_yaxes(type="log", row=1)
    figure.update_layout(
        height=700,
        template="plotly_white",
        hovermode="x unified",
        title=f"against {label}",
        legend={"orientation": "h", "y": 1.1},
        margin={"l": 40, "r": 20},
    )
    return figure


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head, *body = rows
    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in body)}</table>"
