"""What runs came to, in rows for a terminal or a page: the first row is the header."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kfc.experiments.runs import Record
from kfc.report.formats import MISSING, number, percent, ratio, setting

Row = tuple[str, ...]

ENDS = {
    "epochs": "all epochs done",
    "updates": "all updates done",
    "time": "time was up",
    "targets": "targets reached",
    "diverged": "diverged",
    "not chosen": "not chosen",
}
# Errors in percent that people would name as a goal.
ROUND_ERRORS = (
    *(90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 25.0, 20.0, 15.0, 12.0, 10.0, 8.0, 6.0, 5.0),
    *(4.0, 3.0, 2.0, 1.5, 1.0, 0.8, 0.5, 0.3, 0.2, 0.1),
)
COUNTS = (("seconds", "seconds"), ("epochs", "epoch"), ("updates", "update"))


@dataclass(frozen=True)
class Goals:
    """Errors to be reached, in percent, and losses."""

    train_errors: tuple[float, ...] = ()
    test_errors: tuple[float, ...] = ()
    train_losses: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.train_errors or self.test_errors or self.train_losses)

    def __iter__(self) -> Iterator[tuple[str, float, str]]:
        """The evaluations' key, the value, and words for both."""
        for loss in self.train_losses:
            yield "averaged_train_loss", loss, f"training loss {loss:g}"
        for error in self.train_errors:
            yield "averaged_train_error", error, f"{error:g}% training error"
        for error in self.test_errors:
            yield "averaged_test_error", error, f"{error:g}% test error"


# Which runs


def best_runs(records: Sequence[Record]) -> list[Record]:
    """For each name, in order of appearance, the run with the lowest last averaged training loss.

    Runs that were not chosen, or diverged, count only where there is nothing else.
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
    """The run of that name; by default the first with SGD, else the first."""
    if name is None:
        return next((r for r in records if r.config.optimizer == "sgd"), records[0])
    for record in records:
        if record.name == name:
            return record
    known = ", ".join(dict.fromkeys(record.name for record in records))
    raise ValueError(f"no run is named {name!r}; there are {known}")


def end_reason(record: Record) -> str | None:
    return None if record.end is None else record.end.get("reason")


def last_evaluation(record: Record) -> dict[str, Any]:
    """Empty if there is none yet."""
    return record.evaluations[-1] if record.evaluations else {}


# The summary


def summary_rows(records: Sequence[Record], baseline: str | None = None) -> list[Row]:
    """A column for each run, so that it fits a narrow window. Losses and errors are averaged ones.

    Raises:
        ValueError: no run has the baseline's name.
    """
    if not records:
        return [("run",)]
    reference = find_baseline(records, baseline)
    labels = (
        "learning rate",
        "batch size",
        "epochs",
        "updates",
        "seconds",
        f"seconds per epoch (x {_possessive(reference.name)})",
        "train loss",
        "train error",
        "test loss",
        "test error",
        "ended",
    )
    columns = [_summary(record, reference) for record in records]
    header = ("run", *(record.name for record in records))
    return [header, *zip(labels, *columns, strict=True)]


def _possessive(name: str) -> str:
    """A long name would make the first column too wide."""
    return f"{name}'s" if len(name) <= 12 else "the baseline's"


def _summary(record: Record, reference: Record) -> Row:
    last = last_evaluation(record)
    return (
        "its own" if record.config.lr is None else setting(record.config.lr),
        setting(record.config.batch_size),
        number(last.get("epoch")),
        number(last.get("update")),
        number(last.get("seconds")),
        _pace(record, reference),
        number(last.get("averaged_train_loss")),
        percent(last.get("averaged_train_error")),
        number(last.get("averaged_test_loss")),
        percent(last.get("averaged_test_error")),
        _ending(record),
    )


def _pace(record: Record, reference: Record) -> str:
    own, other = _seconds_per_epoch(record), _seconds_per_epoch(reference)
    if record is reference or own is None or not other:
        return number(own)
    return f"{number(own)} ({ratio(own / other)})"


def _seconds_per_epoch(record: Record) -> float | None:
    last = last_evaluation(record)
    return last["seconds"] / last["epoch"] if last.get("epoch") else None


def _ending(record: Record) -> str:
    reason = end_reason(record)
    return "unfinished" if reason is None else ENDS.get(reason, reason)


# Goals


def goal_rows(records: Sequence[Record], goals: Goals, baseline: str | None = None) -> list[Row]:
    """Seconds, epochs and updates until the averaged parameters reach each goal.

    A row with the goal alone, its other cells empty, comes before its three. In brackets: how many
    times fewer than the baseline; at least so many where the baseline never got there.

    Raises:
        ValueError: no run has the baseline's name.
    """
    if not records:
        return [("to reach",)]
    reference = find_baseline(records, baseline)
    rows = [("to reach", *(record.name for record in records))]
    for key, value, words in goals:
        rows.append((words, *("" for _ in records)))
        for label, count in COUNTS:
            cells = (_goal_cell(record, reference, key, value, count) for record in records)
            rows.append((label, *cells))
    return rows


def _goal_cell(record: Record, reference: Record, key: str, value: float, count: str) -> str:
    row = first_reaching(record, key, value)
    if row is None:
        return "not reached" if record.evaluations else MISSING
    own = row[count]
    there = first_reaching(reference, key, value)
    baseline = (there or last_evaluation(reference)).get(count)
    if record is reference or not own or not baseline:
        return number(own)
    at_least = "> " if there is None else ""
    return f"{number(own)} ({at_least}{ratio(baseline / own)})"


def first_reaching(record: Record, key: str, value: float) -> dict[str, Any] | None:
    """The first evaluation with that value or a smaller one."""
    rows = (row for row in record.evaluations if row[key] is not None)
    return next((row for row in rows if row[key] <= value), None)


def default_goals(records: Sequence[Record]) -> Goals:
    """Round errors: the smallest training errors that all runs, and any run, reached; test: any."""
    train, test = "averaged_train_error", "averaged_test_error"
    return Goals(
        _levels(_hardest(records, train, all_runs=True), _hardest(records, train, all_runs=False)),
        _levels(_hardest(records, test, all_runs=False)),
    )


def _levels(*errors: float | None) -> tuple[float, ...]:
    return tuple(sorted({error for error in errors if error is not None}, reverse=True))


def _hardest(records: Sequence[Record], key: str, all_runs: bool) -> float | None:
    """None if there is no round error that says something: a fresh network is above it."""
    errors = [[row[key] for row in r.evaluations if row[key] is not None] for r in records]
    learnt = [series for series in errors if len(series) > 1]
    if not learnt:
        return None
    start = min(series[0] for series in learnt)
    best = (max if all_runs else min)(min(series) for series in learnt)
    levels = [error for error in ROUND_ERRORS if best <= error < start]
    return min(levels, default=None)
