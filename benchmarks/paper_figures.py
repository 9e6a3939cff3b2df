"""Make the figures and tables of docs/reproduction.md from the recorded curves of the paper's runs.

python benchmarks/paper_figures.py                      # what `make figures` does
python benchmarks/paper_figures.py --from runs/figures  # take the curves from runs first
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drawing import Axis, Line, Panel, document, segment, text
from paper_curves import NOT_CHOSEN, TEST, TRAIN, Curve, Row, chosen, collect, read_curves, seeds_of

from kfc.lab.report.figures import LINE_COLOURS
from kfc.lab.report.summary import END_REASONS

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "reproduction.md"

# The figures


@dataclass(frozen=True)
class Drawing:
    """A figure of the paper.

    Attributes:
        methods: names of the runs that are drawn, in order.
        goals: the paper's training and test errors, in percent, drawn as dotted lines.
        count: the unit of its table.
        worst_error, worst_loss: the upper ends of the axes.
    """

    comparison: str
    title: str
    methods: Sequence[str]
    goals: Sequence[float]
    count: str = "processor_seconds"
    worst_error: float = 60
    worst_loss: float = 2.0


DRAWINGS = (
    Drawing("figure3-cifar10", "Figure 3, CIFAR-10", ("SGD", "KFC"), (6, 19)),
    Drawing("figure4", "Figure 4", ("SGD", "KFC", "SGD, BN", "KFC, BN"), (6,)),
    Drawing("figure5", "Figure 5, CIFAR-10, batches of 4096", ("SGD", "KFC"), (10,), "update"),
    Drawing("figure3-svhn", "Figure 3, subset of SVHN", ("SGD", "KFC"), ()),
    Drawing("figure5-svhn", "Figure 5, subset of SVHN", ("SGD", "KFC"), (), "update"),
)
COLOURS = dict(zip(("KFC", "SGD", "KFC, BN", "SGD, BN"), LINE_COLOURS, strict=False))
AXES = {
    "processor_seconds": "seconds on one core",
    "epoch": "epochs",
    "update": "updates",
}
WIDTH, HEIGHT = 250, 190  # of a panel
LEFT, TOP, RIGHT, BOTTOM, BETWEEN = 44, 76, 16, 50, 66  # around panels, and between two rows


def figure(drawing: Drawing, curves: Sequence[Curve]) -> str:
    """Return an SVG: error and loss against seconds, epochs and updates."""
    parts: list[str] = []
    for index, curve in enumerate(curves):
        x = LEFT + 170 * index
        parts.append(
            segment(x, x + 24, 20, 20, COLOURS[curve.name]).replace("/>", ' stroke-width="3"/>')
        )
        parts.append(text(x + 30, 24, f"{curve.name}, lr {curve.settings['lr']:g}"))
    parts.append(
        text(LEFT, 46, "Solid: training set. Dashed: test set. Dotted: the paper's errors.")
    )
    for column, (count, title) in enumerate(AXES.items()):
        high = max(curve.last[count] for curve in curves)
        start = LEFT + column * (WIDTH + LEFT + RIGHT)
        x_axis = Axis(0, high, start, start + WIDTH)
        if count == "update":
            low = min(row[count] for curve in curves for row in curve.rows if row[count] > 0)
            x_axis = Axis(low, high, start, start + WIDTH, log=True)
            title += " (logarithmic)"
        for line, (measure, name, top, goals) in enumerate(_lines_of_panels(drawing)):
            upper = TOP + line * (HEIGHT + BETWEEN)
            y_axis = Axis(0, top, upper + HEIGHT, upper)
            panel = Panel(x_axis, y_axis, title, name, goals)
            parts += panel.draw(list(_lines(curves, count, measure)))
    width = 3 * (WIDTH + LEFT + RIGHT)
    height = TOP + 2 * HEIGHT + BETWEEN + BOTTOM
    return document(width, height, f"{drawing.title}: error and loss of KFC and SGD", parts)


def _lines_of_panels(drawing: Drawing) -> list[tuple[str, str, float, Sequence[float]]]:
    return [
        ("error", "error (%)", drawing.worst_error, drawing.goals),
        ("loss", "loss", drawing.worst_loss, ()),
    ]


def _lines(curves: Sequence[Curve], count: str, measure: str) -> Iterator[Line]:
    for curve in curves:
        for split, dashes in (("train", ""), ("test", "5 3")):
            key = f"averaged_{split}_{measure}"
            points = [(row[count], row[key]) for row in curve.rows if row[key] is not None]
            yield Line(
                [p for p in points if count != "update" or p[0] > 0], COLOURS[curve.name], dashes
            )


# The tables


class Goal(NamedTuple):
    """An error to reach, in percent, and the unit of what is needed for it."""

    measure: str
    value: float
    count: str = "processor_seconds"

    def __str__(self) -> str:
        return f"{self.value:g}% {'training' if self.measure == TRAIN else 'test'} error"


@dataclass(frozen=True)
class Claim:
    """A number of the paper: what both methods need to reach an error.

    Attributes:
        paper: the paper's numbers for KFC, SGD and their ratio.
    """

    data: str
    comparison: str
    goal: Goal
    paper: tuple[str, str, str]


CLAIMS = (
    Claim("CIFAR-10", "figure3-cifar10", Goal(TEST, 19.0), ("3 min", "9 min", "3x")),
    Claim("CIFAR-10", "figure3-cifar10", Goal(TRAIN, 6.0), ("4 min", "30 min", "7.5x")),
    Claim("SVHN", "figure3-svhn", Goal(TEST, 2.78), ("120 min", "not in 250 min", "> 2x")),
    Claim(
        "CIFAR-10, batch 4096",
        "figure5",
        Goal(TRAIN, 10.0, "update"),
        ("300 updates", "6,000 updates", "20x"),
    ),
)


def headline_table() -> str:
    """Return a table with a row for every headline number of the paper."""
    lines = [
        "| to reach | paper: KFC | SGD | ratio | here: KFC | SGD | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        here = reached(chosen(claim.comparison), "KFC", "SGD", claim.goal)
        what = f"{claim.data}, {claim.goal}"
        lines.append(f"| {what} | {' | '.join(claim.paper)} | {' | '.join(here)} |")
    cost = epoch_cost()
    lines.append(f"| cost of an epoch, relative to SGD's | < 2x | | | {cost} | | |")
    return "\n".join(lines)


def reached(curves: dict[str, Curve], ours: str, theirs: str, goal: Goal) -> list[str]:
    """Return what two methods needed, and the ratio; of a run that was not so far, where it is."""
    rows = {}
    cells = []
    for name in (ours, theirs):
        curve = curves.get(name)
        if curve is None:
            cells.append("not run")
            continue
        rows[name] = curve.first_reaching(goal.measure, goal.value)
        cells.append(_amount(rows[name], goal) or _position(curve, goal))
    ratio = ""
    if len(rows) == 2 and (own := rows[ours]) is not None:
        other, bound = (rows[theirs], "") if rows[theirs] else (curves[theirs].last, "> ")
        assert other is not None
        ratio = f"{bound}{other[goal.count] / own[goal.count]:.2g}x"
        if bound and other[goal.count] <= own[goal.count]:
            ratio = "open"
    return [*cells, ratio]


def _amount(row: Row | None, goal: Goal) -> str:
    if row is None:
        return ""
    if goal.count == "update":
        return f"{row['update']:,} updates"
    return f"{row[goal.count]:,.0f} s, {row['update']:,} updates"


def _position(curve: Curve, goal: Goal) -> str:
    """Return where a run is that has not reached the error: its best, and how far it got."""
    best = min(row[goal.measure] for row in curve.rows if row[goal.measure] is not None)
    last = curve.last
    seconds = "" if goal.count == "update" else f" and {last['processor_seconds']:,.0f} s"
    return f"not in {last['update']:,} updates{seconds} ({best:.3g}%)"


GOALS = tuple((TRAIN, error) for error in (30, 20, 10, 6)) + tuple(
    (TEST, error) for error in (30, 25, 22, 20, 19)
)


def results_of(drawing: Drawing) -> str:
    """Return the picture, and a table of what all methods needed to several errors."""
    curves = chosen(drawing.comparison)
    methods = {name: curves[name] for name in drawing.methods if name in curves}
    if not methods:
        return "Not run."
    picture = f"![{drawing.title}: error and loss](pictures/{_file_of(drawing)})"
    return f"{picture}\n\n{goals_table(methods, drawing.count)}"


def goals_table(curves: dict[str, Curve], count: str) -> str:
    """Return a table of what runs needed to several errors, those that none reached left out.

    Args:
        count: the unit.
    """
    lines = [f"| to reach | {' | '.join(curves)} |", "|---" * (1 + len(curves)) + "|"]
    for measure, value in GOALS:
        goal = Goal(measure, value, count)
        rows = [curve.first_reaching(measure, value) for curve in curves.values()]
        if any(rows):
            cells = [_amount(row, goal) or "-" for row in rows]
            lines.append(f"| {goal} | {' | '.join(cells)} |")
    ends = [f"{curve.last['update']:,}" for curve in curves.values()]
    lines.append(f"| updates so far | {' | '.join(ends)} |")
    return "\n".join(lines)


def baselines_table() -> str:
    """Return the table of other methods than SGD, and of SGD and KFC from figure 3."""
    others = chosen("baselines")
    if not others:
        return "Not run."
    return goals_table({**chosen("figure3-cifar10"), **others}, "processor_seconds")


def epoch_cost() -> str:
    """Return the processor time of an epoch of KFC relative to SGD's, on the same network."""
    texts = []
    for comparison, ours, theirs, what in (
        ("figure3-cifar10", "KFC", "SGD", ""),
        ("figure4", "KFC, BN", "SGD, BN", " with batch normalisation"),
        ("figure5", "KFC", "SGD", " at batch 4096"),
    ):
        curves = chosen(comparison)
        paces = [pace_of(curves[name]) for name in (ours, theirs) if name in curves]
        if len(paces) == 2 and all(paces):
            texts.append(f"{paces[0] / paces[1]:.2f}x{what}")
    return ", ".join(texts) or "not run"


