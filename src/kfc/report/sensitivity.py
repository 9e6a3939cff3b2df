"""How much the learning rate matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kfc.experiments.runs import Record
from kfc.report.figures import Figure, Json, layout, line
from kfc.report.formats import number
from kfc.report.styles import INK
from kfc.report.summary import end_reason, last_evaluation

CAPTION = (
    "Averaged training loss against the learning rate, after equal seconds of training within a "
    "method: those of its shortest run that did not diverge. Diverged runs are crosses along the "
    "upper edge."
)


@dataclass(frozen=True)
class Point:
    """
    Attributes:
        loss: at the common time; None if it was not finite.
    """

    lr: float
    loss: float | None
    seconds: float
    diverged: bool


def sensitivity_figure(records: Sequence[Record], names: Sequence[str]) -> Figure | None:
    """None unless some name has two learning rates."""
    grids = {name: grid_points([r for r in records if r.name == name]) for name in names}
    if all(len({point.lr for point in grid}) < 2 for grid in grids.values()):
        return None
    losses = [point.loss for grid in grids.values() for point in grid if _is_drawn(point)]
    edge = 2 * max((loss for loss in losses if loss is not None), default=1.0)
    traces = []
    for index, (name, grid) in enumerate(grids.items()):
        traces += [_curve(index, name, grid), _failures(index, name, grid, edge)]
    shape = layout("learning rate", "averaged training loss", log="xy", height=380)
    drawn = [trace for trace in traces if trace["x"]]
    return Figure("sensitivity", "Loss by learning rate", CAPTION, shape, [drawn])


def grid_points(grid: Sequence[Record]) -> list[Point]:
    """The runs of one name by learning rate, all at the same time."""
    ran = [record for record in grid if record.evaluations]
    sound = [record for record in ran if end_reason(record) != "diverged"]
    common = min((last_evaluation(record)["seconds"] for record in sound or ran), default=0.0)
    return sorted((_point(record, common) for record in ran), key=lambda point: point.lr)


def _point(record: Record, common: float) -> Point:
    # The first evaluation stands in for a run whose first one came later than the common time.
    row = [row for row in record.evaluations if row["seconds"] <= common] or record.evaluations[:1]
    diverged = end_reason(record) == "diverged"
    return Point(record.config.lr, row[-1]["averaged_train_loss"], row[-1]["seconds"], diverged)


def _is_drawn(point: Point) -> bool:
    return not point.diverged and bool(point.loss)


def _curve(index: int, name: str, grid: Sequence[Point]) -> Json:
    points = [point for point in grid if _is_drawn(point)]
    return line(
        index,
        name,
        [point.lr for point in points],
        [point.loss for point in points],
        customdata=[number(point.seconds) for point in points],
        hovertemplate="loss %{y:.4g} at learning rate %{x:.3~g}, after %{customdata} s",
    )


def _failures(index: int, name: str, grid: Sequence[Point], edge: float) -> Json:
    points = [point for point in grid if not _is_drawn(point)]
    words = ["diverged" if point.diverged else "no finite loss" for point in points]
    trace = line(index, name, [point.lr for point in points], [edge for _ in points])
    return {
        **trace,
        "mode": "markers",
        "marker": {
            "symbol": "x",
            "size": 11,
            "color": trace["line"]["color"],
            "line": {"color": INK, "width": 1},
        },
        "customdata": words,
        "hovertemplate": "%{customdata} at learning rate %{x:.3~g}",
    }
