"""The page about several training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kfc.lab.report.curves import curve_section, sensitivity_section
from kfc.lab.report.diagnostics import (
    adaptation_section,
    clipping_section,
    cost_section,
    layer_section,
)
from kfc.lab.report.rendering import write_html
from kfc.lab.report.summary import Goals, best_runs, default_goals, summary_section, verdict
from kfc.lab.report.tables import compare_values, distinct_labels
from kfc.lab.runs import Record


def write_page(
    path: Path,
    records: Sequence[Record],
    *,
    title: str,
    introduction: str = "",
    goals: Goals | None = None,
    baseline: str | None = None,
) -> None:
    """Write the page atomically. If several runs share a name, most figures show the best one.

    Args:
        goals: errors and losses to compare the time to; by default round errors that were reached.
        baseline: the name of the run that ratios refer to; by default the first run with SGD.

    Raises:
        ValueError: there are no runs, or no run has the name of the baseline.
    """
    if not records:
        raise ValueError("a report needs at least one run, got none")
    best = best_runs(records)
    labels = distinct_labels(records)
    settings = []
    for record in records:
        values = record.config.to_dict()
        options = values.pop("options")
        settings.append({**values, **options, "data_digest": record.data_digest[:12]})
    sections = {
        "summary": summary_section(best, goals or default_goals(best), baseline),
        "curves": curve_section(records, best),
        "learning-rates": sensitivity_section(records, [record.name for record in best]),
        "cost": cost_section(best),
        "adaptation": adaptation_section(best),
        "clipping": clipping_section(best),
        "layers": layer_section(best),
        "settings": compare_values(labels, settings),
        "environment": compare_values(
            labels, [{"folder": record.path.name, **record.environment} for record in records]
        ),
    }
    found = verdict(best, goals or default_goals(best), baseline)
    texts = {"title": title, "verdict": found, "introduction": introduction}
    write_html(path, "runs.html", sections=sections, **texts)
