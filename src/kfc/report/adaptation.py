"""What KFAC chose: learning rate, momentum and dampings, and how well its model predicted."""

from __future__ import annotations

from collections.abc import Sequence

from kfc.experiments.runs import Record
from kfc.report.figures import Figure, Json, layout, line, thinned

AT_UPDATE = "%{y:.3g} at update %{x}"
# (key, title, label, caption, scale of the vertical axis)
MEASURES = (
    ("lr", "Learning rate α", "α", "Of the natural gradient, by the quadratic model.", "y"),
    ("momentum", "Momentum μ", "μ", "Of the update before, by the same model.", ""),
    (
        "model_damping",
        "Damping λ of the model",
        "λ",
        "Less if the model predicts well, more if it predicts badly.",
        "y",
    ),
    (
        "factor_damping",
        "Damping γ of the factors",
        "γ",
        "The one of three that makes the model's minimum lowest.",
        "y",
    ),
    (
        "reduction_ratio",
        "Reduction ratio ρ",
        "ρ",
        "What the objective did over what the model said of it: 1 is a perfect prediction; above "
        "¾ λ falls, below ¼ it rises.",
        "",
    ),
)
CHANGES = "Predicted and actual decrease"
CHANGES_CAPTION = (
    "By how much an update lowers the objective on its own batch: as the model says, and, dotted, "
    "as measured. Increases are left out."
)


def adapts(record: Record) -> bool:
    return bool(_rows(record))


def adaptation_figures(records: Sequence[Record]) -> list[Figure]:
    """Of the runs that chose for themselves, each in the look of its index."""
    figures = []
    for key, title, label, caption, log in MEASURES:
        traces = [
            _line(index, record, rows, key)
            for index, record in enumerate(records)
            if (rows := [row for row in thinned(_rows(record)) if row.get(key) is not None])
        ]
        shape = layout("updates", label, log=log)
        figures.append(Figure(f"adaptation-{key}", title, caption, shape, [traces]))
    return [*figures, _changes(records)]


def _changes(records: Sequence[Record]) -> Figure:
    traces = []
    for index, record in enumerate(records):
        for key, dash in (("model_change", None), ("objective_change", "dot")):
            rows = [row for row in thinned(_rows(record)) if (row.get(key) or 0.0) < 0]
            if rows:
                trace = _line(index, record, [{**row, key: -row[key]} for row in rows], key)
                if dash:
                    trace["line"] = {**trace["line"], "dash": dash}
                traces.append(trace)
    shape = layout("updates", "decrease", log="y")
    return Figure("adaptation-changes", CHANGES, CHANGES_CAPTION, shape, [traces])


def _line(index: int, record: Record, rows: Sequence[Json], key: str) -> Json:
    updates, values = [row["update"] for row in rows], [row[key] for row in rows]
    return line(index, record.name, updates, values, hovertemplate=AT_UPDATE)


def _rows(record: Record) -> list[Json]:
    """The progress of a run that tells what it chose."""
    return [row for row in record.progress if row.get("model_damping") is not None]
