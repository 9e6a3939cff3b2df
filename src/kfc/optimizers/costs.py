"""The multiply-adds of a step, counted from the shapes of layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kfc.curvature.kfc import KroneckerCurvature
from kfc.curvature.layer import Columns, LayerCurvature
from kfc.curvature.low_rank import MULTIPLE, NARROWEST, most_columns
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
from kfc.optimizers.saved import check_allowance

if TYPE_CHECKING:
    from kfc.optimizers.engine import Engine

logger = logging.getLogger("kfc")

# Decompositions and Fourier transforms take longer than products with as many multiply-adds.
HANDICAP = 2.0
# The multiply-adds in the time that it takes to average an entry of a wide factor, and to move an
# entry of a gradient.
AVERAGING, MOVING = 150.0, 100.0
# Step t may spend 1 + EARLY / t times the overhead.
EARLY = 10.0
# The least share of the overhead that is left for refreshes, whatever natural gradients cost, and
# the least for the ranks of inverses.
LEAST_SHARE, LEAST_RANK_SHARE = 0.3, 0.2
# The largest amount that is saved for later steps, in forward and backward passes.
MOST_SAVED = 5.0
# The share of the overhead for applying exact inverses of wide factors.
EXACT_SHARE = 0.1


class Costs(NamedTuple):
    """Multiply-adds of all ranks together, as those of large matrix products.

    Ranks that share the work of inverses have equal parts of each number.

    Attributes:
        plain: a forward and a backward pass through the linear and convolutional layers.
        statistics: gathering statistics once.
        inverses: computing all inverses once.
        natural_gradient: applying them.
    """

    plain: float = 0.0
    statistics: float = 0.0
    inverses: float = 0.0
    natural_gradient: float = 0.0

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
    """

    rows: float
    share: float


def work_of(batch: BatchStatistics) -> dict[str, Work]:
    """Return the work of every layer in the step whose statistics these are."""
    found = {}
    for name, moments in batch.moments.items():
        derivatives = [moment for moment in moments if moment.of_derivatives]
        share = moments[0].weight / max(1, batch.examples)
        if derivatives and share:
            found[name] = Work(derivatives[0].weight / share, share)
    return found


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
    for name, layer in engine.plan.layers.items():
        if isinstance(layer, MatrixLayer) and elements[name]:
            rows = elements[name] / (layer.factor_sizes()[1] * layer.groups)
            work[name] = Work(rows, used / examples)
    return work


class WideFactor(NamedTuple):
    """A factor with an inverse that may have a low rank.

    Attributes:
        layer: the name of its layer.
        side: 0 for Ω, 1 for Γ.
        size: n, its width.
        vectors: the vectors that its inverse is applied to in a step, over all groups.
    """

    layer: str
    side: int
    size: int
    vectors: int

    @property
    def exact(self) -> float:
        """The multiply-adds per step of applying an exact inverse."""
        return self.size**2 * self.vectors

    def low_rank(self, columns: float) -> float:
        """Return the multiply-adds per step of applying an inverse of low rank."""
        return 2 * self.size * self.vectors * columns


def columns_within(
    curvature: ModelCurvature, work: Mapping[str, Work], overhead: float
) -> dict[str, Columns]:
    """Return the largest ranks of the inverses of wide factors; 0 for exact inverses.

    Inverses are exact in the order of their costs, up to a tenth of the overhead. The others may
    have ranks in proportion to √n, so that refreshes, moving gradients and applying these inverses
    fit into the overhead.
    """
    plain = counted_costs(curvature, work).plain
    wide = sorted(_wide_factors(curvature, work), key=lambda each: each.exact)
    found = {each.layer: [0, 0] for each in wide}
    left = EXACT_SHARE * overhead * plain
    while wide and wide[0].exact <= left:
        left -= wide.pop(0).exact
    left = (1 - LEAST_SHARE - EXACT_SHARE) * overhead * plain - _moving(curvature, work)
    left = max(left, LEAST_RANK_SHARE * overhead * plain)
    unit = sum(each.low_rank(math.sqrt(each.size)) for each in wide)
    for layer, side, size, _ in wide:
        most = min(most_columns(size), round(left / unit * math.sqrt(size)))
        found[layer][side] = max(1, round(most / MULTIPLE)) * MULTIPLE
    return {name: (first, second) for name, (first, second) in found.items()}


def _moving(curvature: ModelCurvature, work: Mapping[str, Work]) -> float:
    """Return the multiply-adds in the time that it takes to move all gradients."""
    sizes = (curvature.layers[name].layer.weight.numel() for name in work)
    return MOVING * sum(sizes)


def _wide_factors(curvature: ModelCurvature, work: Mapping[str, Work]) -> Iterator[WideFactor]:
    for name in work:
        layer = curvature.layers[name]
        if isinstance(layer, KroneckerCurvature) and layer.has_variable_inverse():
            sizes, groups = layer.layer.factor_sizes(), layer.layer.groups
            for side, size in enumerate(layer.factor_widths()):
                if size >= NARROWEST:
                    yield WideFactor(name, side, size, groups * sizes[1 - side])


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
    return Costs(
        plain=3 * work.rows * multiplied,
        statistics=rows * (passes * multiplied + moment + groups * outputs**2 / 2) + averaging,
        inverses=HANDICAP * layer_size(curvature, columns).operations,
        natural_gradient=solves + MOVING * product,
    )


