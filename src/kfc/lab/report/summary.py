"""Tables that summarise runs, for the terminal and for a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kfc.lab.options import not_one_of
from kfc.lab.report.tables import MISSING, Row, number, percent, ratio, setting
from kfc.lab.runs import Record

END_REASONS = {
    None: "unfinished",
    "epochs": "all epochs done",
    "updates": "all updates done",
    "time": "time limit reached",
    "targets": "targets reached",
}
# Round errors, in percent, from which the default goals are chosen.
ROUND_ERRORS = (
    *(90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 25.0, 20.0, 15.0, 12.0, 10.0, 8.0, 6.0, 5.0),
    *(4.0, 3.0, 2.0, 1.5, 1.0, 0.8, 0.5, 0.3, 0.2, 0.1),
)
# Rows of the table of goals, and the keys of an evaluation.
COUNTS = {"seconds": "seconds", "epochs": "epoch", "updates": "update"}


@dataclass(frozen=True)
class Goals:
    """Errors, in percent, and losses to reach."""

    train_errors: Sequence[float] = ()
    test_errors: Sequence[float] = ()
    train_losses: Sequence[float] = ()

    def __bool__(self) -> bool:
        return bool(self.train_errors or self.test_errors or self.train_losses)

    def __iter__(self) -> Iterator[tuple[str, float, str]]:
        """Yield the key of an evaluation, the value to reach, and a title."""
        for loss in self.train_losses:
            yield "averaged_train_loss", loss, f"training loss {loss:g}"
        for error in self.train_errors:
            yield "averaged_train_error", error, f"{error:g}% training error"
        for error in self.test_errors:
            yield "averaged_test_error", error, f"{error:g}% test error"


# Which runs


def best_runs(records: Sequence[Record]) -> list[Record]:
    """Return, for each name, the run with the lowest final averaged training loss.

    Runs that diverged or were not chosen are returned only if a name has no other run.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.name, []).append(record)
    return [min(group, key=_rank) for group in groups.values()]


def _rank(record: Record) -> tuple[bool, bool, float]:
    loss = last_evaluation(record).get("averaged_train_loss")
    reason = end_reason(record)
    return reason == "not chosen", reason == "diverged", math.inf if loss is None else loss


def find_baseline(records: Sequence[Record], name: str | None = None) -> Record:
    """Return the run with the given name; by default the first run with SGD, else the first.

    Raises:
        ValueError: no run has the name.
    """
    if name is None:
        return next((r for r in records if r.config.method.optimizer == "sgd"), records[0])
    named = {record.name: record for record in records}
    if name not in named:
        raise ValueError(not_one_of("baseline", name, named))
    return named[name]


def end_reason(record: Record) -> str | None:
    """Return why the run ended, or ``None`` if it has not."""
    return None if record.end is None else record.end.get("reason")


def last_evaluation(record: Record) -> dict[str, Any]:
    """Return the last evaluation, empty if there is none yet."""
    return record.evaluations[-1] if record.evaluations else {}


# The summary


def summary_section(
    records: Sequence[Record], goals: Goals, baseline: str | None
) -> dict[str, Any]:
    """Return the data of the summary of a page."""
    return {
        "runs": summary_rows(records, baseline),
        "goals": goal_rows(records, goals, baseline) if goals else [],
        "baseline": find_baseline(records, baseline).name,
        "failures": [
            f"{record.name} diverged at update {record.end['update']}: {record.end.get('message')}"
            for record in records
            if record.end and end_reason(record) == "diverged"
        ],
    }


def summary_rows(records: Sequence[Record], baseline: str | None = None) -> list[Row]:
    """Return a table with a column for each run: its last evaluation."""
    reference = find_baseline(records, baseline)
    # A long name would make the first column too wide.
    owner = reference.name if len(reference.name) <= 12 else "the baseline"
    reasons = [end_reason(record) for record in records]

    def last(label: str, key: str, text: Callable[[float | None], str] = number) -> Row:
        return (label, *(text(last_evaluation(record).get(key)) for record in records))

    return [
        ("run", *(record.name for record in records)),
        ("learning rate", *(setting(record.config.method.lr, "adaptive") for record in records)),
        ("batch size", *(setting(record.config.problem.batch_size) for record in records)),
        last("epochs", "epoch"),
        last("updates", "update"),
        last("seconds", "seconds"),
        (f"seconds per epoch (x {owner}'s)", *(_pace(record, reference) for record in records)),
        ("ended", *(END_REASONS.get(reason, str(reason)) for reason in reasons)),
        ("averaged parameters", *("" for _ in records)),
        last("train loss", "averaged_train_loss"),
        last("test loss", "averaged_test_loss"),
        last("train error", "averaged_train_error", percent),
        last("test error", "averaged_test_error", percent),
        ("raw parameters", *("" for _ in records)),
        last("train error", "train_error", percent),
        last("test error", "test_error", percent),
    ]


def _pace(record: Record, reference: Record) -> str:
    """Format the seconds per epoch, and their ratio to those of the reference."""
    rows = last_evaluation(record), last_evaluation(reference)
    own, other = (row["seconds"] / row["epoch"] if row.get("epoch") else None for row in rows)
    if record is reference or own is None or not other:
        return number(own)
    return f"{number(own)} ({ratio(own / other)})"


# Goals


