"""Training curves, and losses as a function of the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kfc.lab.report.figures import INK, Figure, Json, layout, line, thinned
from kfc.lab.report.summary import end_reason, last_evaluation
from kfc.lab.report.tables import distinct_labels, number
from kfc.lab.runs import Record

# The keys are those of an evaluation.
AXES = {"seconds": "seconds of training", "epoch": "epochs", "update": "updates"}
MEASURES = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_error": "training error (%)",
    "test_error": "test error (%)",
}

# Training curves


def curve_section(records: Sequence[Record], best: Sequence[Record]) -> dict[str, Any]:
    """Return the data of the section on training curves, whose traces ``page.js`` makes."""
    return {
        "names": [record.name for record in best],
        "has_others": len(records) > len(best),
        "curves": {"axes": AXES, "measures": list(MEASURES), "runs": curves_of(records, best)},
        "figures": [
            Figure(f"curve-{measure}", layout(AXES["seconds"], label, log="y"))
            for measure, label in MEASURES.items()
        ],
    }


def curves_of(records: Sequence[Record], best: Sequence[Record]) -> list[Json]:
    """Return the values and style of each run's curves.

    The ``group`` of a run is the index of its name. Runs of one group share a style.
    """
    names = [record.name for record in best]
    curves = []
    for record, label in zip(records, distinct_labels(records), strict=True):
        group = names.index(record.name)
        style = line(group, label, [], [])
        rows = thinned(record.evaluations)
        curves.append(
            {
                "label": style["name"],
                "group": group,
                "best": record in best,
                "line": style["line"],
                "marker": style["marker"],
                "x": {axis: [row.get(axis) for row in rows] for axis in AXES},
                "averaged": {key: [row.get(f"averaged_{key}") for row in rows] for key in MEASURES},
                "raw": {key: [row.get(key) for row in rows] for key in MEASURES},
            }
        )
    return curves


# Learning-rate sensitivity


class Point(NamedTuple):
    """The loss of a run after ``seconds`` of training; ``None`` if it was not finite."""

    lr: float
    loss: float | None
    seconds: float
    diverged: bool


def sensitivity_section(records: Sequence[Record], names: Sequence[str]) -> dict[str, Any] | None:
    """Return losses by learning rate, or ``None`` if no name has runs with two learning rates."""
    grids = [learning_rate_points([r for r in records if r.name == name]) for name in names]
    if all(len({point.lr for point in grid}) < 2 for grid in grids):
        return None
    losses = [p.loss for grid in grids for p in grid if not p.diverged and p.loss and p.loss > 0]
    floor, edge = min(losses, default=1.0) / 2, 2 * max(losses, default=1.0)
    traces: list[Json] = []
    for index, (name, grid) in enumerate(zip(names, grids, strict=True)):
        traces += _method_traces(index, name, grid, floor, edge)
    shape = layout("learning rate", "averaged training loss", log="xy", height=380)
    figure = Figure("sensitivity", shape, [[trace for trace in traces if trace["x"]]])
    return {"legend": list(enumerate(names)), "figures": [figure]}


def learning_rate_points(records: Sequence[Record]) -> list[Point]:
    """Return the runs of one name by learning rate, all after the same training time.

    Runs without a learning rate, whose optimizer adapts it, are left out.
    """
    ran = [
        record for record in records if record.evaluations and record.config.method.lr is not None
    ]
    sound = [record for record in ran if end_reason(record) != "diverged"]
    seconds = min((last_evaluation(record)["seconds"] for record in sound or ran), default=0.0)
    points = []
    for record in ran:
        # If even the first evaluation was later than `seconds`, it is the nearest one.
        early = [row for row in record.evaluations if row["seconds"] <= seconds]
        row = early[-1] if early else record.evaluations[0]
        loss, diverged = row["averaged_train_loss"], end_reason(record) == "diverged"
        points.append(Point(record.config.method.lr or 0.0, loss, row["seconds"], diverged))
    return sorted(points, key=lambda point: point.lr)


def _method_traces(
    index: int, name: str, grid: Sequence[Point], floor: float, edge: float
) -> tuple[Json, Json]:
    """Return a line of losses, and crosses at ``edge`` for runs without a finite loss.

    A logarithmic axis has no zero, which is drawn at ``floor``.
    """
    drawn = [(p, p.loss) for p in grid if not p.diverged and p.loss is not None]
    losses = line(
        index,
        name,
        [point.lr for point, _ in drawn],
        [max(loss, floor) for _, loss in drawn],
        customdata=[[f"{loss:.4g}", number(point.seconds)] for point, loss in drawn],
        hovertemplate="loss %{customdata[0]} at learning rate %{x:.3~g}, after %{customdata[1]} s",
    )
    failed = [point for point in grid if point.diverged or point.loss is None]
    crosses = line(
        index,
        name,
        [point.lr for point in failed],
        [edge for _ in failed],
        mode="markers",
        customdata=["diverged" if p.diverged else "no finite loss" for p in failed],
        hovertemplate="%{customdata} at learning rate %{x:.3~g}",
    )
    outline = {"color": INK, "width": 1}
    crosses["marker"] |= {"symbol": "x", "size": 11, "maxdisplayed": 0, "line": outline}
    return losses, crosses
