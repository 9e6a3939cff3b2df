"""What curvature may cost: the largest ranks of inverses, and refreshes that are postponed."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kfc.curvature.kfc import KroneckerCurvature
from kfc.curvature.layer import Columns
from kfc.curvature.low_rank import MULTIPLE, NARROWEST, most_columns
from kfc.curvature.model import ModelCurvature
from kfc.optimizers.costs import MOVING, Costs, counted_costs
from kfc.optimizers.saved import check_allowance
from kfc.optimizers.work import ModelWork

logger = logging.getLogger("kfc")

# Step t may spend 1 + EARLY / t times the overhead.
EARLY = 10.0
# The share of the overhead for exact Fisher norms.
NORM_SHARE = 0.25
# What may be postponed.
STATISTICS, INVERSES, NORMS = range(3)
# The least share of the overhead that is left for refreshes, whatever natural gradients cost, and
# the least for the ranks of inverses.
LEAST_SHARE, LEAST_RANK_SHARE = 0.3, 0.2
# The largest amount that is saved for later steps, in forward and backward passes.
MOST_SAVED = 5.0
# The share of the overhead for applying exact inverses of wide factors.
EXACT_SHARE = 0.1


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
    curvature: ModelCurvature, work: ModelWork, overhead: float
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


def _moving(curvature: ModelCurvature, work: ModelWork) -> float:
    """Return the multiply-adds in the time that it takes to move all gradients."""
    sizes = (curvature.layers[name].layer.weight.numel() for name in work.layers)
    return MOVING * sum(sizes)


def _wide_factors(curvature: ModelCurvature, work: ModelWork) -> Iterator[WideFactor]:
    for name in work.layers:
        layer = curvature.layers[name]
        if isinstance(layer, KroneckerCurvature) and layer.has_variable_inverse():
            sizes, groups = layer.layer.factor_sizes(), layer.layer.groups
            for side, size in enumerate(layer.factor_widths()):
                if size >= NARROWEST:
                    yield WideFactor(name, side, size, groups * sizes[1 - side])


class Allowance:
    """Postpones refreshes, so that curvature costs a share of the user's own passes.

    Let S, I, N and E be the costs of refreshing statistics and inverses once, of a natural gradient
    and of exact Fisher norms, in forward and backward passes. Step t earns
    (overhead - N - E/32) (1 + 10/t) / (S + I) refreshes of each kind: more at the start, because
    curvature changes fastest then. (E/32 is for norms that are far below their limit.) At least 0.3
    of the overhead is left for refreshes. Norms that are needed more often earn a quarter of the
    overhead, overhead (1 + 10/t) / (4 E) per step. What is done is on credit: the next refresh has
    to wait until it is paid. What is not used is saved, up to five passes.

    Args:
        overhead: the allowed share; ``None``: nothing is postponed.
        norm_rate: the exact Fisher norms per step if they are far below their limit.
        quiet: do not report natural gradients that exceed it, because another rank does.
    """

    def __init__(
        self, overhead: float | None, norm_rate: float = 0.0, *, quiet: bool = False
    ) -> None:
        self.costs: Costs | None = None
        self.overhead = overhead
        self._norm_rate = norm_rate
        # What the costs were counted for.
        self._counted_for: object = None
        # What passes do besides layers, see ``ModelWork``; unknown before the first step.
        self.others: float | None = None
        # The largest ranks of inverses; unknown before the first step.
        self.columns: dict[str, Columns] | None = None
        self._quiet = quiet
        # The refreshes of statistics and of inverses, and the norms, that are allowed now.
        self._balances = [0.0, 0.0, 0.0]

    def allows(self, kind: int) -> bool:
        """Return whether STATISTICS or INVERSES may be refreshed, or NORMS computed, now."""
        return self.overhead is None or self.costs is None or self._balances[kind] >= 0

    def columns_for(self, curvature: ModelCurvature, work: ModelWork) -> dict[str, Columns]:
        """Return the largest ranks of inverses: those of the first step, or of one like this."""
        if self.overhead is None:
            return {}
        if self.columns is None:
            return columns_within(curvature, work, self.overhead)
        return self.columns

    def limit_columns(self, curvature: ModelCurvature, work: ModelWork) -> None:
        """Limit the ranks of inverses by the work of the first step."""
        if self.columns is None:
            self.columns = self.columns_for(curvature, work)
            curvature.limit_columns(self.columns)

    def count(self, curvature: ModelCurvature, work: ModelWork) -> None:
        """Count the costs of a step with statistics, if they can differ from those of the last."""
        self.others = work.others
        self.limit_columns(curvature, work)
        layers = [curvature.layers[name] for name in work.layers]
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

    def end_step(self, step: int, *done: bool) -> None:
        """Count a step, the first of which is 1.

        Args:
            done: whether it has refreshed statistics and inverses, and computed norms.
        """
        rate = self.rate()
        if rate is None or self.costs is None or self.overhead is None:
            return
        refresh, norms = self._refresh_cost(self.costs), max(1e-12, self.costs.norms)
        rates = rate, rate, NORM_SHARE * self.overhead / norms
        costs = refresh, refresh, norms
        self._balances = [
            min(MOST_SAVED / cost, balance - was_done + rate * (1 + EARLY / step))
            for balance, was_done, rate, cost in zip(
                self._balances, done, rates, costs, strict=True
            )
        ]

    def rate(self) -> float | None:
        """Return the refreshes of each kind that a step earns in the long run, if limited."""
        if self.overhead is None or self.costs is None:
            return None
        every_step = self.costs.natural_gradient + self._norm_rate * self.costs.norms
        left = max(self.overhead - every_step, LEAST_SHARE * self.overhead)
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
        return self.costs, self.columns, self.others, self._counted_for

    def restore(self, snapshot: tuple[Any, ...], curvature: ModelCurvature) -> None:
        """Return to an earlier state."""
        if self.columns is not snapshot[1]:
            curvature.limit_columns(dict.fromkeys(curvature.layers) | (snapshot[1] or {}))
        self.costs, self.columns, self.others, self._counted_for = snapshot

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        costs = None if self.costs is None else list(self.costs)
        columns = None if self.columns is None else {n: list(c) for n, c in self.columns.items()}
        balances, others = list(self._balances), self.others
        return {"costs": costs, "balances": balances, "columns": columns, "others": others}

    @staticmethod
    def check_state(state: Mapping[str, Any], curvature: ModelCurvature) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        check_allowance(state, curvature, {"costs": len(Costs._fields), "balances": 3})

    def load_state_dict(self, state: Mapping[str, Any], curvature: ModelCurvature) -> None:
        self.costs = None if state["costs"] is None else Costs(*state["costs"])
        self._balances = list(state["balances"])
        self.others = state["others"]
        saved = state["columns"]
        self.columns = None if saved is None else {n: (a, b) for n, (a, b) in saved.items()}
        curvature.limit_columns(dict.fromkeys(curvature.layers) | (self.columns or {}))
