"""Inspection of every layer of a network: assumptions, correlations and approximations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kfc.analysis import (
    LayerRecord,
    assumptions,
    compare_blocks,
    correlations,
    factored_layers,
    loss_gradient,
    record_layer,
)
from kfc.analysis.blocks import GIB
from kfc.analysis.correlations import is_spatial
from kfc.analysis.krylov import UnsolvableError
from kfc.analysis.recording import MAX_COLUMNS
from kfc.fisher.likelihoods import resolve_likelihood
from kfc.lab.config import ConfigError
from kfc.lab.environment import environment
from kfc.lab.inspection.networks import InspectedNetwork
from kfc.lab.inspection.results import Inspection, InspectionSettings, LayerInspection
from kfc.layers import MatrixLayer

# Called with the layer, the next step, and the fraction of the inspection that is done.
Progress = Callable[[str, str, float], None]

# Targets drawn for the blocks if there are too many to enumerate.
MANY_SAMPLES = 64
STEPS = ("sampled targets", "assumptions", "correlations", "targets of the blocks", "exact block")


def inspect_network(
    network: InspectedNetwork, settings: InspectionSettings, progress: Progress | None = None
) -> Inspection:
    """Inspect one layer after another, so that only one layer's records are in memory.

    Raises:
        ConfigError: a layer does not exist, or none can be inspected.
    """
    inspector = _Inspector(network, settings, progress or (lambda *_: None))
    found = [inspector.inspect(name, layer) for name, layer in inspector.layers.items()]
    if all(result.assumptions is None for result in found):
        raise ConfigError(f"{network.label}: {found[0].notes[0]}")
    return Inspection(
        network.label, network.description, network.training, settings, environment(), tuple(found)
    )


def selected_layers(
    network: InspectedNetwork, settings: InspectionSettings
) -> dict[str, MatrixLayer]:
    """Return the layers to inspect, in the order of the network.

    Raises:
        ConfigError: one of them does not exist.
    """
    known = factored_layers(network.model)
    if not known:
        raise ConfigError(f"{network.label} has no trained layer with Kronecker factors")
    for name in settings.layers:
        if name not in known:
            raise ConfigError(
                f"layer: {network.label} has no layer {name!r} with Kronecker factors; it has "
                f"{', '.join(known)}"
            )
    return {name: known[name] for name in known if not settings.layers or name in settings.layers}


class _Inspector:
    """Inspects the layers of a network."""

    def __init__(
        self, network: InspectedNetwork, settings: InspectionSettings, progress: Progress
    ) -> None:
        self._network, self._settings, self._progress = network, settings, progress
        self.layers = selected_layers(network, settings)
        with torch.no_grad():
            outputs = network.model(network.images)
        if not bool(outputs.isfinite().all()):
            raise ConfigError(f"the outputs of {network.label} are not finite: nothing to compare")
        likelihood = resolve_likelihood(network.task.likelihood)
        self._columns = likelihood.columns_per_example(outputs)
        self._steps_done = 0

    def inspect(self, name: str, layer: MatrixLayer) -> LayerInspection:
        columns, rows = layer.factor_sizes()
        kind = type(layer.modules[0]).__name__
        results: dict[str, Any]
        try:
            elements = self._derivatives_per_example(name)
            results = self._assumptions(name, elements)
            if self._settings.approximations:
                results |= self._comparison(name, elements)
        except ValueError as error:
            results = {"notes": (str(error),)}
        return LayerInspection(name, kind, (layer.groups, rows, columns), **results)

    def _assumptions(self, name: str, elements: int) -> dict[str, Any]:
        """Return assumptions and correlations, from sampled targets."""
        settings = self._settings
        count = self._affordable(settings.samples * elements)
        self._report(name, STEPS[0])
        record = self._record(name, count, settings.samples)
        self._report(name, STEPS[1])
        tested = assumptions(record, reach=settings.reach, seed=settings.seed)
        self._report(name, STEPS[2])
        found = correlations(record, settings.reach) if is_spatial(record) else None
        return {"examples": count, "assumptions": tested, "correlations": found}

    def _comparison(self, name: str, elements: int) -> dict[str, Any]:
        """Return a comparison with the exact block, from enumerated targets if possible."""
        network, settings, drawn = self._network, self._settings, self._settings.exact_samples
        if drawn is None and self._columns > MAX_COLUMNS:
            drawn = MANY_SAMPLES
        count = self._affordable((drawn or self._columns) * elements)
        self._report(name, STEPS[3])
        record = self._record(name, count, drawn)
        images, labels = network.images[:count], network.labels[:count]
        gradient = loss_gradient(
            network.model, images, record, lambda out: network.task.loss(out, images, labels), None
        )
        targets = "enumerated" if drawn is None else f"{drawn} drawn for each example"
        results: dict[str, Any] = {"compared_examples": count, "targets": targets}
        try:
            comparison = compare_blocks(
                record,
                gradient,
                settings.approximations,
                damping=settings.damping,
                seed=settings.seed,
                max_gib=settings.memory,
                progress=self._report,
            )
        except UnsolvableError as error:
            return {**results, "notes": (f"the exact block was left out: {error}",)}
        left_out = [f"{key} was left out: {why}" for key, why in comparison.left_out.items()]
        return {**results, "comparison": comparison, "notes": tuple(left_out)}

    def _report(self, layer: str, step: str) -> None:
        self._steps_done = 0 if step == STEPS[0] else self._steps_done + 1
        part = min(self._steps_done / (len(STEPS) + len(self._settings.approximations)), 1.0)
        index = list(self.layers).index(layer)
        self._progress(layer, step, (index + part) / len(self.layers))

    def _record(self, name: str, count: int, samples: int | None) -> LayerRecord:
        return record_layer(
            self._network.model,
            self._network.images[:count],
            name,
            likelihood=self._network.task.likelihood,
            samples=samples,
            seed=self._settings.seed,
        )

    def _derivatives_per_example(self, name: str) -> int:
        """Return the number of derivatives for one target of one example.

        Raises:
            ValueError: the number of the layer's rows is not proportional to that of examples.
        """
        one, two = (self._record(name, count, 1).calls for count in (1, 2))
        shapes = [tuple(call.outputs.shape) for call in two]
        if [2 * call.outputs.shape[0] for call in one] != [shape[0] for shape in shapes]:
            raise ValueError(
                f"layer {name!r} runs on rows that do not belong to one example each (shapes "
                f"{shapes} for two examples), so no example has a gradient of its own"
            )
        return sum(call.derivatives[0].numel() for call in one)

    def _affordable(self, elements_per_example: int) -> int:
        """Return the number of examples, at most as many as fit into the memory."""
        size = torch.finfo(torch.get_default_dtype()).bits // 8
        most = self._settings.memory * GIB / (size * elements_per_example)
        return max(2, min(self._settings.examples, math.floor(most)))
