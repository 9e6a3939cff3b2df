"""Tables and the page about inspected networks: assumptions, correlations, spectra and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kfc.analysis import APPROXIMATIONS, STEPS, Estimate, LayerComparison, Step, rung_estimates
from kfc.lab.inspection.results import Inspection, LayerInspection, thinned_spectrum
from kfc.lab.report.advice import advice_notes, advice_rows
from kfc.lab.report.figures import Figure, layout, line, plain
from kfc.lab.report.heatmaps import cross_map_figure, offset_figure
from kfc.lab.report.rendering import write_html
from kfc.lab.report.tables import MISSING, Comparison, Row, compare_values, number

ASSUMPTIONS = tuple(STEPS)
LOSS_NAMES = {"trace": "of the trace", "frobenius": "in error", "decrease": "of the decrease"}
# The rungs of the ladder, by what they add to the one above in the table.
RUNGS = {
    "iad": "+ IAD",
    "iad-sud": "+ SUD",
    "kfc": "+ SH = KFC",
    "sua": "+ SUA",
    "prong": "+ WD = PRONG",
}
QUALITIES = (
    *("approximation", "assumes", "trace ratio", "Frobenius error", "decrease"),
    *("operator error", "cosine", "PSD"),
)
# The figures of all approximations: what they show, and the place of its estimate.
MEASURES = {"errors": "Frobenius error", "decreases": "decrease", "traces": "trace ratio"}
CAPTIONS = {
    "errors": "Distance from the exact block; lower is better.",
    "decreases": "Decrease of the loss at equal norm vᵀ(F + δ)v; 1 is the exact block's.",
    "traces": "Trace relative to the exact block's; 1 is right.",
}
PLACES = {"traces": 0, "errors": 1, "decreases": 2}
# Eigenvalues below this share of the largest one count as zero.
NEGLIGIBLE = 1e-12
# Narrower intervals are due to rounding.
NEGLIGIBLE_WIDTH = 1e-5
# The titles of all spectra; a title's position is the index of its line style.
SPECTRA = {"exact": "exact block"} | {name: kind.title for name, kind in APPROXIMATIONS.items()}
CORRELATIONS = {
    "offsets": (offset_figure, "correlation over space"),
    "maps": (cross_map_figure, "correlation between maps"),
}

# Tables, for the terminal and for the page


def verdict_rows(inspection: Inspection) -> list[Row]:
    """Return a table with a row for each layer and a column for each assumption."""
    rows: list[Row] = [("layer", *ASSUMPTIONS)]
    for layer in inspection.layers:
        steps = layer.steps
        rows.append((layer.name, *(_verdict(steps.get(name)) for name in ASSUMPTIONS)))
    return rows


def _verdict(step: Step | None) -> str:
    """Format a verdict with its interval, for example "fails 0.42 (0.35 to 0.49) of trace"."""
    if step is None:
        return MISSING
    if math.isnan(step.deciding.value):
        return step.verdict
    # Adding 0.0 turns -0.0 into 0.0.
    value, low, high = (f"{round(v, 2) + 0.0:.2f}" for v in astuple(step.deciding))
    interval = "" if math.isnan(step.deciding.low) else f" ({low} to {high})"
    return f"{step.verdict} {value}{interval} {LOSS_NAMES[step.measure]}"


def quality_rows(comparison: LayerComparison) -> list[Row]:
    """Return a table with a row for each approximation of a layer's Fisher block."""
    rows: list[Row] = [QUALITIES]
    for name, quality in comparison.approximations.items():
        trace, error, decrease = map(_estimated, rung_estimates(quality))
        others = (quality.operator_error, quality.cosine)
        kind, positive = APPROXIMATIONS[name], "yes" if quality.positive else "no"
        title = RUNGS.get(name, kind.title)
        rows.append((title, kind.assumes, trace, error, decrease, *map(_finite, others), positive))
    return rows


def _estimated(estimate: Estimate) -> str:
    """Format a number with half the width of its interval, for example "0.42 ± 0.07"."""
    half = estimate.high - estimate.value
    return _finite(estimate.value) + (f" ± {half:.1g}" if half > NEGLIGIBLE_WIDTH else "")


def _finite(value: float) -> str:
    return number(value) if math.isfinite(value) else MISSING


def notes_of(inspection: Inspection) -> list[str]:
    """Return notes about what was measured, how precisely, and what was left out and why."""
    note = (inspection.training or {}).get("note")
    notes = [note] if note else []
    for layer in inspection.layers:
        notes += [f"{layer.name}: {note}" for note in layer.notes]
        if layer.comparison is not None:
            notes.append(f"{layer.name}: {_precision(layer, layer.comparison)}")
    return notes


