"""The sections of the page: what stands in each, and when."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kfc.experiments.runs import Record
from kfc.report.adaptation import adaptation_figures, adapts
from kfc.report.controls import curve_controls, key, run_choice
from kfc.report.costs import cost_figure, cost_rows, cost_swatches
from kfc.report.curves import curve_figures
from kfc.report.diagnostics import (
    clipping_figures,
    has_fisher_norm,
    has_layers,
    layer_figures,
    layer_names,
)
from kfc.report.formats import distinct_labels
from kfc.report.section import Section
from kfc.report.sensitivity import sensitivity_figure
from kfc.report.summary import Goals, end_reason, find_baseline, goal_rows, summary_rows
from kfc.report.table import (
    comparison_tables,
    environment_column,
    html_table,
    settings_column,
)

CURVES_NOTE = (
    "Averaged parameters are a running mean of the raw ones; beside them, raw ones are drawn "
    "thinner and fainter. On a logarithmic scale zero is drawn at half of the figure's smallest "
    "value, and hovering tells that it is zero; on a logarithmic horizontal axis the start, at "
    "zero, is left out."
)


def all_sections(
    records: Sequence[Record], best: Sequence[Record], goals: Goals, baseline: str | None
) -> list[Section]:
    """Those that have something to show."""
    sections = (
        _summary(best, goals, baseline),
        _curves(best, has_others=len(records) > len(best)),
        _sensitivity(records, best),
        _costs(best),
        _adaptation(best),
        _clipping(best),
        _layers(best),
        _settings(records),
        _environment(records),
    )
    return [section for section in sections if section is not None]


def _summary(best: Sequence[Record], goals: Goals, baseline: str | None) -> Section:
    html = html_table(
        summary_rows(best, baseline),
        "The last evaluation of each run; losses and errors are of averaged parameters.",
    )
    if goals:
        name = find_baseline(best, baseline).name
        html += html_table(
            goal_rows(best, goals, baseline),
            "Training until averaged parameters first reach a goal; in brackets, how many times "
            f"less than {name} takes.",
        )
    return Section("summary", "Summary", html + "".join(map(_failure, best)))


def _failure(record: Record) -> str:
    if record.end is None or end_reason(record) != "diverged":
        return ""
    words = f"{record.name} diverged at update {record.end['update']}: {record.end.get('message')}"
    return f'<p class="note">{escape(words)}</p>'


def _curves(best: Sequence[Record], has_others: bool) -> Section:
    controls = curve_controls([record.name for record in best], has_others)
    note = f'<p class="note">{escape(CURVES_NOTE)}</p>'
    return Section("curves", "Curves", controls, curve_figures(), note)


def _sensitivity(records: Sequence[Record], best: Sequence[Record]) -> Section | None:
    names = [record.name for record in best]
    figure = sensitivity_figure(records, names)
    if figure is None:
        return None
    return Section("learning-rates", "Learning-rate sensitivity", key(enumerate(names)), [figure])


def _costs(best: Sequence[Record]) -> Section | None:
    figure = cost_figure(best)
    if figure is None:
        return None
    caption = "The same in milliseconds, and as a share of the whole."
    table = html_table(cost_rows(best), caption, swatches=cost_swatches(best))
    return Section("cost", "Cost of an update", "", [figure], table)


def _adaptation(best: Sequence[Record]) -> Section | None:
    looks = [(index, r.name) for index, r in enumerate(best) if adapts(r)]
    if not looks:
        return None
    figures = adaptation_figures(best)
    return Section("adaptation", "What was chosen", key(looks), figures)


def _clipping(best: Sequence[Record]) -> Section | None:
    looks = [(index, r.name) for index, r in enumerate(best) if has_fisher_norm(r)]
    if not looks:
        return None
    return Section("clipping", "Fisher norm and clipping", key(looks), clipping_figures(best))


def _layers(best: Sequence[Record]) -> Section | None:
    records = [record for record in best if has_layers(record)]
    if not records:
        return None
    choice = run_choice([record.name for record in records])
    looks = key(enumerate(layer_names(records)))
    return Section("layers", "Layers", choice + looks, layer_figures(records))


def _settings(records: Sequence[Record]) -> Section:
    columns = [settings_column(record) for record in records]
    caption = "Settings that differ; marked where a run is unlike the first one."
    html = comparison_tables(distinct_labels(records), columns, caption, mark_differences=True)
    return Section("settings", "Settings", html)


def _environment(records: Sequence[Record]) -> Section:
    columns = [environment_column(record) for record in records]
    html = comparison_tables(
        distinct_labels(records), columns, "What differs.", mark_differences=False
    )
    return Section("environment", "Environment", html)
