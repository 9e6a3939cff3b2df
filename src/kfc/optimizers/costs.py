"""The multiply-adds of a step, counted from the shapes of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kfc._helpers import require_keys, require_number
from kfc.curvature.layer import LayerCurvature
from kfc.curvature.model import ModelCurvature
from kfc.curvature.statistics import BatchStatistics, Moment
from kfc.distributed.inverses import layer_size
from kfc.layers import MatrixLayer

# Decompositions and Fourier transforms take longer than products with as many multiply-adds.
HANDICAP = 2.0
# Step t may spend 1 + EARLY / t times the overhead.
EARLY = 20.0
# The largest amount that is saved for later steps, in forward and backward passes.
MOST_SAVED = 5.0


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


def counted_costs(curvature: ModelCurvature, batch: BatchStatistics) -> Costs:
    """Return the costs of steps like the one whose statistics these are."""
    total = Costs()
    for name, moments in batch.moments.items():
        layer = curvature.layers[name]
        derivatives = [moment for moment in moments if moment.of_derivatives]
        if isinstance(layer.layer, MatrixLayer) and derivatives:
            share = moments[0].weight / max(1, batch.examples)
            total = total.plus(_costs_of_layer(layer, derivatives[0], share))
    return total


def _costs_of_layer(curvature: LayerCurvature, derivatives: Moment, share: float) -> Costs:
    """Return the costs of one layer.

    Args:
        derivatives: a moment of derivatives, whose weight is the number of their rows.
        share: the part of the examples that the statistics come from.
    """
    layer = curvature.layer
    assert isinstance(layer, MatrixLayer)
    inputs, outputs = layer.factor_sizes()
    rows, groups = derivatives.weight, layer.groups
    product = rows * groups * inputs * outputs
    # A second forward pass is needed for a part of the examples only.
    passes = 2 if share < 1 else 1
    maps = inputs / layer.offsets
    # Pairs of offsets with different distances are a few times as many as offsets.
    moment = groups * maps**2 * min(layer.offsets**2, HANDICAP * 4 * layer.offsets) / 2
    statistics = passes * product + rows * (moment + groups * outputs**2 / 2)
    kept = curvature.inverse_shapes(curvature.inverse_widths())
    solves = 0.0
    for name, vectors in (("activation", outputs), ("derivative", inputs)):
        shape = kept.get(name, kept.get(f"{name}_basis", ()))
        if len(shape) == 3:
            passes_of_matrix = 1 if shape[-1] == shape[-2] else 2
            solves += groups * shape[-1] * shape[-2] * passes_of_matrix * vectors
    return Costs(
        plain=3 * product / share if share else 0.0,
        statistics=statistics,
        inverses=HANDICAP * layer_size(curvature).operations,
        natural_gradient=solves,
    )


class Allowance:
    """Postpones refreshes that cost more than a share of the user's own passes.

    Let S and I be the costs of refreshing statistics and inverses once, in forward and backward
    passes. Step t earns overhead (1 + 20 / t) / (S + I) refreshes of each kind: more at the start,
    because curvature changes fastest then. What is not used is saved, up to five passes or one
    refresh, whichever is more.

    Args:
        overhead: the allowed share; ``None``: nothing is postponed.
    """

    def __init__(self, overhead: float | None) -> None:
        self.costs: Costs | None = None
        self._overhead = overhead
        # The refreshes of statistics and of inverses that are allowed now.
        self._balances = [0.0, 0.0]

    def allows(self, kind: int) -> bool:
        """Return whether statistics (0) or inverses (1) may be refreshed now."""
        return self._overhead is None or self.costs is None or self._balances[kind] >= 1

    def set_costs(self, costs: Costs) -> None:
        """Record the costs of a step."""
        self.costs = costs.relative()

    def end_step(self, step: int, *refreshed: bool) -> None:
        """Count a step, the first of which is 1, and what it has refreshed: statistics, inverses.

        The refreshes of the first step are free, because every run needs them.
        """
        if self._overhead is None or self.costs is None:
            return
        cost = max(1e-12, self.costs.statistics + self.costs.inverses)
        earned = self._overhead * (1 + EARLY / step) / cost
        most = max(1.0, MOST_SAVED / cost)
        self._balances = [
            min(most, balance - (done and step > 1) + earned)
            for balance, done in zip(self._balances, refreshed, strict=True)
        ]

    def describe(self) -> str:
        """Return one line with the costs, once they are known."""
        if self.costs is None:
            return "cost: counted in the first step"
        parts = ", ".join(
            f"{name.replace('_', ' ')} {value:.2g}"
            for name, value in self.costs._asdict().items()
            if name != "plain"
        )
        limit = "" if self._overhead is None else f"; refreshes within {self._overhead:g} per step"
        return f"cost, in forward and backward passes (multiply-adds): {parts}{limit}"

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        costs = None if self.costs is None else list(self.costs)
        return {"costs": costs, "balances": list(self._balances)}

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        require_keys("allowance state", state, ("costs", "balances"))
        costs, balances = state["costs"], state["balances"]
        if costs is not None and len(costs) != len(Costs._fields):
            raise ValueError(f"the allowance state's costs must be {Costs._fields}, got {costs!r}")
        if len(balances) != 2:
            raise ValueError(f"the allowance state's balances must be two, got {balances!r}")
        for name, numbers in (("costs", costs or ()), ("balances", balances)):
            for number in numbers:
                require_number(f"the allowance state's {name}", number, low=-math.inf)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.costs = None if state["costs"] is None else Costs(*state["costs"])
        self._balances = list(state["balances"])
