"""Clipping by the exact Fisher norm, computed no more often than necessary.

ν = vᵀFv + λvᵀv costs a forward-mode pass over a part of the batch, which the host waits for. The
same number under the approximate Fisher matrix, vᵀF̂v = α² ∇hᵀF̂⁻¹∇h, costs one inner product. Their
ratio changes slowly, so that a few exact values tell when ν is far below the limit. In between, an
update that may exceed the limit is shortened by the estimate, and so is every update if the model
has an operation with which ν cannot be computed.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from kfc._helpers import moved, require_keys, require_number, require_whole, shown
from kfc.optimizers.options import LONGEST_GAP, FisherClip

# ν is assumed to be below MARGIN times what the largest recent ratio predicts.
MARGIN = 2.0
# The number of recent exact values that predictions use.
MEMORY = 5
# Updates with a factor below FROZEN hardly move the parameters; so many in a row are reported.
FROZEN, PATIENCE = 1e-2, 10


class ClipState(NamedTuple):
    """What the clip remembers between steps.

    Attributes:
        norm: ν when it was last computed.
        factor: the factor of the last update.
        evaluations: how often ν was computed.
        guards: how many updates the estimate shortened.
        guards_seen: their number when ν was last computed.
        age: the number of steps since ν was last computed.
        gap: the number of steps between computations of ν.
        ratios: recent ratios of ν to its estimate.
        low: the number of consecutive updates, up to the last one, with a factor below 0.01.
        is_exact: whether ν can be computed; otherwise only the estimate limits updates.
    """

    norm: float = math.nan
    factor: float | Tensor = 1.0
    evaluations: int = 0
    guards: int | Tensor = 0
    guards_seen: int = 0
    age: int = 0
    gap: int = 1
    ratios: tuple[float, ...] = ()
    low: int = 0
    is_exact: bool = True


class NormClip:
    """Decides by how much an update is shortened."""

    def __init__(self, options: FisherClip) -> None:
        assert options.limit is not None
        self.limit = options.limit
        self.examples_used = options.examples_used
        self.period = options.period
        self._warned = False
        self._state = ClipState()

    def is_due(self, *, is_affordable: bool = True) -> bool:
        """Return whether ν must be computed for the coming update.

        Args:
            is_affordable: whether its cost is allowed now, unless nothing is known of ν yet or the
                period is fixed.
        """
        state = self._state
        if not state.is_exact:
            return False
        if self.period is not None:
            return state.age + 1 >= self.period or not state.evaluations
        return not state.ratios or (is_affordable and state.age + 1 >= state.gap)

    def estimate_only(self) -> None:
        """Limit updates by the estimate from now on, because ν cannot be computed."""
        self._state = self._state._replace(is_exact=False)

    def shorten(self, estimate: float | Tensor, norm: Tensor) -> float | None:
        """Return the factor of an update whose ν was computed; ``None`` if ν is not finite.

        Args:
            estimate: vᵀF̂v of the update.
            norm: ν.
        """
        exact = norm.item()
        if not math.isfinite(exact):
            return None
        factor = (self.limit / exact) ** 0.5 if exact > self.limit else 1.0
        self._state = self._learned(float(estimate), exact)._replace(factor=factor)
        self._count_low(factor)
        return factor

    @property
    def is_frozen(self) -> bool:
        """Whether the last updates were all shortened so much that training stands still."""
        return self._state.low >= PATIENCE

    def _count_low(self, factor: float) -> None:
        low = self._state.low + 1 if factor < FROZEN else 0
        self._state = self._state._replace(low=low)
        if low == PATIENCE and not self._warned:
            self._warned = True
            warnings.warn(
                f"the clip has shortened the last {PATIENCE} updates to less than {FROZEN:.0%}: "
                f"the Fisher norm of updates is {self.limit / factor**2:.2g}, and its limit is "
                f"{self.limit:g}. Batch normalisation over few examples is a frequent cause. Use "
                "larger batches, a smaller lr or a larger damping; or limit updates by the loss "
                "bound alone, clip=kfc.FisherClip(None)",
                stacklevel=2,
            )

    def lengthen(self, factor: float) -> None:
        """Record the factor of an update that was not shortened as much as ν asks for."""
        self._state = self._state._replace(factor=factor)

    def guard(self, estimate: float | Tensor) -> float | Tensor:
        """Return the factor of an update whose ν was not computed.

        Args:
            estimate: vᵀF̂v, a number or a scalar on the device; the factor is the same.
        """
        state, age = self._state, self._state.age + 1
        if self.period is not None and state.is_exact:
            self._state = state._replace(age=age, factor=1.0)
            return 1.0
        # An update whose ν was not affordable is shortened as the largest recent ratio asks for.
        margin = MARGIN if age < state.gap or not state.is_exact else 1.0
        ratio = margin * max(state.ratios, default=1.0)
        # Rounding can make the estimate of a gradient without curvature negative.
        if not isinstance(estimate, Tensor):
            expected = ratio * max(estimate, 0.0)
            known = math.sqrt(self.limit / expected) if expected > self.limit else 1.0
            guards = state.guards + (known < 1)
            self._state = state._replace(age=age, guards=guards, factor=known)
            self._count_low(known)
            return known
        factor = (self.limit / (ratio * estimate.clamp_min(0))).clamp(max=1).sqrt()
        factor = factor.nan_to_num(1.0)  # of a step that will be skipped
        guarded, before = (factor < 1).long(), state.guards
        before = moved(before, guarded.device) if isinstance(before, Tensor) else before
        self._state = state._replace(age=age, guards=guarded + before, factor=factor)
        return factor

    def _learned(self, estimate: float, norm: float) -> ClipState:
        """Return the state after ν was computed.

        The gap doubles if ν was as predicted and well below the limit, and is reset otherwise.
        """
        state, guards = self._state, int(self._state.guards)
        expected = max(state.ratios, default=math.inf) * estimate
        as_predicted = norm < MARGIN * expected and guards == state.guards_seen
        calm = MARGIN * norm < self.limit and as_predicted
        ratio = (norm / estimate,) if 0 < estimate < math.inf else ()
        return state._replace(
            norm=norm,
            evaluations=state.evaluations + 1,
            guards=guards,
            guards_seen=guards,
            age=0,
            gap=min(2 * state.gap, LONGEST_GAP) if calm else 1,
            ratios=(*state.ratios, *ratio)[-MEMORY:],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers; waits for the device."""
        state = self._state
        state = state._replace(factor=float(state.factor), guards=int(state.guards))
        return {**state._asdict(), "ratios": list(state.ratios)}

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        require_keys("clip state", state, ClipState._fields)
        what = "the clip state's"
        for name in ("evaluations", "guards", "guards_seen", "age", "low"):
            require_whole(f"{what} {name}", state[name], low=0)
        require_whole(f"{what} gap", state["gap"])
        require_number(f"{what} factor", state["factor"])
        if not isinstance(state["ratios"], list) or len(state["ratios"]) > MEMORY:
            raise ValueError(
                f"{what} ratios must be at most {MEMORY} numbers, got {shown(state['ratios'])}"
            )
        for ratio in state["ratios"]:
            require_number(f"{what} ratios", ratio, low=-math.inf)
        if not isinstance(state["is_exact"], bool):
            raise ValueError(
                f"{what} is_exact must be true or false, got {shown(state['is_exact'])}"
            )
        unknown = isinstance(state["norm"], float) and math.isnan(state["norm"])
        if not unknown or state["evaluations"]:
            require_number(f"{what} norm", state["norm"], low=-math.inf)
        if state["gap"] > LONGEST_GAP or state["guards_seen"] > state["guards"]:
            raise ValueError(
                f"{what} counters contradict each other: gap {state['gap']}, guards "
                f"{state['guards']}, guards_seen {state['guards_seen']}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = {name: state[name] for name in ClipState._fields}
        self._state = ClipState(**{**values, "ratios": tuple(state["ratios"])})