def _precision(layer: LayerInspection, comparison: LayerComparison) -> str:
    """Return how many batches were measured, and the widest intervals."""
    count = comparison.batches
    many = "1 batch" if count == 1 else f"{count} batches"
    text = f"{many} of {layer.examples} examples, targets: {layer.targets}, {layer.seconds:.0f} s"
    estimates = [rung_estimates(each) for each in comparison.approximations.values()]
    if count < 3 or not estimates:
        return f"{text}; no intervals, which need three batches"
    widths = [
        max(each.high - each.value for each in column) for column in zip(*estimates, strict=True)
    ]
    names = ("trace ratios", "errors", "decreases")
    reached = (f"{name} to ±{width:.1g}" for name, width in zip(names, widths, strict=True))
    return f"{text}; {', '.join(reached)} or better"


# The page


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
    """Write the page atomically, with the networks side by side."""
    layers = _layers_by_name(inspections)
    sections = {
        "assumptions": [
            {"label": one.label, "rows": verdict_rows(one), "notes": notes_of(one)}
            for one in inspections
        ],
        "advice": [
            {"label": one.label, "rows": advice_rows(one.advice), "notes": advice_notes(one.advice)}
            for one in inspections
            if one.advice is not None
        ],
        "derivatives": _correlations("derivative", layers),
        "activations": _correlations("activation", layers),
        "spectra": _spectra(layers),
        "approximations": _approximations(inspections, layers),
        "networks": _networks(inspections),
    }
    columns = min(max(len(inspections), 2), 3)
    texts = {"title": title, "verdict": inspection_verdict(inspections)}
    write_html(path, "inspection.html", sections=sections, columns=columns, **texts)


def inspection_verdict(inspections: Sequence[Inspection]) -> str:
    """Return how many assumptions hold, and how good KFC's steps are, in one sentence."""
    layers = [layer for one in inspections for layer in one.layers]
    verdicts = [step.verdict for layer in layers for step in layer.steps.values()]
    hold, roughly, fail = (verdicts.count(name) for name in ("holds", "roughly", "fails"))
    found = f"Of the tested assumptions, {hold} hold, {roughly} hold roughly and {fail} fail"
    if unclear := verdicts.count("unclear"):
        found += f"; {unclear} {'need' if unclear > 1 else 'needs'} more batches to tell"
    decreases = [
        quality.decrease
        for layer in layers
        if layer.comparison is not None
        for name, quality in layer.comparison.approximations.items()
        if name == "kfc" and math.isfinite(quality.decrease)
    ]
    if decreases:
        found += (
            f"; a step of KFC lowers the loss by {median(decreases):.0%} of what the exact block "
            "gives (the median of the layers)"
        )
    return f"{found}."


def _layers_by_name(inspections: Sequence[Inspection]) -> Layers:
    """Return the layers of all networks, grouped by their names."""
    names = list(dict.fromkeys(layer.name for one in inspections for layer in one.layers))
    layers: Layers = {name: [] for name in names}
    for index, inspection in enumerate(inspections):
        label = inspection.label if len(inspections) > 1 else ""
        for layer in inspection.layers:
            id = f"{names.index(layer.name)}-{index}"
            layers[layer.name].append(NetworkLayer(id, label, layer))
    return layers


def _heading(group: Sequence[NetworkLayer]) -> str:
    """Return the common name of layers, and their types."""
    kinds = dict.fromkeys(one.layer.kind for one in group)
    return f"{group[0].layer.name} ({', '.join(kinds)})"


def _correlations(side: str, layers: Layers) -> dict[str, list[Figure]]:
    """Return the heat maps of one side of the layers, "derivative" or "activation", by heading."""
    groups = {}
    for group in layers.values():
        figures = [
            draw(f"{side}s-{one.id}-{kind}", one.titled(title), correlations)
            for kind, (draw, title) in CORRELATIONS.items()
            for one in group
            if (correlations := getattr(one.layer.correlations, f"{side}_{kind}", None)) is not None
            # The correlation of a single map with itself is always 1.
            if kind != "maps" or len(correlations) > 1
        ]
        if figures:
            groups[_heading(group)] = figures
    return groups


