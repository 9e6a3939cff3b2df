"""Cells of tables, and tables that compare the values of several runs or networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kfc.lab.runs import Record

# A table is a list of rows; the first row is the header.
Row = tuple[str, ...]

MISSING = "–"


def number(value: float | None) -> str:
    """Format with three significant digits, or as an integer from 100 upwards."""
    if value is None:
        return MISSING
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(value: float | None) -> str:
    """Format a number that is already in percent."""
    return MISSING if value is None else f"{value:.2f}%"


def ratio(value: float) -> str:
    """Format with at least two significant digits: 0.53x, 7.5x, 120x."""
    if value >= 9.95:
        return f"{value:,.0f}x"
    return f"{value:.1f}x" if value >= 0.995 else f"{value:.2g}x"


def setting(value: Any, none: str = "none") -> str:
    """Format the value of an option."""
    if value is None:
        return none
    return f"{value:g}" if isinstance(value, float) else str(value)


def distinct_labels(records: Sequence[Record]) -> list[str]:
    """Return the run names, with the learning rate and a count added to names that repeat."""
    names = [record.name for record in records]
    labels = [
        name if names.count(name) == 1 else f"{name}, lr {setting(record.config.method.lr)}"
        for name, record in zip(names, records, strict=True)
    ]
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: index + 1].count(label)})"
        for index, label in enumerate(labels)
    ]


class Comparison(NamedTuple):
    """The values of several runs or networks, a column for each.

    Rows in ``different`` have a name and a value for each column; those in ``identical``, whose
    values are the same in all columns, a name and one value.
    """

    header: Row
    different: list[Row]
    identical: list[Row]


def compare_values(labels: Sequence[str], columns: Sequence[Mapping[str, Any]]) -> Comparison:
    """Return a table of named values, a column for each label."""
    comparison = Comparison(("", *labels), [], [])
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = [setting(column[name]) if name in column else MISSING for column in columns]
        label = str(name).replace("_", " ")
        if len(set(cells)) > 1:
            comparison.different.append((label, *cells))
        else:
            comparison.identical.append((label, cells[0]))
    return comparison
