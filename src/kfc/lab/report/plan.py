"""Tables of predicted steps for the terminal, and their page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kfc.curvature.description import format_bytes
from kfc.lab.planning.machine import Machine
from kfc.lab.planning.prediction import PASSES, Prediction
from kfc.lab.report.figures import Figure, layout, line
from kfc.lab.report.rendering import write_html
from kfc.lab.report.tables import Row, number

HEADER = ("ranks", "placement", "step (ms)", "examples/s", "/ SGD", "memory", "sent", "limit")


class Checked(NamedTuple):
    """A prediction for processes of this machine, and the measured seconds of a step."""

    prediction: Prediction
    seconds: float


class Plan(NamedTuple):
    """Predictions for a network.

    Attributes:
        title: the network and its batch.
        batch: examples per rank.
        machine: what the predictions are based on.
        predictions: for every number of ranks and placement.
        checked: predictions that were compared with real steps.
    """

    title: str
    batch: int
    machine: Machine
    predictions: Sequence[Prediction]
    checked: Sequence[Checked]


def plan_rows(plan: Plan) -> list[Row]:
    """Return a row for every number of ranks and placement."""
    rows: list[Row] = [HEADER]
    for each in plan.predictions:
        plain = each.seconds[PASSES] + each.seconds["sending gradients"]
        placement = each.placement if each.ranks > 1 else ""
        rows.append(
            (
                *(str(each.ranks), placement, number(1000 * each.step)),
                number(each.ranks * plan.batch / each.step),
                f"{each.step / plain:.2f}",
                *(format_bytes(each.memory), format_bytes(sum(each.traffic.values()))),
                f"{each.limit} {each.seconds[each.limit] / each.step:.0%}",
            )
        )
    return rows


def summary_rows(plan: Plan) -> list[Row]:
    """Return a narrow table: milliseconds with every placement, and details of "auto"."""
    by_ranks: dict[int, dict[str, Prediction]] = {}
    for each in plan.predictions:
        by_ranks.setdefault(each.ranks, {})[each.placement] = each
    names = _placements(plan)
    details = {int(row[0]): row[4:] for row in plan_rows(plan) if row[1] in ("", "auto")}
    rows: list[Row] = [("ranks", *(names or ["ms"]), *HEADER[4:])]
    for ranks, found in by_ranks.items():
        cells = [
            number(1000 * found[name].step) if name in found else "" for name in names or found
        ]
        rows.append((str(ranks), *cells, *details[ranks]))
    return rows


def check_rows(plan: Plan) -> list[Row]:
    """Return predicted and measured steps of processes on this machine."""
    rows: list[Row] = [("processes", "placement", "predicted (ms)", "measured (ms)", "ratio")]
    for prediction, seconds in plan.checked:
        ratio = f"{seconds / prediction.step:.2f}"
        found = number(1000 * prediction.step), number(1000 * seconds), ratio
        rows.append((str(prediction.ranks), prediction.placement, *found))
    return rows


def machine_rows(machine: Machine) -> list[Row]:
    """Return the constants of a machine."""
    return [
        ("constant", "value"),
        ("matrix products", f"{machine.products / 1e9:.1f} billion multiply-adds/s"),
        ("Cholesky decompositions", f"{machine.decompositions / 1e9:.1f} billion multiply-adds/s"),
        ("memory", f"{machine.memory / 1e9:.1f} GB/s"),
        ("network", f"{machine.network / 1e9:.2f} GB/s"),
        ("latency", f"{1e6 * machine.latency:.0f} µs"),
        ("starting an operation", f"{1e6 * machine.start:.1f} µs"),
    ]


def write_plan_page(path: Path, plan: Plan) -> None:
    """Write the page of a plan atomically."""
    sections = {
        "plan": {
            "rows": plan_rows(plan),
            "figures": [
                _figure(plan, "step", "milliseconds", lambda each: 1000 * each.step),
                _figure(plan, "memory", "MiB", lambda each: each.memory / 2**20),
                _figure(plan, "sent", "MiB", lambda each: sum(each.traffic.values()) / 2**20),
            ],
            "legend": list(enumerate(_placements(plan))),
            "parts": _part_rows(plan),
        },
        "checks": check_rows(plan) if plan.checked else None,
        "machine": machine_rows(plan.machine),
    }
    texts = {"title": f"KFC on {plan.title}", "verdict": plan_verdict(plan)}
    write_html(path, "plan.html", sections=sections, **texts)


def plan_verdict(plan: Plan) -> str:
    """Return what a step on the largest number of ranks takes, in one sentence."""
    largest = max(plan.predictions, key=lambda each: (each.ranks, -each.step))
    sgd = largest.seconds[PASSES] + largest.seconds["sending gradients"]
    ranks = f"{largest.ranks:,} rank{'s' if largest.ranks > 1 else ''}"
    cost = f"{number(1000 * largest.step)} ms, {largest.step / sgd:.2f} times a step of SGD"
    return f"On {ranks}, a step of KFC is predicted to take {cost}."


def _placements(plan: Plan) -> list[str]:
    return list(dict.fromkeys(each.placement for each in plan.predictions if each.ranks > 1))


def _part_rows(plan: Plan) -> list[Row]:
    """Return the milliseconds of each part of a step with the placement "auto"."""
    chosen = [each for each in plan.predictions if each.placement == "auto"]
    names = list(chosen[0].seconds)
    rows: list[Row] = [("ranks", *names)]
    for each in chosen:
        rows.append((str(each.ranks), *(number(1000 * each.seconds[name]) for name in names)))
    return rows


def _figure(plan: Plan, id: str, unit: str, value: Callable[[Prediction], float]) -> Figure:
    traces = []
    for index, placement in enumerate(_placements(plan)):
        # A logarithmic axis has no place for the traffic of one rank.
        shown = [e for e in plan.predictions if e.placement == placement and value(e) > 0]
        xs, ys = [each.ranks for each in shown], [value(each) for each in shown]
        template = f"%{{y:.4~g}} {unit} on %{{x}} ranks"
        traces.append(line(index, placement, xs, ys, hovertemplate=template))
    return Figure(id, layout("ranks", unit, log="xy"), [traces])