class Allowance:
    """Postpones refreshes, so that curvature costs a share of the user's own passes.

    Let S, I and N be the costs of refreshing statistics and inverses once and of a natural
    gradient, in forward and backward passes. Step t earns (overhead - N) (1 + 10 / t) / (S + I)
    refreshes of each kind: more at the start, because curvature changes fastest then. At least 0.3
    of the overhead is left for refreshes. A refresh is on credit: the next one has to wait until it
    is paid. What is not used is saved, up to five passes.

    Args:
        overhead: the allowed share; ``None``: nothing is postponed.
        quiet: do not report natural gradients that exceed it, because another rank does.
    """

    def __init__(self, overhead: float | None, *, quiet: bool = False) -> None:
        self.costs: Costs | None = None
        self.overhead = overhead
        # What the costs were counted for.
        self._counted_for: object = None
        # The largest ranks of inverses; unknown before the first step.
        self.columns: dict[str, Columns] | None = None
        self._quiet = quiet
        # The refreshes of statistics and of inverses that are allowed now.
        self._balances = [0.0, 0.0]

    def allows(self, kind: int) -> bool:
        """Return whether statistics (0) or inverses (1) may be refreshed now."""
        return self.overhead is None or self.costs is None or self._balances[kind] >= 0

    def columns_for(
        self, curvature: ModelCurvature, work: Mapping[str, Work]
    ) -> dict[str, Columns]:
        """Return the largest ranks of inverses: those of the first step, or of one like this."""
        if self.overhead is None:
            return {}
        if self.columns is None:
            return columns_within(curvature, work, self.overhead)
        return self.columns

    def limit_columns(self, curvature: ModelCurvature, work: Mapping[str, Work]) -> None:
        """Limit the ranks of inverses by the work of the first step."""
        if self.columns is None:
            self.columns = self.columns_for(curvature, work)
            curvature.limit_columns(self.columns)

    def count(self, curvature: ModelCurvature, work: Mapping[str, Work]) -> None:
        """Count the costs of a step with statistics, if they can differ from those of the last."""
        self.limit_columns(curvature, work)
        layers = [curvature.layers[name] for name in work]
        shapes = [(layer.trained_roles(), layer.inverse_widths()) for layer in layers]
        if self._counted_for != (work, shapes):  # costs depend on nothing else
            self._counted_for = work, shapes
            self.set_costs(counted_costs(curvature, work))

    def set_costs(self, costs: Costs) -> None:
        """Record the costs of a step; the first time, report if they exceed the overhead."""
        is_first, self.costs = self.costs is None, costs.relative()
        own = self.costs.natural_gradient
        if is_first and not self._quiet and self.overhead is not None and own > self.overhead:
            logger.warning(
                "natural gradients alone cost %.3g of a forward and backward pass, which exceeds "
                "the overhead of %g; larger batches make them cheaper in comparison",
                *(own, self.overhead),
            )

    def end_step(self, step: int, *refreshed: bool) -> None:
        """Count a step, the first of which is 1.

        Args:
            refreshed: whether it has refreshed statistics, and inverses.
        """
        rate = self.rate()
        if rate is None or self.costs is None:
            return
        earned = rate * (1 + EARLY / step)
        most = MOST_SAVED / self._refresh_cost(self.costs)
        self._balances = [
            min(most, balance - done + earned)
            for balance, done in zip(self._balances, refreshed, strict=True)
        ]

    def rate(self) -> float | None:
        """Return the refreshes of each kind that a step earns in the long run, if limited."""
        if self.overhead is None or self.costs is None:
            return None
        left = max(self.overhead - self.costs.natural_gradient, LEAST_SHARE * self.overhead)
        return left / self._refresh_cost(self.costs)

    @staticmethod
    def _refresh_cost(costs: Costs) -> float:
        return max(1e-12, costs.statistics + costs.inverses)

    def describe(self, expected: Costs | None = None) -> str:
        """Return one line with the costs, if they are known.

        Args:
            expected: the costs of steps that are to be described; by default those of the last
                step that was counted.
        """
        costs = self.costs if expected is None else expected.relative()
        if costs is None:
            return "cost: unknown before the first step; describe(inputs) counts it for a batch"
        parts = ", ".join(
            f"{name.replace('_', ' ')} {value:.2g}"
            for name, value in costs._asdict().items()
            if name != "plain"
        )
        limit = "" if self.overhead is None else f"; at most {self.overhead:g} per step in all"
        return f"cost, in forward and backward passes (multiply-adds): {parts}{limit}"

    def snapshot(self) -> tuple[Any, ...]:
        """Return what ``count()`` changes, to be passed to ``restore()``."""
        return self.costs, self.columns, self._counted_for

    def restore(self, snapshot: tuple[Any, ...], curvature: ModelCurvature) -> None:
        """Return to an earlier state."""
        if self.columns is not snapshot[1]:
            curvature.limit_columns(dict.fromkeys(curvature.layers) | (snapshot[1] or {}))
        self.costs, self.columns, self._counted_for = snapshot

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        costs = None if self.costs is None else list(self.costs)
        columns = None if self.columns is None else {n: list(c) for n, c in self.columns.items()}
        return {"costs": costs, "balances": list(self._balances), "columns": columns}

    @staticmethod
    def check_state(state: Mapping[str, Any], curvature: ModelCurvature) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        check_allowance(state, curvature, {"costs": len(Costs._fields), "balances": 2})

    def load_state_dict(self, state: Mapping[str, Any], curvature: ModelCurvature) -> None:
        self.costs = None if state["costs"] is None else Costs(*state["costs"])
        self._balances = list(state["balances"])
        saved = state["columns"]
        self.columns = None if saved is None else {n: (a, b) for n, (a, b) in saved.items()}
        curvature.limit_columns(dict.fromkeys(curvature.layers) | (self.columns or {}))
