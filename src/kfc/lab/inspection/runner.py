"""Inspection of every layer of a network within a budget of time."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic as clock
from typing import Any

import torch

from kfc.analysis import (
    Comparison,
    Correlations,
    LayerRecord,
    correlations,
    factored_layers,
    loss_gradient,
    record_layer,
)
from kfc.analysis.blocks import GIB
from kfc.analysis.correlations import is_spatial
from kfc.analysis.krylov import UnsolvableError
from kfc.fisher.likelihoods import resolve_likelihood
from kfc.lab.config import ConfigError
from kfc.lab.environment import environment
from kfc.lab.inspection.networks import InspectedNetwork
from kfc.lab.inspection.results import (
    DRAWN_TARGETS,
    MOST_TARGETS,
    SIZES,
    Inspection,
    InspectionSettings,
    LayerInspection,
)
from kfc.layers import MatrixLayer

# Called with the layer, the next step, and the fraction of the inspection that is done.
Progress = Callable[[str, str, float], None]

# The time of a batch grows about with this power of its examples.
GROWTH = 1.2
# The number of batches for which the examples are chosen.
WANTED_BATCHES = 5
# The time of a second batch, relative to the first one.
LATER_PART = 0.6
# The part of the time for the layers; the rest is for reading data and writing the page.
USED_PART = 0.95
FIRST_STEP = "targets"


def inspect_network(
    network: InspectedNetwork, settings: InspectionSettings, progress: Progress | None = None
) -> Inspection:
    """Inspect one layer after another, so that only one layer's records are in memory.

    Raises:
        ConfigError: a layer does not exist, or none can be inspected.
    """
    found = _Inspector(network, settings, progress or (lambda *_: None)).inspect_all()
    if all(result.comparison is None for result in found):
        raise ConfigError(f"{network.label}: {found[0].notes[0]}")
    return Inspection(
        network.label, network.description, network.training, settings, environment(), found
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


def affordable_size(seconds: float, share: float, most: int) -> int:
    """Return the largest number of examples with which enough batches fit into the time.

    Args:
        seconds: the time of a batch of ``SIZES[0]`` examples, which is already spent.
        share: the time for the layer, in seconds.
        most: the largest number allowed.
    """
    fitting = [
        size
        for size in SIZES
        if size <= most
        and WANTED_BATCHES * seconds * (size / SIZES[0]) ** GROWTH <= share - seconds
    ]
    return max(fitting, default=min(SIZES[0], most))


class _Measurement:
    """The comparison of one layer, batch by batch, and its correlations in the first batch."""

    def __init__(self, inspector: _Inspector, name: str, size: int, comparison: Comparison) -> None:
        self._inspector, self._name, self._comparison = inspector, name, comparison
        self.size, self.batches, self.seconds = size, 0, 0.0
        self.correlations: Correlations | None = None
        self.finished = comparison.result

    def is_late(self, start: float, share: float) -> bool:
        """Return whether one more batch would take longer than the layer's share of the time."""
        # More is measured in the first batch; and an interval is worth half of a share more.
        expected = LATER_PART * self.seconds if self.batches == 1 else self.seconds
        return clock() + expected > start + (share if self.batches >= 3 else 1.5 * share)

    def measure_batch(self) -> None:
        """Measure the next batch, and its time."""
        start, inspector = clock(), self._inspector
        record, part = inspector.record(self._name, self.size, self.batches)
        network = inspector.network
        images, labels = network.images[part], network.labels[part]
        if self.batches == 0 and is_spatial(record):
            self.correlations = correlations(record, inspector.settings.reach)
        gradient = loss_gradient(
            network.model, images, record, lambda out: network.task.loss(out, images, labels), None
        )
        self._comparison.add(record, gradient)
        self.batches += 1
        inspector.count_batch()
        self.seconds = clock() - start


