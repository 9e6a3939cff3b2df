"""The multiply-adds of a step, counted from the shapes of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from kfc.curvature.layer import Columns, LayerCurvature
from kfc.curvature.model import ModelCurvature
from kfc.distributed.inverses import layer_size
from kfc.layers import MatrixLayer
from kfc.moments.folding import unfolded_shape
from kfc.optimizers.work import ModelWork, Work

# Decompositions and Fourier transforms take longer than products with as many multiply-adds.
HANDICAP = 2.0
# The multiply-adds in the time that it takes to average an entry of a wide factor, and to move an
# entry of a gradient, or of a layer's outputs in one of the passes.
AVERAGING, MOVING = 150.0, 100.0
# Exact Fisher norms are products of two vectors, the update and the momentum.
VECTORS = 2


class Costs(NamedTuple):
    """Multiply-adds of all ranks together, as those of large matrix products.

    Ranks that share the work of inverses have equal parts of each number.

    Attributes:
        plain: a forward and a backward pass.
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


def counted_costs(
    curvature: ModelCurvature,
    work: ModelWork,
    columns: Mapping[str, Columns] = MappingProxyType({}),
) -> Costs:
    """Return the costs of a step in which layers do this work.

    Args:
        columns: the limits of inverses that are not known yet; by default those in force.
    """
    total = Costs()
    for name, own in work.layers.items():
        layer = curvature.layers[name]
        if isinstance(layer.layer, MatrixLayer):
            total = total.plus(costs_of_layer(layer, own, columns.get(name)))
    whole = 1 + work.others
    return total._replace(plain=total.plain * whole, norms=total.norms * whole)


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
    # Passes through narrow layers, such as depthwise convolutions, move entries rather than
    # multiply them.
    passed = groups * max(inputs, MOVING) * outputs
    # A second forward pass is needed for a part of the examples only.
    passes = 2 if work.share < 1 else 1
    maps = inputs / layer.offsets
    # Pairs of offsets with different distances are a few times as many as offsets.
    pairs = min(layer.offsets**2, HANDICAP * 4 * layer.offsets)
    moment = groups * maps * max(maps * pairs / 2, MOVING)
    derivatives = groups * outputs * max(outputs / 2, MOVING)
    # One-hot rows select rows of the weight, and are counted.
    passed, moment = (0, 0) if layer.one_hot else (passed, moment)
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
        plain=3 * work.rows * passed,
        statistics=rows * (passes * passed + moment + derivatives) + averaging,
        inverses=HANDICAP * layer_size(curvature, columns).operations,
        natural_gradient=solves + MOVING * product,
        norms=products * (work.rows * work.norm_share * passed + MOVING * product)
        if work.norm_share
        else 0.0,
    )
