"""Inspection of every layer of a network: assumptions, correlations and approximations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kfc.analysis import (
    LayerComparison,
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
from kfc.lab.inspection.networks import InspectedNetwork
from kfc.lab.inspection.results import Inspection, InspectionSettings, LayerInspection
from kfc.lab.runs import environment
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
    layers = selected_layers(network, settings)
    outputs = network.outputs()
    steps = len(STEPS) + len(settings.approximations)
    found = []
    for index, (name, layer) in enumerate(layers.items()):
        report = _StepCounter(progress, index, len(layers), steps)
        found.append(_LayerInspector(network, settings, outputs, report).inspect(name, layer))
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


class _StepCounter:
    """Reports the progress of one of several layers."""

    def __init__(self, progress: Progress | None, layer: int, layers: int, steps: int) -> None:
        self._progress = progress
        self._layer, self._layers, self._steps = layer, layers, steps
        self._done = 0

    def __call__(self, layer: str, step: str) -> None:
        if self._progress is not None:
            part = min(self._done / self._steps, 1.0)
            self._progress(layer, step, (self._layer + part) / self._layers)
        self._done += 1


class _LayerInspector:
    """Inspects one layer of a network."""

    def __init__(
        self,
        network: InspectedNetwork,
        settings: InspectionSettings,
        outputs: Tensor,
        report: Callable[[str, str], None],
    ) -> None:
        self._network, self._settings, self._report = network, settings, report
        columns = resolve_likelihood(network.task.likelihood).columns_per_example(outputs)
        self._exact_samples = settings.exact_samples
        if columns > MAX_COLUMNS and self._exact_samples is None:
            self._exact_samples = MANY_SAMPLES
        self._exact_draws = self._exact_samples or columns

    def inspect(self, name: str, layer: MatrixLayer) -> LayerInspection:
        columns, rows = layer.factor_sizes()
        kind = type(layer.modules[0]).__name__
        found = LayerInspection(name, kind, (layer.groups, rows, columns))
        try:
            elements = self._derivatives_per_example(name)
            return self._with_comparison(self._with_assumptions(found, elements), elements)
        except ValueError as error:
            return replace(found, notes=(str(error),))

    def _with_assumptions(self, found: LayerInspection, elements: int) -> LayerInspection:
        """Add assumptions and correlations, from sampled targets."""
        settings, name = self._settings, found.name
        count = self._affordable(settings.samples * elements)
        self._report(name, STEPS[0])
        record = self._record(name, count, settings.samples)
        self._report(name, STEPS[1])
        tested = assumptions(record, reach=settings.reach, seed=settings.seed)
        self._report(name, STEPS[2])
        return replace(
            found,
            examples=count,
            assumptions=tested,
            correlations=correlations(record, settings.reach) if is_spatial(record) else None,
        )

    def _with_comparison(self, found: LayerInspection, elements: int) -> LayerInspection:
        """Add a comparison with the exact block, from enumerated targets if possible."""
        network, name, drawn = self._network, found.name, self._exact_samples
        if not self._settings.approximations:
            return found
        count = self._affordable(self._exact_draws * elements)
        self._report(name, STEPS[3])
        record = self._record(name, count, drawn)
        images = network.images[:count]
        gradient = loss_gradient(
            network.model, images, record, lambda outputs: network.loss(outputs, count), None
        )
        found = replace(
            found,
            compared_examples=count,
            targets="enumerated" if drawn is None else f"{drawn} drawn for each example",
        )
        try:
            comparison = self._compare(record, gradient)
        except UnsolvableError as error:
            return replace(found, notes=(f"the exact block was left out: {error}",))
        left_out = [f"{key} was left out: {why}" for key, why in comparison.left_out.items()]
        return replace(found, comparison=comparison, notes=tuple(left_out))

    def _compare(self, record: LayerRecord, gradient: Tensor) -> LayerComparison:
        return compare_blocks(
            record,
            gradient,
            self._settings.approximations,
            damping=self._settings.damping,
            seed=self._settings.seed,
            max_gib=self._settings.memory,
            progress=self._report,
        )

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
        one, two = (self._record(name, count, 1) for count in (1, 2))
        if _rows_per_example(one) != _rows_per_example(two):
            shapes = [tuple(call.outputs.shape) for call in two.calls]
            raise ValueError(
                f"layer {name!r} runs on rows that do not belong to one example each (shapes "
                f"{shapes} for two examples), so no example has a gradient of its own"
            )
        return sum(call.derivatives[0].numel() for call in one.calls)

    def _affordable(self, elements_per_example: int) -> int:
        """Return the number of examples, at most as many as fit into the memory."""
        size = torch.finfo(torch.get_default_dtype()).bits // 8
        most = self._settings.memory * GIB / (size * elements_per_example)
        return max(2, min(self._settings.examples, math.floor(most)))


def _rows_per_example(record: LayerRecord) -> list[float]:
    return [call.outputs.shape[0] / record.examples for call in record.calls]