def pace_of(curve: Curve) -> float:
    """Return the processor seconds of an epoch after the first evaluation; 0 if there is none."""
    trained = [row for row in curve.rows if row["update"] > 0]
    if len(trained) < 2:
        return 0.0
    first, last = trained[0], trained[-1]
    seconds: float = last["processor_seconds"] - first["processor_seconds"]
    epochs: float = last["epoch"] - first["epoch"]
    return seconds / epochs


def runs_table(comparisons: Sequence[str]) -> str:
    """Return a table of all runs: settings, length, and errors at the end and at best."""
    lines = [
        "| comparison | run | rate | batch | λ | updates | epochs | seconds "
        "| training / test error | lowest test error | state |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for comparison in comparisons:
        for curve in chosen(comparison).values():
            own, last = curve.settings, curve.last
            best = min(row[TEST] for row in curve.rows if row[TEST] is not None)
            lines.append(
                f"| `{comparison}` | {curve.name} | {own['lr']:g} | {own['batch_size']:,} | "
                f"{own['weight_decay']:g} | {last['update']:,} | {last['epoch']:.3g} | "
                f"{last['processor_seconds']:,.0f} | {last[TRAIN]:.1f} / {last[TEST]:.1f}% | "
                f"{best:.1f}% | {END_REASONS.get(curve.end, curve.end)} |"
            )
    return "\n".join(lines)


def seeds_table() -> str:
    """Return a table of what SGD and KFC needed in figure 3 with each seed, and the ratios."""
    lines = ["| to reach | SGD | KFC | SGD / KFC |", "|---|---|---|---|"]
    runs = [chosen(name) for name in seeds_of("figure3-cifar10")]
    for goal in (Goal(TRAIN, 10.0), Goal(TRAIN, 6.0), Goal(TEST, 20.0), Goal(TEST, 19.0)):
        needed = [reached(curves, "KFC", "SGD", goal) for curves in runs]
        ours, theirs, ratios = zip(*needed, strict=True)
        cells = ["<br>".join(each) for each in (theirs, ours, ratios)]
        lines.append(f"| {goal} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rates_table() -> str:
    """Return a table of the learning rates that were tried, with their last training losses."""
    lines = ["| method | rate | updates | training loss | |", "|---|---|---|---|---|"]
    for curve in read_curves("rates"):
        verdict = "dropped" if curve.end == NOT_CHOSEN else "**chosen**"
        if curve.end == "diverged":
            verdict = "diverged"
        loss = curve.last["averaged_train_loss"]
        shown = "not finite" if loss is None else f"{loss:.3f}"
        lines.append(
            f"| {curve.name} | {curve.settings['lr']:g} | {curve.last['update']} | {shown} | "
            f"{verdict} |"
        )
    return "\n".join(lines)


def scan_table() -> str:
    """Return a table of weight decays, with the test error when the training error passes 6%."""
    lines = [
        "| λ | updates to 10 / 6% training error | test error there | lowest test error "
        "| errors at the end |",
        "|---|---|---|---|---|",
    ]
    curves = [chosen("figure4")["KFC"]] if chosen("figure4") else []
    curves += chosen("weight-decay").values()
    for curve in sorted(curves, key=lambda curve: float(curve.settings["weight_decay"])):
        marks = [curve.first_reaching(TRAIN, error) for error in (10.0, 6.0)]
        counts = " / ".join(f"{row['update']:,}" if row else "not reached" for row in marks)
        errors = " / ".join(f"{row[TEST]:.1f}%" if row else "-" for row in marks)
        best = min(row[TEST] for row in curve.rows)
        last = curve.last
        lines.append(
            f"| {curve.settings['weight_decay']:g} | {counts} | {errors} | {best:.1f}% | "
            f"{last[TRAIN]:.1f} / {last[TEST]:.1f}% after {last['update']:,} |"
        )
    return "\n".join(lines)


COMPARISONS = (
    "figure4",
    "weight-decay",
    "baselines",
    *(name for d in DRAWINGS if d.comparison != "figure4" for name in seeds_of(d.comparison)),
)


def tables() -> dict[str, str]:
    """Return the tables of the page, by the name in its markers."""
    return {
        "headline": headline_table(),
        **{drawing.comparison: results_of(drawing) for drawing in DRAWINGS},
        "seeds": seeds_table(),
        "baselines": baselines_table(),
        "rates": rates_table(),
        "scan": scan_table(),
        "runs": runs_table(COMPARISONS),
    }


def with_tables(page: str) -> str:
    """Return the page with the present tables between its markers."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{PAGE.name} must contain {begin} and {end}")
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


def pictures() -> dict[str, str]:
    """Return the SVG figures, by file name, of the comparisons that were run."""
    found = {}
    for drawing in DRAWINGS:
        curves = chosen(drawing.comparison)
        drawn = [curves[name] for name in drawing.methods if name in curves]
        if drawn:
            found[_file_of(drawing)] = figure(drawing, drawn)
    return found


def _file_of(drawing: Drawing) -> str:
    return f"paper-{drawing.comparison}.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--from", dest="runs", type=Path, help="take the curves of these runs first"
    )
    arguments = parser.parse_args()
    if arguments.runs:
        collect(arguments.runs)
    for name, picture in pictures().items():
        (PICTURES / name).write_text(picture, encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
