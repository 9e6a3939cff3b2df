"""The page about several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kfc.experiments.runs import Record
from kfc.report.curves import curve_data
from kfc.report.document import write_document
from kfc.report.sections import all_sections
from kfc.report.summary import Goals, best_runs, default_goals


def write_page(
    path: Path,
    records: Sequence[Record],
    *,
    title: str,
    introduction: str = "",
    goals: Goals | None = None,
    baseline: str | None = None,
) -> None:
    """Write the page, all of it or nothing. Of runs with one name, the best is shown.

    Args:
        goals: errors whose times are compared; by default round ones that the runs reached.
        baseline: the name of the run that ratios are to; by default SGD's.

    Raises:
        OSError: the file or its folders cannot be written.
        ValueError: there are no runs, or none has the baseline's name.
    """
    if not records:
        raise ValueError("a report needs at least one run")
    best = best_runs(records)
    goals = default_goals(best) if goals is None else goals
    sections = all_sections(records, best, goals, baseline)
    curves = curve_data(records, best)
    write_document(path, sections, title=title, introduction=introduction, curves=curves)
