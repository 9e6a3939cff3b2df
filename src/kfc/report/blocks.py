"""Approximations of a layer's block beside the exact one: spectra, errors and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kfc.analysis import APPROXIMATIONS, LayerComparison
from kfc.experiments.findings import Inspection, LayerInspection, thinned_ranks
from kfc.report.controls import key
from kfc.report.figures import Figure, Json, layout, line, plain
from kfc.report.inspected import Found, by_layer, columns_of, heading, labelled, note, titled
from kfc.report.section import Group, Section
from kfc.report.table import html_table
from kfc.report.verdicts import QUALITY_READING, quality_rows

SPECTRA = (
    "Eigenvalues of the exact block, which has no more than there are gradients, and of its "
    "approximations; those that are not positive are left out."
)
NEGLIGIBLE = 1e-12
EXACT = "exact"
LOOKS = {EXACT: 0} | {name: index for index, name in enumerate(APPROXIMATIONS, start=1)}

# Spectra


def spectra_section(inspections: Sequence[Inspection]) -> Section | None:
    figures = []
    seen: dict[str, None] = {}
    for found in by_layer(inspections):
        for id, label, layer in labelled(found, "spectrum", inspections):
            traces = _spectrum_lines(layer.comparison) if layer.comparison else {}
            if traces:
                shape = layout("rank", "eigenvalue", log="xy")
                title, drawn = (
                    f"{label}: {layer.name}" if label else layer.name,
                    list(traces.values()),
                )
                figures.append(Figure(id, title, _size(layer), shape, [drawn]))
                seen |= dict.fromkeys(traces)
    if not figures:
        return None
    looks = key((look, _title(name)) for name, look in LOOKS.items() if name in seen)
    columns = columns_of(inspections)
    before = note(SPECTRA) + looks
    return Section("spectra", "Spectra", before, groups=[Group(figures, columns=columns)])


def _spectrum_lines(comparison: LayerComparison) -> dict[str, Json]:
    spectra = {EXACT: comparison.spectrum} | {
        name: quality.spectrum for name, quality in comparison.approximations.items()
    }
    lines = {}
    for name, spectrum in spectra.items():
        points = [] if spectrum is None else _points(spectrum)
        if points:
            ranks, values = zip(*points, strict=True)
            at = "%{y:.3g} at rank %{x}"
            lines[name] = line(LOOKS[name], _title(name), ranks, values, hovertemplate=at)
    return lines


def _points(spectrum: Tensor) -> list[tuple[int, float]]:
    """(rank, eigenvalue) of positive ones, thinned."""
    floor = max(float(spectrum.abs().max()) * NEGLIGIBLE, 0.0) if len(spectrum) else 0.0
    positive = spectrum[spectrum > floor]
    ranks = thinned_ranks(len(positive))
    values = positive[torch.tensor(ranks, dtype=torch.long) - 1].tolist()
    return list(zip(ranks, values, strict=True))


def _title(name: str) -> str:
    return "exact block" if name == EXACT else APPROXIMATIONS[name].title


def _size(layer: LayerInspection) -> str:
    groups, rows, columns = layer.shape
    size = f"{groups} groups of {rows} x {columns}" if groups > 1 else f"{rows} x {columns}"
    gradients = layer.comparison.gradients if layer.comparison else 0
    return (
        f"{size} parameters; {gradients:,} gradients, of {layer.compared_examples} examples with "
        f"targets {layer.targets}."
    )


# Approximations


def approximations_section(inspections: Sequence[Inspection]) -> Section | None:
    names = [found[0][-1].name for found in by_layer(inspections)]
    figures = [
        figure
        for number, inspection in enumerate(inspections)
        if (figure := _error_figure(number, inspection, names, len(inspections) > 1))
    ]
    if not figures:
        return None
    groups = [Group(figures, columns=min(max(len(figures), 1), 2))]
    groups += [
        Group((), heading(found), after="".join(_quality_tables(found, inspections)))
        for found in by_layer(inspections)
    ]
    before = note(QUALITY_READING) + key(enumerate(names))
    return Section("approximations", "Approximations", before, groups=groups)


def _quality_tables(found: Sequence[Found], inspections: Sequence[Inspection]) -> Iterator[str]:
    for _, label, layer in labelled(found, "", inspections):
        if layer.comparison is None:
            yield note(titled(label, "not compared."))
        else:
            yield html_table(quality_rows(layer.comparison), titled(label, _size(layer)))


def _error_figure(
    number: int, inspection: Inspection, names: Sequence[str], several: bool
) -> Figure | None:
    compared = [
        (layer.name, layer.comparison.approximations)
        for layer in inspection.layers
        if layer.comparison
    ]
    shown = [name for name in APPROXIMATIONS if any(name in found for _, found in compared)]
    if not shown:
        return None
    traces = []
    for layer, found in compared:
        present = [name for name in shown if name in found]
        errors = [found[name].frobenius_error for name in present]
        places = [shown.index(name) for name in present]
        at = [plain(APPROXIMATIONS[name].title) for name in present]
        look = line(names.index(layer), layer, places, errors, mode="markers")
        look["marker"] |= {"size": 10, "maxdisplayed": 0}
        traces.append({**look, "customdata": at, "hovertemplate": "%{customdata}: %{y:.3g}"})
    shape = layout("", "relative error")
    shape["yaxis"]["rangemode"] = "tozero"
    titles = [plain(APPROXIMATIONS[name].title) for name in shown]
    shape["xaxis"] |= {"tickvals": list(range(len(shown))), "ticktext": titles, "tickangle": -40}
    title = f"{inspection.label}: Frobenius error" if several else "Frobenius error"
    caption = "Of each approximation, a mark for each layer; lower is better."
    return Figure(f"errors-{number}", title, caption, shape, [traces])