class _Inspector:
    """Inspects the layers of a network."""

    def __init__(
        self, network: InspectedNetwork, settings: InspectionSettings, progress: Progress
    ) -> None:
        self.network, self.settings, self._progress = network, settings, progress
        self.layers = selected_layers(network, settings)
        with torch.no_grad():
            outputs = network.model(network.images[: SIZES[-1]])
        if not bool(outputs.isfinite().all()):
            raise ConfigError(f"the outputs of {network.label} are not finite: nothing to compare")
        likelihood = resolve_likelihood(network.task.likelihood)
        columns = likelihood.columns_per_example(outputs)
        self._samples = settings.samples or (None if columns <= MOST_TARGETS else DRAWN_TARGETS)
        self._draws = self._samples or columns
        self._done, self._part = 0, 0.0
        self._batches_done = 0  # of the measurement in progress

    def inspect_all(self) -> tuple[LayerInspection, ...]:
        """Return the results of all layers, in the order of the network.

        Each layer gets an equal share of the time that is left; layers with small blocks come
        first, so that the others get what they do not need.
        """
        end = clock() + USED_PART * self.settings.budget
        sizes = {name: math.prod(layer.factor_sizes()) for name, layer in self.layers.items()}
        found = {}
        for name in sorted(self.layers, key=lambda name: sizes[name]):
            share = max(0.0, end - clock()) / (len(self.layers) - self._done)
            found[name] = self._inspect(name, self.layers[name], share)
            self._done, self._part = self._done + 1, 0.0
        return tuple(found[name] for name in self.layers)

    def count_batch(self) -> None:
        """Count one more batch of the measurement in progress."""
        self._batches_done += 1

    def record(self, name: str, size: int, batch: int) -> tuple[LayerRecord, slice]:
        """Return the record of a batch of examples, and their place among the images."""
        part = slice(batch * size, (batch + 1) * size)
        record = record_layer(
            self.network.model,
            self.network.images[part],
            name,
            likelihood=self.network.task.likelihood,
            samples=self._samples,
            seed=self.settings.seed + batch,
        )
        return record, part

    def _inspect(self, name: str, layer: MatrixLayer, share: float) -> LayerInspection:
        columns, rows = layer.factor_sizes()
        kind = type(layer.modules[0]).__name__
        start, results = clock(), dict[str, Any]()
        try:
            results = self._measured(name, share)
        except UnsolvableError as error:
            results = {"notes": (f"the exact block was left out: {error}",)}
        except ValueError as error:
            results = {"notes": (str(error),)}
        seconds = clock() - start
        return LayerInspection(
            name, kind, (layer.groups, rows, columns), seconds=seconds, **results
        )

    def _measured(self, name: str, share: float) -> dict[str, Any]:
        """Return the results of as many batches as fit into the time."""
        settings, start = self.settings, clock()
        most = self._fitting_examples(name)
        measurement = self._start(name, settings.examples or SIZES[0], most, start, share)
        measurement.measure_batch()
        if settings.examples is None:
            size = affordable_size(measurement.seconds, share, most)
            if size > measurement.size:
                measurement = self._start(name, size, most, start, share)
                measurement.measure_batch()
        available = len(self.network.images) // measurement.size
        while measurement.batches < min(settings.most_batches, available):
            if settings.batches is None and measurement.is_late(start, share):
                break
            measurement.measure_batch()
        comparison = measurement.finished()
        left_out = [f"{key} was left out: {why}" for key, why in comparison.left_out.items()]
        return {
            "examples": measurement.size,
            "targets": "all" if self._samples is None else f"{self._samples} drawn",
            "correlations": measurement.correlations,
            "comparison": comparison,
            "notes": tuple(left_out),
        }

    def _start(self, name: str, size: int, most: int, start: float, share: float) -> _Measurement:
        settings = self.settings
        fixed = settings.examples is not None and settings.batches is not None
        batches = settings.most_batches
        self._batches_done = 0

        # Without a reference to the measurement, which would keep its memory in a cycle.
        def report(layer: str, step: str) -> None:
            late = (clock() - start) / max(share, 1e-9)
            self._report(layer, step, self._batches_done / batches if fixed else late)

        comparison = Comparison(
            settings.approximations,
            damping=settings.damping,
            seed=settings.seed,
            max_gib=settings.memory,
            batches=batches,
            progress=report,
            expired=lambda: not fixed and clock() > start + 2 * share,
        )
        measurement = _Measurement(self, name, min(size, most), comparison)
        self._report(name, FIRST_STEP, self._part)
        return measurement

    def _report(self, layer: str, step: str, part: float) -> None:
        self._part = max(self._part, min(part, 0.99))
        self._progress(layer, step, (self._done + self._part) / len(self.layers))

    def _fitting_examples(self, name: str) -> int:
        """Return the largest number of examples in a batch: as many as exist and fit into memory.

        Raises:
            ValueError: the number of the layer's rows is not proportional to that of examples.
        """
        one, two = (self.record(name, count, 0)[0].calls for count in (1, 2))
        shapes = [tuple(call.outputs.shape) for call in two]
        if [2 * call.outputs.shape[0] for call in one] != [shape[0] for shape in shapes]:
            raise ValueError(
                f"layer {name!r} runs on rows that do not belong to one example each (shapes "
                f"{shapes} for two examples), so no example has a gradient of its own"
            )
        elements = self._draws * sum(call.derivatives[0].numel() for call in one)
        size = torch.finfo(torch.get_default_dtype()).bits // 8
        fitting = math.floor(self.settings.memory * GIB / (size * elements))
        wanted = self.settings.batches or min(WANTED_BATCHES, len(self.network.images) // 2)
        return max(2, min(fitting, len(self.network.images) // wanted))
