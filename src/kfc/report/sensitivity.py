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
    "upper edge; zero is drawn at half of the smallest loss, and hovering tells that it is zero."
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
    floor, edge = _range([point for grid in grids.values() for point in grid])
    traces = []
    for index, (name, grid) in enumerate(grids.items()):
        traces += [_curve(index, name, grid, floor), _failures(index, name, grid, edge)]
    shape = layout("learning rate", "averaged training loss", log="xy", height=380)
    drawn = [trace for trace in traces if trace["x"]]
    return Figure("sensitivity", "Loss by learning rate", CAPTION, shape, [drawn])


def grid_points(grid: Sequence[Record]) -> list[Point]:
    """The runs of one name by learning rate, all at the same time.

    Those of an optimizer that chooses its learning rate itself have no place among them.
    """
    ran = [record for record in grid if record.evaluations and record.config.lr is not None]
    sound = [record for record in ran if end_reason(record) != "diverged"]
    common = min((last_evaluation(record)["seconds"] for record in sound or ran), default=0.0)
    return sorted((_point(record, common) for record in ran), key=lambda point: point.lr)


def _point(record: Record, common: float) -> Point:
    # The first evaluation stands in for a run whose first one came later than the common time.
    row = [row for row in record.evaluations if row["seconds"] <= common] or record.evaluations[:1]
    diverged = end_reason(record) == "diverged"
    assert record.config.lr is not None
    return Point(record.config.lr, row[-1]["averaged_train_loss"], row[-1]["seconds"], diverged)


def _range(points: Sequence[Point]) -> tuple[float, float]:
    """Where zero is drawn, which has no place on a logarithmic axis, and where failures are."""
    positive = [loss for _, loss in _losses(points) if loss > 0]
    return min(positive, default=1.0) / 2, 2 * max(positive, default=1.0)


def _losses(points: Sequence[Point]) -> list[tuple[Point, float]]:
    """Of the points that have one to be drawn."""
    return [(p, p.loss) for p in points if not p.diverged and p.loss is not None]


def _curve(index: int, name: str, grid: Sequence[Point], floor: float) -> Json:
    drawn = _losses(grid)
    return line(
        index,
        name,
        [point.lr for point, _ in drawn],
        [max(loss, floor) for _, loss in drawn],
        customdata=[[f"{loss:.4g}", number(point.seconds)] for point, loss in drawn],
        hovertemplate=(
            "loss %{customdata[0]} at learning rate %{x:.3~g}, after %{customdata[1]} s"
        ),
    )


def _failures(index: int, name: str, grid: Sequence[Point], edge: float) -> Json:
    points = [point for point in grid if point.diverged or point.loss is None]
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
