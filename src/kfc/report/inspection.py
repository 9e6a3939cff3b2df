"""The page about inspected networks: which assumption holds where, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from kfc.analysis import Correlations
from kfc.experiments.findings import Inspection
from kfc.report.blocks import approximations_section, spectra_section
from kfc.report.document import write_document
from kfc.report.figures import Figure
from kfc.report.formats import setting
from kfc.report.heatmaps import cross_map_figure, offset_figure
from kfc.report.inspected import by_layer, columns_of, heading, labelled, note, titled
from kfc.report.section import Group, Section
from kfc.report.summary import Row
from kfc.report.table import Column, comparison_tables, html_table
from kfc.report.verdicts import ASSUMPTIONS, READING, VERDICTS, notes_of, verdict_rows

INTRODUCTION = (
    "How good Kronecker factors are for the layers of a network: the assumptions behind them, one "
    "by one, and approximations of each layer's block of the Fisher matrix beside the exact block."
)
DERIVATIVES = (
    "Derivatives of the log-likelihood with respect to a layer's pre-activations, targets drawn "
    "from the network (figure 1 of the paper). Uncorrelated derivatives (SUD) would light up at "
    "offset 0 alone, white ones (WD) on the diagonal alone."
)
ACTIVATIONS = (
    "A layer's inputs (figure 2 of the paper), without taking their means off. Uncorrelated "
    "activations (SUA) would light up at offset 0 alone."
)


def write_inspection_page(path: Path, inspections: Sequence[Inspection], title: str) -> None:
    """All of it or nothing; what is of one layer stands side by side.

    Raises:
        OSError: the file or its folders cannot be written.
    """
    sections = inspection_sections(inspections)
    write_document(path, sections, title=title, introduction=INTRODUCTION)


def inspection_sections(inspections: Sequence[Inspection]) -> list[Section]:
    """Those that have something to show."""
    sections = (
        _verdicts(inspections),
        _correlations("derivatives", "Derivatives", DERIVATIVES, inspections),
        _correlations("activations", "Activations", ACTIVATIONS, inspections),
        spectra_section(inspections),
        approximations_section(inspections),
        _subjects(inspections),
    )
    return [section for section in sections if section is not None]


# Verdicts


def _verdicts(inspections: Sequence[Inspection]) -> Section:
    tables = "".join(
        html_table(_unbroken(verdict_rows(inspection)), inspection.label, words=VERDICTS)
        + "".join(map(note, notes_of(inspection)))
        for inspection in inspections
    )
    terms = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in ASSUMPTIONS.items())
    return Section("verdict", "Verdict", tables, after=f"<dl>{terms}</dl>{note(READING)}")


def _unbroken(rows: Sequence[Row]) -> list[Row]:
    """Cells are broken before their intervals, not inside."""
    return [
        (layer, *(cell.replace(" to ", "\u00a0to\u00a0") for cell in cells))
        for layer, *cells in rows
    ]


# Correlations


def _correlations(
    kind: str, title: str, words: str, inspections: Sequence[Inspection]
) -> Section | None:
    groups = []
    for found in by_layer(inspections):
        pairs = [
            (
                _offsets(id, label, kind, layer.correlations),
                _maps(id, label, kind, layer.correlations),
            )
            for id, label, layer in labelled(found, kind, inspections)
            if layer.correlations is not None
        ]
        if not pairs:
            continue
        # Beside each other what is of one kind, or the only two that there are.
        figures = [figure for row in zip(*pairs, strict=True) for figure in row if figure]
        columns = columns_of(inspections)
        groups.append(Group(figures, heading(found), columns))
    if not groups:
        return None
    return Section(kind, title, note(words), groups=groups)


def _offsets(id: str, label: str, kind: str, found: Correlations) -> Figure | None:
    offsets = found.derivative_offsets if kind == "derivatives" else found.activation_offsets
    if offsets is None:
        return None
    return offset_figure(f"{id}-offsets", titled(label, "correlation over space"), offsets)


def _maps(id: str, label: str, kind: str, found: Correlations) -> Figure:
    matrix = found.derivative_maps if kind == "derivatives" else found.activation_maps
    return cross_map_figure(f"{id}-maps", titled(label, "correlation between maps"), matrix)


# What was inspected


def _subjects(inspections: Sequence[Inspection]) -> Section:
    labels = [inspection.label for inspection in inspections]
    parts: tuple[tuple[str, Callable[[Inspection], Mapping[str, Any]]], ...] = (
        ("Networks and training", lambda one: {**one.subject, **(one.training or {})}),
        ("How they were inspected", _settings),
        ("Machine", lambda one: one.environment),
    )
    html = ""
    for caption, values_of in parts:
        columns = [_column(values_of(inspection)) for inspection in inspections]
        html += f"<h3>{escape(caption)}</h3>{comparison_tables(labels, columns, 'What differs.')}"
    return Section("inspected", "What was inspected", html)


def _settings(inspection: Inspection) -> dict[str, Any]:
    values = asdict(inspection.settings)
    values["layers"] = ", ".join(values["layers"]) or "all"
    values["approximations"] = ", ".join(values["approximations"])
    exact = values.pop("exact_samples")
    return {**values, "samples for the blocks": exact or "all targets"}


def _column(values: Mapping[str, Any]) -> Column:
    return {name.replace("_", " "): setting(value) for name, value in values.items()}
