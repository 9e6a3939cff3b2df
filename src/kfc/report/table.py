"""Rows as HTML tables; settings and environments compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kfc.experiments.runs import Record
from kfc.report.formats import MISSING, setting
from kfc.report.summary import Row

Column = Mapping[str, str]


def html_table(
    rows: Sequence[Row],
    caption: str,
    *,
    swatches: Mapping[str, str] | None = None,
    mark_differences: bool = False,
    words: Sequence[str] = (),
) -> str:
    """A table in a box that scrolls by itself.

    Args:
        rows: the first is the header; a row with nothing beside its first cell is a heading.
        swatches: markup before the first cell, by its text.
        mark_differences: cells unlike the first run's.
        words: cells that begin with one of them get it as their class.
    """
    header, *body = rows
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = [_html_row(row, swatches or {}, mark_differences, words) for row in body]
    return (
        # Not a <caption>: that would scroll away with a wide table.
        f'<p class="note">{escape(caption)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _html_row(
    row: Row, swatches: Mapping[str, str], mark_differences: bool, words: Sequence[str]
) -> str:
    label, *cells = row
    if cells and not any(cells):
        return (
            f'<tr class="goal"><th scope="rowgroup" colspan="{len(row)}">'
            f"<span>{escape(label)}</span></th></tr>"
        )
    data = ""
    for cell in cells:
        word = cell.split(" ", 1)[0]
        kind = word if word in words else ""
        if mark_differences and cell not in (cells[0], MISSING):
            kind = "other"
        data += f'<td class="{kind}">{escape(cell)}</td>' if kind else f"<td>{escape(cell)}</td>"
    return f'<tr><th scope="row">{swatches.get(label, "")}{escape(label)}</th>{data}</tr>'


# Comparing runs


def compared(columns: Sequence[Column]) -> tuple[list[Row], list[Row]]:
    """Rows that differ between the columns, and (name, value) of those that do not."""
    different: list[Row] = []
    equal: list[Row] = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, MISSING) for column in columns]
        if len(set(values)) > 1:
            different.append((name, *values))
        else:
            equal.append((name, values[0]))
    return different, equal


def comparison_tables(
    labels: Sequence[str], columns: Sequence[Column], caption: str, mark_differences: bool = False
) -> str:
    """What differs in a table of all runs; what does not, folded away."""
    different, equal = compared(columns)
    equal_rows = [("", "value"), *equal]
    if len(labels) == 1:
        return html_table(equal_rows, "As it was for this run.")
    html = ""
    if different:
        rows = [("", *labels), *different]
        html = html_table(rows, caption, mark_differences=mark_differences)
    if equal:
        table = html_table(equal_rows, "What does not differ.")
        html += f"<details><summary>The same in all runs</summary>{table}</details>"
    return html


def settings_column(record: Record) -> Column:
    """Everything that makes the run, the optimizer's own options among it."""
    values = record.config.to_dict()
    options: Mapping[str, Any] = values.pop("options")
    column = {_words(name): setting(value) for name, value in {**values, **options}.items()}
    return {**column, "data digest": record.data_digest[:12]}


def environment_column(record: Record) -> Column:
    values = {"folder": record.path.name, **record.environment}
    return {_words(name): setting(value) for name, value in values.items()}


def _words(name: str) -> str:
    return str(name).replace("_", " ")
