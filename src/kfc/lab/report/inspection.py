"""The page about inspected networks: correlations, spectra and errors of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc.analysis import APPROXIMATIONS, LayerComparison
from kfc.lab.inspection.results import Inspection, LayerInspection, thinned_ranks
from kfc.lab.report.figures import Figure, Json, layout, line, plain
from kfc.lab.report.heatmaps import cross_map_figure, offset_figure
from kfc.lab.report.inspection_tables import ASSUMPTIONS, notes_of, quality_rows, verdict_rows
from kfc.lab.report.rendering import write_html
from kfc.lab.report.tables import Comparison, Row, compare_values

# Eigenvalues below this share of the largest one count as zero.
NEGLIGIBLE = 1e-12
# The titles of all spectra; a title's position is the index of its line style.
SPECTRA = {"exact": "exact block"} | {name: kind.title for name, kind in APPROXIMATIONS.items()}
CORRELATIONS = {
    "offsets": (offset_figure, "correlation over space"),
    "maps": (cross_map_figure, "correlation between maps"),
}


class NetworkLayer(NamedTuple):
    """A layer of one network.

    Attributes:
        id: "LAYER-NETWORK", by index; part of the ids of its figures.
        label: of the network; empty if there is only one.
    """

    id: str
    label: str
    layer: LayerInspection

    def titled(self, text: str) -> str:
        """Return text with the label in front, or with a capital letter if there is no label."""
        return f"{self.label}: {text}" if self.label else text[:1].upper() + text[1:]


Layers = dict[str, list[NetworkLayer]]


def write_inspection_page(path: Path, inspections: Sequence[Inspection], title: str) -> None:
    """Write the page atomically, with the networks side by side.

    Raises:
        OSError: the file or its folder cannot be written.
    """
    layers = _layers_by_name(inspections)
    columns = min(max(len(inspections), 2), 3)
    sections = {
        "assumptions": {
            "networks": [
                {"label": one.label, "rows": verdict_rows(one), "notes": notes_of(one)}
                for one in inspections
            ],
            "definitions": ASSUMPTIONS,
        },
        "derivatives": _correlations("derivative", layers, columns),
        "activations": _correlations("activation", layers, columns),
        "spectra": _spectra(layers, columns),
        "approximations": _approximations(inspections, layers),
        "networks": _networks(inspections),
    }
    write_html(path, "inspection.html", title=title, sections=sections)


def _layers_by_name(inspections: Sequence[Inspection]) -> Layers:
    """Return the layers of all networks, grouped by their names."""
    names = list(dict.fromkeys(layer.name for one in inspections for layer in one.layers))
    layers: Layers = {name: [] for name in names}
    for number, inspection in enumerate(inspections):
        label = inspection.label if len(inspections) > 1 else ""
        for layer in inspection.layers:
            id = f"{names.index(layer.name)}-{number}"
            layers[layer.name].append(NetworkLayer(id, label, layer))
    return layers


def _heading(group: Sequence[NetworkLayer]) -> str:
    """Return the common name of layers, and their types."""
    kinds = dict.fromkeys(one.layer.kind for one in group)
    return f"{group[0].layer.name} ({', '.join(kinds)})"


# Correlations


def _correlations(side: str, layers: Layers, columns: int) -> dict[str, Any] | None:
    """Return the heat maps of one side of the layers, "derivative" or "activation"."""
    groups = []
    for group in layers.values():
        figures = [
            draw(f"{side}s-{one.id}-{kind}", one.titled(title), correlations)
            for kind, (draw, title) in CORRELATIONS.items()
            for one in group
            if (correlations := getattr(one.layer.correlations, f"{side}_{kind}", None)) is not None
        ]
        if figures:
            groups.append({"title": _heading(group), "figures": figures})
    return {"groups": groups, "columns": columns} if groups else None


# Spectra


def _spectra(layers: Layers, columns: int) -> dict[str, Any] | None:
    """Return a figure for each layer with spectra, or ``None`` if there are none."""
    figures = []
    shown: set[str] = set()
    for id, label, layer in chain.from_iterable(layers.values()):
        lines = _spectrum_lines(layer.comparison) if layer.comparison else {}
        if lines:
            title = f"{label}: {layer.name}" if label else layer.name
            shape = layout("rank", "eigenvalue", log="xy")
            variants = [list(lines.values())]
            figures.append(Figure(f"spectrum-{id}", shape, variants, title, _size(layer)))
            shown |= lines.keys()
    if not figures:
        return None
    legend = [(i, title) for i, (name, title) in enumerate(SPECTRA.items()) if name in shown]
    return {"legend": legend, "figures": figures, "columns": columns}


def _spectrum_lines(comparison: LayerComparison) -> dict[str, Json]:
    spectra = {"exact": comparison.spectrum} | {
        name: quality.spectrum for name, quality in comparison.approximations.items()
    }
    lines = {}
    for index, (name, title) in enumerate(SPECTRA.items()):
        spectrum = spectra.get(name)
        ranks, values = ([], []) if spectrum is None else _positive_eigenvalues(spectrum)
        if ranks:
            at = "%{y:.3g} at rank %{x}"
            lines[name] = line(index, title, ranks, values, hovertemplate=at)
    return lines


def _positive_eigenvalues(spectrum: Tensor) -> tuple[list[int], list[float]]:
    """Return the ranks and values of positive eigenvalues, thinned."""
    floor = float(spectrum.abs().max()) * NEGLIGIBLE if len(spectrum) else 0.0
    positive = spectrum[spectrum > floor]
    ranks = thinned_ranks(len(positive))
    return ranks, positive[torch.tensor(ranks, dtype=torch.long) - 1].tolist()


def _size(layer: LayerInspection) -> str:
    """Describe the size of a layer's Fisher block, and the gradients it was computed from."""
    groups, rows, columns = layer.shape
    size = f"{groups} groups of {rows} x {columns}" if groups > 1 else f"{rows} x {columns}"
    gradients = layer.comparison.gradients if layer.comparison else 0
    return (
        f"{size} parameters; {gradients:,} gradients from {layer.compared_examples} examples, "
        f"targets {layer.targets}."
    )


