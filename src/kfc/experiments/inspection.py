"""Inspect a network: assumptions, correlations and approximations of every layer."""

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
from kfc.experiments.config import ConfigError
from kfc.experiments.findings import Inspection, InspectionSettings, LayerInspection
from kfc.experiments.runs import environment
from kfc.experiments.subjects import Subject, outputs_of
from kfc.layers import KroneckerHandler
from kfc.likelihoods import resolve_likelihood

# (layer, what comes next, part of the way)
Progress = Callable[[str, str, float], None]

# Drawn for the blocks where there are too many targets to enumerate.
MANY_SAMPLES = 64
STEPS = ("sampled targets", "assumptions", "correlations", "targets of the blocks", "exact block")


def inspect_network(
    subject: Subject, settings: InspectionSettings, progress: Progress | None = None
) -> Inspection:
    """All of it, one layer after the other: only one layer's records are held at a time.

    Raises:
        ConfigError: a layer that is not there, or none that can be inspected.
    """
    handlers = chosen_layers(subject, settings)
    outputs = outputs_of(subject)
    steps = len(STEPS) + len(settings.approximations)
    found = []
    for index, (name, handler) in enumerate(handlers.items()):
        tell = _Steps(progress, index, len(handlers), steps)
        found.append(_LayerInspector(subject, settings, outputs, tell).inspect(name, handler))
    if all(layer.assumptions is None for layer in found):
        raise ConfigError(f"{subject.label}: {found[0].notes[0]}")
    return Inspection(
        subject.label, subject.what, subject.training, settings, environment(), tuple(found)
    )


def chosen_layers(subject: Subject, settings: InspectionSettings) -> dict[str, KroneckerHandler]:
    """In the order of the network.

    Raises:
        ConfigError: one of them is not there.
    """
    known = factored_layers(subject.model)
    if not known:
        raise ConfigError(f"{subject.label} has no trained layer with Kronecker factors")
    for name in settings.layers:
        if name not in known:
            raise ConfigError(
                f"layer: {subject.label} has no {name!r} with Kronecker factors; it has "
                f"{', '.join(known)}"
            )
    return {
        name: handler
        for name, handler in known.items()
        if not settings.layers or name in settings.layers
    }


class _Steps:
    """Tells how far the inspection is."""

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
    """One layer of a network."""

    def __init__(
        self,
        subject: Subject,
        settings: InspectionSettings,
        outputs: Tensor,
        tell: Callable[[str, str], None],
    ) -> None:
        self._subject, self._settings, self._tell = subject, settings, tell
        columns = resolve_likelihood(subject.task.likelihood).columns_per_example(outputs)
        self._exact_samples = settings.exact_samples
        if columns > MAX_COLUMNS and self._exact_samples is None:
            self._exact_samples = MANY_SAMPLES
        self._exact_draws = self._exact_samples or columns

    def inspect(self, name: str, handler: KroneckerHandler) -> LayerInspection:
        columns, rows = handler.sizes()
        kind = type(handler.modules[0]).__name__
        found = LayerInspection(name, kind, (handler.groups, rows, columns))
        try:
            elements = self._derivatives_per_example(name)
            return self._compared(self._tested(found, elements), elements)
        except ValueError as error:
            return replace(found, notes=(str(error),))

    def _tested(self, found: LayerInspection, elements: int) -> LayerInspection:
        """With assumptions and correlations, from sampled targets."""
        settings, name = self._settings, found.name
        count = self._affordable(settings.samples * elements)
        self._tell(name, STEPS[0])
        record = self._record(name, count, settings.samples)
        self._tell(name, STEPS[1])
        tested = assumptions(record, reach=settings.reach, seed=settings.seed)
        self._tell(name, STEPS[2])
        return replace(
            found,
            examples=count,
            assumptions=tested,
            correlations=correlations(record, settings.reach) if is_spatial(record) else None,
        )

    def _compared(self, found: LayerInspection, elements: int) -> LayerInspection:
        """With approximations beside the exact block, from enumerated targets if possible."""
        subject, settings, name = self._subject, self._settings, found.name
        if not settings.approximations:
            return found
        count = self._affordable(self._exact_draws * elements)
        self._tell(name, STEPS[3])
        record = self._record(name, count, self._exact_samples)
        images = subject.images[:count]
        gradient = loss_gradient(
            subject.model, images, record, lambda outputs: subject.loss(outputs, count), None
        )
        drawn = self._exact_samples
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
            progress=self._tell,
        )

    def _record(self, name: str, count: int, samples: int | None) -> LayerRecord:
        return record_layer(
            self._subject.model,
            self._subject.images[:count],
            name,
            likelihood=self._subject.task.likelihood,
            samples=samples,
            seed=self._settings.seed,
        )

    def _derivatives_per_example(self, name: str) -> int:
        """How many there are for one target.

        Raises:
            ValueError: the layer's rows do not become more with the examples.
        """
        one, two = (self._record(name, count, 1) for count in (1, 2))
        if _rows_per_example(one) != _rows_per_example(two):
            shapes = [tuple(call.outputs.shape) for call in two.calls]
            raise ValueError(
                f"layer {name!r} runs on rows that do not belong to one of two examples each "
                f"(shapes {shapes}), so that no example has a gradient of its own"
            )
        return sum(call.derivatives[0].numel() for call in one.calls)

    def _affordable(self, elements_per_example: int) -> int:
        """So many examples' derivatives fit into the memory, of those that are wanted."""
        size = torch.finfo(torch.get_default_dtype()).bits // 8
        most = self._settings.memory * GIB / (size * elements_per_example)
        return max(2, min(self._settings.examples, math.floor(most)))


def _rows_per_example(record: LayerRecord) -> list[float]:
    """Of every call; the same for any number of examples, unless they are not along the rows."""
    return [call.outputs.shape[0] / record.examples for call in record.calls]
