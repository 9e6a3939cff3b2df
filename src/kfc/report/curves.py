"""Losses and errors while the runs went on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfc.experiments.runs import Record
from kfc.report.figures import Figure, Json, layout, plain, rounded, thinned
from kfc.report.formats import distinct_labels
from kfc.report.styles import line_style

# Their names are those of the evaluations' entries.
AXES = {"seconds": "seconds of training", "epoch": "epochs", "update": "updates"}
MEASURES = {
    "train_loss": ("Training loss", "training loss"),
    "test_loss": ("Test loss", "test loss"),
    "train_error": ("Training error", "training error (%)"),
    "test_error": ("Test error", "test error (%)"),
}


def curve_figures() -> list[Figure]:
    return [
        Figure(f"curve-{measure}", title, "", layout(AXES["seconds"], label, log="y"))
        for measure, (title, label) in MEASURES.items()
    ]


def curve_data(records: Sequence[Record], best: Sequence[Record]) -> Json:
    """What the page's script makes the curves of.

    A run's ``leader`` is the index of the best run of its name, whose look it shares.
    """
    leaders = {record.name: index for index, record in enumerate(best)}
    chosen = {id(record) for record in best}
    return {
        "axes": AXES,
        "measures": list(MEASURES),
        "runs": [
            _run(record, label, leaders[record.name], id(record) in chosen)
            for record, label in zip(records, distinct_labels(records), strict=True)
        ],
    }


def _run(record: Record, label: str, leader: int, is_best: bool) -> Json:
    rows = thinned(record.evaluations)

    def column(key: str) -> list[Any]:
        return rounded([row.get(key) for row in rows])

    return {
        "label": plain(label),
        "leader": leader,
        "best": is_best,
        "style": line_style(leader).as_plotly(),
        "x": {axis: column(axis) for axis in AXES},
        "averaged": {measure: column(f"averaged_{measure}") for measure in MEASURES},
        "raw": {measure: column(measure) for measure in MEASURES},
    }