def goal_rows(records: Sequence[Record], goals: Goals, baseline: str | None = None) -> list[Row]:
    """Return the seconds, epochs and updates until the averaged parameters reach each goal.

    Each goal has a row with its title, whose other cells are empty, and three rows of values. In
    brackets: how many times less than the baseline, with ">" if the baseline did not reach it.
    """
    reference = find_baseline(records, baseline)
    rows = [("to reach, averaged", *(record.name for record in records))]
    for key, value, title in goals:
        rows.append((title, *("" for _ in records)))
        for label, count in COUNTS.items():
            rows.append((label, *(_goal_cell(r, reference, key, value, count) for r in records)))
    return rows


def _goal_cell(record: Record, reference: Record, key: str, value: float, count: str) -> str:
    row = _first_reaching(record, key, value)
    if row is None:
        return "not reached" if record.evaluations else MISSING
    own = row[count]
    reached = _first_reaching(reference, key, value)
    baseline = (reached or last_evaluation(reference)).get(count)
    if record is reference or not own or not baseline:
        return number(own)
    at_least = "> " if reached is None else ""
    return f"{number(own)} ({at_least}{ratio(baseline / own)})"


# The verdict


def verdict(records: Sequence[Record], goals: Goals, baseline: str | None = None) -> str:
    """Return what the runs show, in one sentence.

    It is about the hardest goal that any run reached, of the training set if possible; without
    one, about the lowest training loss.
    """
    diverged = [record.name for record in records if end_reason(record) == "diverged"]
    sentence = _reached_verdict(records, goals, baseline) or _loss_verdict(records)
    if diverged and len(diverged) < len(records):
        return f"{sentence}; {', '.join(diverged)} diverged."
    return "All runs diverged." if diverged else f"{sentence}."


def _reached_verdict(records: Sequence[Record], goals: Goals, baseline: str | None) -> str:
    """Return which runs reach the hardest goal in the least time and with the fewest updates."""
    reference = find_baseline(records, baseline)
    for key, value, title in sorted(goals, key=lambda goal: ("test" in goal[0], goal[1])):
        found = [(r, row) for r in records if (row := _first_reaching(r, key, value))]
        if len(records) == 1 or not found:
            continue
        first, row = min(found, key=lambda pair: pair[1]["seconds"])
        text = f"{first.name} is the first to reach {title}, after {number(row['seconds'])} s"
        text += _behind(reference, first, row, key, value)
        fewest, least = min(found, key=lambda pair: pair[1]["update"])
        if least["update"] < row["update"]:
            counts = f"{number(least['update'])} instead of {number(row['update'])}"
            text += f"; {fewest.name} needs the fewest updates, {counts}"
        return text
    return ""


def _behind(
    reference: Record, first: Record, row: Mapping[str, Any], key: str, value: float
) -> str:
    """Return how long the baseline takes to a goal that another run reached first."""
    seconds = last_evaluation(reference).get("seconds")
    if reference is first or not seconds or not row["seconds"]:
        return ""
    if reached := _first_reaching(reference, key, value):
        times = ratio(reached["seconds"] / row["seconds"]).removesuffix("x")
        return f" ({reference.name} takes {times} times as long)"
    return f" ({reference.name} does not in {number(seconds)} s)"


def _loss_verdict(records: Sequence[Record]) -> str:
    """Return the run with the lowest training loss at its end, and its errors."""
    trained = [
        (record, row)
        for record in records
        if (row := last_evaluation(record)).get("averaged_train_loss") is not None
    ]
    if not trained:
        return "No run has been evaluated yet"
    best, row = min(trained, key=lambda pair: pair[1]["averaged_train_loss"])
    errors = f"{percent(row['averaged_train_error'])} training and "
    errors += f"{percent(row['averaged_test_error'])} test error"
    lowest = "the lowest training loss, with " if len(records) > 1 else ""
    place = f"{number(row['update'])} updates and {number(row['seconds'])} s"
    return f"{best.name} has {lowest}{errors} (averaged parameters) after {place}"


def _first_reaching(record: Record, key: str, value: float) -> dict[str, Any] | None:
    """Return the first evaluation whose ``key`` is at most ``value``."""
    rows = (row for row in record.evaluations if row[key] is not None)
    return next((row for row in rows if row[key] <= value), None)


def default_goals(records: Sequence[Record]) -> Goals:
    """Return the smallest round errors that the best runs reached.

    For the training error, those that all runs and that any run reached; for the test error, the
    one that any run reached.
    """
    records = best_runs(records)
    train, test = "averaged_train_error", "averaged_test_error"
    by_all, by_any = _reached(records, train, all_runs=True), _reached(records, train)
    return Goals(tuple(sorted({*by_all, *by_any}, reverse=True)), tuple(_reached(records, test)))


def _reached(records: Sequence[Record], key: str, all_runs: bool = False) -> list[float]:
    """Return the smallest round error that any run, or all runs, reached, as a list of one.

    The list is empty if no round error lies below the errors of untrained networks.
    """
    errors = [[row[key] for row in r.evaluations if row[key] is not None] for r in records]
    trained = [series for series in errors if len(series) > 1]
    if not trained:
        return []
    start = min(series[0] for series in trained)
    best = (max if all_runs else min)(min(series) for series in trained)
    return [error for error in ROUND_ERRORS if best <= error < start][-1:]
