"""The multiply-adds of a step, counted from the shapes of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kfc.curvature.layer import Columns, LayerCurvature
from kfc.curvature.model import ModelCurvature
from kfc.curvature.statistics import BatchStatistics
from kfc.distributed.inverses import layer_size
from kfc.fisher.calls import (
    SavedBuffers,
    accelerators_of,
    call_of,
    forked_random_state,
    suspended,
)
from kfc.fisher.compiled import eagerly
from kfc.layers import MatrixLayer
from kfc.moments.folding import unfolded_shape
from kfc.optimizers.options import FisherClip

if TYPE_CHECKING:
    from kfc.optimizers.engine import Engine

# Decompositions and Fourier transforms take longer than products with as many multiply-adds.
HANDICAP = 2.0
# The multiply-adds in the time that it takes to average an entry of a wide factor, and to move an
# entry of a gradient.
AVERAGING, MOVING = 150.0, 100.0
# Exact Fisher norms are products of two vectors, the update and the momentum.
VECTORS = 2


class Costs(NamedTuple):
    """Multiply-adds of all ranks together, as those of large matrix products.

    Ranks that share the work of inverses have equal parts of each number.

    Attributes:
        plain: a forward and a backward pass through the linear and convolutional layers.
        statistics: gathering statistics once.
        inverses: computing all inverses once.
        natural_gradient: applying them.
        norms: computing exact Fisher norms once.
    """

    plain: float = 0.0
    statistics: float = 0.0
    inverses: float = 0.0
    natural_gradient: float = 0.0
    norms: float = 0.0

    def plus(self, other: Costs) -> Costs:
        return Costs(*(a + b for a, b in zip(self, other, strict=True)))

    def relative(self) -> Costs:
        """Return the costs relative to a forward and a backward pass."""
        return Costs(*(each / self.plain for each in self)) if self.plain else self


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


def work_of(
    batch: BatchStatistics, clip: FisherClip | None = None, ranks: int = 1
) -> dict[str, Work]:
    """Return the work of every layer in the step whose statistics these are."""
    found, norm_share = {}, _norm_share(clip, batch.examples // ranks)
    for name, moments in batch.moments.items():
        derivatives = [moment for moment in moments if moment.of_derivatives]
        share = moments[0].weight / max(1, batch.examples)
        if derivatives and share:
            found[name] = Work(derivatives[0].weight / share, share, norm_share)
    return found


def _norm_share(clip: FisherClip | None, examples: int) -> float:
    """Return the part of a batch of so many examples that exact Fisher norms are computed on."""
    if clip is None or clip.limit is None:
        return 0.0
    return clip.examples_used(examples) / max(1, examples)


def expected_work(engine: Engine, inputs: Any) -> dict[str, Work]:
    """Return the work of every layer in steps with a batch like this one.

    The model runs once, without gradients; its buffers and the random state stay as they are.
    """
    model, elements = engine.model, dict.fromkeys(engine.curvature.layers, 0)

    def count(name: str, output: Tensor) -> None:
        elements[name] += output.numel()

    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: count(name, output))
        for name, layer in engine.plan.layers.items()
        if not layer.functional
        for module in layer.modules
    ]
    call, buffers = call_of(model, inputs), SavedBuffers(model)
    try:
        with suspended(), eagerly(), torch.no_grad(), forked_random_state(accelerators_of(model)):
            outputs = engine.collector.losses.select(model(*call.args, **call.kwargs))
    finally:
        buffers.restore()
        for handle in handles:
            handle.remove()
    examples = len(next(iter(outputs.values())))
    used, work = engine.collector.replays.examples_used(examples, elements), {}
    norm_share = _norm_share(engine.clip, examples)
    for name, layer in engine.plan.layers.items():
        if isinstance(layer, MatrixLayer) and elements[name]:
            rows = elements[name] / (layer.factor_sizes()[1] * layer.groups)
            work[name] = Work(rows, used / examples, norm_share)
    return work


def counted_costs(
    curvature: ModelCurvature,
    work: Mapping[str, Work],
    columns: Mapping[str, Columns] = MappingProxyType({}),
) -> Costs:
    """Return the costs of a step in which layers do this work.

    Args:
        columns: the limits of inverses that are not known yet; by default those in force.
    """
    total = Costs()
    for name, own in work.items():
        layer = curvature.layers[name]
        if isinstance(layer.layer, MatrixLayer):
            total = total.plus(costs_of_layer(layer, own, columns.get(name)))
    return total


def costs_of_layer(curvature: LayerCurvature, work: Work, columns: Columns | None = None) -> Costs:
    """Return the costs of a linear or convolutional layer.

    Args:
        columns: the limits of an inverse that is not known yet; by default those in force.
    """
    layer = curvature.layer
    assert isinstance(layer, MatrixLayer)
    inputs, outputs = layer.factor_sizes()
    rows, groups = work.rows * work.share, layer.groups
    product = groups * inputs * outputs
    # A second forward pass is needed for a part of the examples only.
    passes = 2 if work.share < 1 else 1
    maps = inputs / layer.offsets
    # Pairs of offsets with different distances are a few times as many as offsets.
    moment = groups * maps**2 * min(layer.offsets**2, HANDICAP * 4 * layer.offsets) / 2
    # One-hot rows select rows of the weight, and are counted.
    multiplied, moment = (0, 0) if layer.one_hot else (product, moment)
    folded = [shape for shape in curvature.running_shapes() if shape != unfolded_shape(shape)]
    averaging = AVERAGING * sum(math.prod(unfolded_shape(shape)) for shape in folded)
    kept = curvature.inverse_shapes(curvature.inverse_widths(columns))
    solves = 0.0
    for name, vectors in (("activation", outputs), ("derivative", inputs)):
        shape = kept.get(name, kept.get(f"{name}_basis", ()))
        if len(shape) == 3:
            passes_of_matrix = 1 if shape[-1] == shape[-2] else 2
            solves += groups * shape[-1] * shape[-2] * passes_of_matrix * vectors
    # A forward pass, and for every vector two products of derivatives with the weight or its own.
    products = 1 + 2 * VECTORS
    return Costs(
        plain=3 * work.rows * multiplied,
        statistics=rows * (passes * multiplied + moment + groups * outputs**2 / 2) + averaging,
        inverses=HANDICAP * layer_size(curvature, columns).operations,
        natural_gradient=solves + MOVING * product,
        norms=products * (work.rows * work.norm_share * multiplied + MOVING * product)
        if work.norm_share
        else 0.0,
    )