# Approximations


def _approximations(inspections: Sequence[Inspection], layers: Layers) -> dict[str, Any] | None:
    """Return the errors of all approximations, or ``None`` if no layer was compared."""
    figures = [
        figure
        for number, one in enumerate(inspections)
        if (figure := _error_figure(number, one, list(layers), several=len(inspections) > 1))
    ]
    if not figures:
        return None
    return {
        "legend": list(enumerate(layers)),
        "figures": figures,
        "layers": [
            {"title": _heading(group), "tables": [_quality_table(one) for one in group]}
            for group in layers.values()
        ],
    }


def _quality_table(one: NetworkLayer) -> tuple[str, list[Row]]:
    """Return a caption and a table; the table is empty if the layer was not compared."""
    comparison = one.layer.comparison
    if comparison is None:
        return one.titled("not compared."), []
    return one.titled(_size(one.layer)), quality_rows(comparison)


def _error_figure(
    number: int, inspection: Inspection, names: Sequence[str], several: bool
) -> Figure | None:
    """Return the errors of one network's approximations, with a marker for each layer."""
    compared = {
        layer.name: layer.comparison.approximations
        for layer in inspection.layers
        if layer.comparison
    }
    shown = [
        name for name in APPROXIMATIONS if any(name in qualities for qualities in compared.values())
    ]
    if not shown:
        return None
    titles = [plain(APPROXIMATIONS[name].title) for name in shown]
    traces = []
    for layer, qualities in compared.items():
        places = [place for place, name in enumerate(shown) if name in qualities]
        trace = line(
            names.index(layer),
            layer,
            places,
            [qualities[shown[place]].frobenius_error for place in places],
            mode="markers",
            customdata=[titles[place] for place in places],
            hovertemplate="%{customdata}: %{y:.3g}",
        )
        trace["marker"] |= {"size": 10, "maxdisplayed": 0}
        traces.append(trace)
    shape = layout("", "relative error")
    shape["yaxis"]["rangemode"] = "tozero"
    shape["xaxis"] |= {"tickvals": list(range(len(shown))), "ticktext": titles, "tickangle": -40}
    caption = "Error of each approximation, with a marker for each layer. Lower is better."
    title = f"{inspection.label}: Frobenius error" if several else "Frobenius error"
    return Figure(f"errors-{number}", shape, [traces], title, caption)


# Networks and settings


def _networks(inspections: Sequence[Inspection]) -> dict[str, Comparison]:
    parts: dict[str, list[Mapping[str, Any]]] = {
        "Networks and training": [{**one.network, **(one.training or {})} for one in inspections],
        "Settings of the inspection": [_settings(one) for one in inspections],
        "Machine": [one.environment for one in inspections],
    }
    labels = [one.label for one in inspections]
    return {title: compare_values(labels, columns) for title, columns in parts.items()}


def _settings(inspection: Inspection) -> dict[str, Any]:
    values = asdict(inspection.settings)
    values["layers"] = ", ".join(values["layers"]) or "all"
    values["approximations"] = ", ".join(values["approximations"])
    exact = values.pop("exact_samples")
    return {**values, "samples for the blocks": exact or "all targets"}