def _spectra(layers: Layers) -> dict[str, Any] | None:
    """Return a figure for each layer with spectra, or ``None`` if there are none."""
    figures = []
    shown = set()
    for id, label, layer in chain.from_iterable(layers.values()):
        lines = []
        for index, (name, title) in enumerate(SPECTRA.items()):
            spectrum = layer.spectra.get(name)
            if spectrum is None or not len(spectrum):
                continue
            positive = spectrum[spectrum > spectrum.abs().max() * NEGLIGIBLE]
            ranks, values = thinned_spectrum(positive)
            if ranks:
                at = "%{y:.3g} at rank %{x}"
                lines.append(line(index, title, ranks, values, hovertemplate=at))
                shown.add((index, title))
        if lines:
            title = f"{layer.name} ({layer.kind})"
            title = f"{label}: {title}" if label else title
            shape = layout("rank", "eigenvalue", log="xy")
            figures.append(Figure(f"spectrum-{id}", shape, [lines], title, _size(layer)))
    return {"legend": sorted(shown), "figures": figures} if figures else None


def _size(layer: LayerInspection) -> str:
    """Describe the size of a layer's Fisher block, and the gradients it was computed from."""
    groups, rows, columns = layer.shape
    size = f"{groups} groups of {rows} x {columns}" if groups > 1 else f"{rows} x {columns}"
    found = layer.comparison
    if found is None:
        return f"{size} parameters."
    batches = "a batch" if found.batches == 1 else f"each of {found.batches} batches"
    return (
        f"{size} parameters; {found.gradients:,} gradients in {batches} of {layer.examples} "
        f"examples, targets: {layer.targets}."
    )


def _approximations(inspections: Sequence[Inspection], layers: Layers) -> dict[str, Any] | None:
    """Return the numbers of all approximations, or ``None`` if no layer was compared."""
    figures = [
        figure
        for index, one in enumerate(inspections)
        for kind in MEASURES
        if (figure := _measure_figure(kind, index, one, list(layers), len(inspections) > 1))
    ]
    tables = {
        _heading(group): [
            (one.titled(_size(one.layer)), quality_rows(one.layer.comparison))
            if one.layer.comparison
            else (one.titled("not compared."), [])
            for one in group
        ]
        for group in layers.values()
    }
    legend = list(enumerate(map(_heading, layers.values())))
    return {"legend": legend, "figures": figures, "layers": tables} if figures else None


def _measure_figure(
    kind: str, index: int, inspection: Inspection, names: Sequence[str], several: bool
) -> Figure | None:
    """Return one number of a network's approximations, with a marker for each layer."""
    compared = {
        layer.name: layer.comparison.approximations
        for layer in inspection.layers
        if layer.comparison
    }
    shown = [name for name in APPROXIMATIONS if any(name in each for each in compared.values())]
    if not shown:
        return None
    titles = [plain(RUNGS.get(name, APPROXIMATIONS[name].title)) for name in shown]
    traces = []
    for layer, qualities in compared.items():
        places = [place for place, name in enumerate(shown) if name in qualities]
        found = [rung_estimates(qualities[shown[place]])[PLACES[kind]] for place in places]
        trace = line(
            names.index(layer),
            layer,
            places,
            [each.value for each in found],
            mode="markers",
            customdata=[titles[place] for place in places],
            hovertemplate="%{customdata}: %{y:.3g}",
        )
        trace["marker"] |= {"size": 10, "maxdisplayed": 0}
        reach = [each.high - each.value for each in found]
        if all(math.isfinite(each) for each in reach):
            trace["error_y"] = {"array": [round(each, 4) for each in reach], "thickness": 1}
        traces.append(trace)
    name = MEASURES[kind]
    shape = layout("", name, log="y" if kind == "traces" else "")
    if kind != "traces":
        shape["yaxis"]["rangemode"] = "tozero"
    shape["xaxis"] |= {"tickvals": list(range(len(shown))), "ticktext": titles, "tickangle": -40}
    caption = f"{CAPTIONS[kind]} A marker for each layer; bars are 95% intervals."
    title = f"{inspection.label}: {name}" if several else name.capitalize()
    return Figure(f"{kind}-{index}", shape, [traces], title, caption)


def _networks(inspections: Sequence[Inspection]) -> dict[str, Comparison]:
    """Return tables of the networks, settings and machines."""
    labels = [one.label for one in inspections]
    settings = []
    for one in inspections:
        values = asdict(one.settings)
        values["layers"] = ", ".join(values["layers"]) or "all"
        values["approximations"] = ", ".join(values["approximations"])
        values["budget"] = f"{values['budget']:g} s"
        for name in ("examples", "batches", "samples"):
            values[name] = values[name] or "chosen"
        settings.append(values)
    networks = [{**one.network, **(one.training or {})} for one in inspections]
    return {
        "Networks and training": compare_values(labels, networks),
        "Settings of the inspection": compare_values(labels, settings),
        "Machine": compare_values(labels, [one.environment for one in inspections]),
    }
