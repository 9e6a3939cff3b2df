"""What the layers of a model do in a step, from which its costs are counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from kfc.curvature.statistics import BatchStatistics
from kfc.fisher.calls import (
    SavedBuffers,
    accelerators_of,
    call_of,
    forked_random_state,
    suspended,
)
from kfc.fisher.compiled import eagerly
from kfc.layers import MatrixLayer
from kfc.optimizers.options import FisherClip
from kfc.statistics.functional import FunctionalCalls

if TYPE_CHECKING:
    from kfc.optimizers.engine import Engine


class Work(NamedTuple):
    """What a layer does in a step.

    Attributes:
        rows: the rows of its outputs, over all examples and locations.
        share: the part of them that statistics are gathered from.
        norm_share: the part of them that exact Fisher norms are computed on; 0 if there are none.
    """

    rows: float
    share: float
    norm_share: float = 0.0


class ModelWork(NamedTuple):
    """What a model does in a step.

    Attributes:
        layers: the work of every layer with curvature.
        others: the multiply-adds of everything else in the passes, relative to those of layers:
            attention, and layers that are frozen or have no factors.
    """

    layers: Mapping[str, Work]
    others: float = 0.0


def work_of(
    batch: BatchStatistics, others: float, clip: FisherClip | None = None, ranks: int = 1
) -> ModelWork:
    """Return the work of every layer in the step whose statistics these are."""
    found, norm_share = {}, _norm_share(clip, batch.examples // ranks)
    for name, moments in batch.moments.items():
        derivatives = [moment for moment in moments if moment.of_derivatives]
        share = moments[0].weight / max(1, batch.examples)
        if derivatives and share:
            found[name] = Work(derivatives[0].weight / share, share, norm_share)
    return ModelWork(found, others)


def _norm_share(clip: FisherClip | None, examples: int) -> float:
    """Return the part of a batch of so many examples that exact Fisher norms are computed on."""
    if clip is None or clip.limit is None:
        return 0.0
    return clip.examples_used(examples) / max(1, examples)


class _Elements:
    """Counts the elements of the outputs of layers, as a recorder of calls."""

    def __init__(self, layers: Collection[str]) -> None:
        self.wanted = layers
        self.counts = dict.fromkeys(layers, 0)

    def record(
        self, layer: str, inputs: Tensor, output: Tensor, edge: GradientEdge | None = None
    ) -> None:
        self.counts[layer] += output.numel()


def expected_work(engine: Engine, inputs: Any) -> ModelWork:
    """Return the work of every layer in steps with a batch like this one.

    The model runs once; its buffers, gradients and the random state stay as they are.
    """
    model, layers = engine.model, engine.plan.layers
    elements = _Elements(engine.curvature.trained_layers())
    calls = FunctionalCalls(elements, layers)

    handles = [
        module.register_forward_hook(
            lambda _, args, output, name=name: calls.record_module(name, args, output)
        )
        for name in elements.wanted
        if not layers[name].functional
        for module in layers[name].modules
    ]
    call, buffers = call_of(model, inputs), SavedBuffers(model)
    try:
        with (
            suspended(),
            eagerly(),
            torch.enable_grad(),
            forked_random_state(accelerators_of(model)),
            calls,
        ):
            outputs = engine.collector.losses.select(model(*call.args, **call.kwargs))
        calls.record_waiting()
    finally:
        buffers.restore()
        for handle in handles:
            handle.remove()
    examples = len(next(iter(outputs.values())))
    used, work = engine.collector.replays.examples_used(examples, elements.counts), {}
    norm_share = _norm_share(engine.clip, examples)
    for name, count_ in elements.counts.items():
        layer = layers[name]
        if isinstance(layer, MatrixLayer) and count_:
            rows = count_ / (layer.factor_sizes()[1] * layer.groups)
            work[name] = Work(rows, used / examples, norm_share)
    return ModelWork(work, calls.others())
