"""The loss bound, which sets the length of a step by what is left of the loss.

A step must point downhill, and its predicted decrease must not exceed what the loss can fall by.

A confidently wrong example has a large gradient and almost no Fisher matrix, so that neither the
factors nor the Fisher norm limit the update that it causes. But a loss that is bounded below cannot
fall by more than its excess E, the loss minus the least it could be for the targets of the batch.
To first order, a step m lowers the objective by -∇hᵀm. If this is more than κE, the step is
multiplied by κE / (-∇hᵀm). If it is negative, momentum leads uphill and is dropped.

The excess also tells when a step is needlessly short. ``WhitenedAdam`` lengthens steps whose
predicted change is less than κE/2, and increases κ, at most twofold, where the excess falls fast.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc._helpers import (
    inner_product,
    moved,
    require_keys,
    require_number,
    require_whole,
    widest,
)
from kfc.optimizers.engine import Engine
from kfc.optimizers.steps import Scalar, where
from kfc.statistics.observation import Observation, count_examples

# The weight of the old value in the running mean of the excess.
MEAN_DECAY = 0.9
# An excess above this many running means is an outlier.
LARGEST_EXCESS = 2.0
# An excess enters the running mean as at most this many running means.
FASTEST_RISE = 10.0
# The share of κE below which the clip of KFC does not shorten steps, if it does so for long.
LEAST = 0.01
# The largest factor of a step that lowers the loss by little.
LONGEST = 3.0
# The weight of the old value in the moving average of the decrease of log Ē in a step.
DECREASE_DECAY = 0.95
# κ grows in proportion to this average where it exceeds 0.04, at most twofold.
FAST_DECREASE, LARGEST_GROWTH = 0.04, 2.0


class StepLimits(NamedTuple):
    """Factors of a step.

    Attributes:
        momentum: 0 if momentum is dropped, else 1.
        step: the factor of the whole step, at most 1.
        decrease: the decrease of the objective that the step predicts to first order, before this
            factor.
        limit: κE.
    """

    momentum: Scalar
    step: Scalar
    decrease: Scalar
    limit: Scalar


class Excess(NamedTuple):
    """The excess of the loss on a batch, scalars on the device.

    Attributes:
        value: E, infinite if unknown.
        usual: E, but at most twice its running mean.
        is_exact: whether E was read from the derivatives of the loss. Otherwise it may be the loss
            itself, an upper bound. ``None``: it was, or is unknown.
    """

    value: Tensor
    usual: Tensor
    is_exact: Tensor | None


class LossBound:
    """Limits the predicted change of the objective in a step.

    It works with numbers, or with scalars on a device, which the host does not wait for.

    Args:
        share: κ.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._mean: Tensor | float = math.nan
        self._decrease: Tensor | float = 0.0
        self._factor: Tensor | float = 1.0
        self._bounds: Tensor | int = 0
        self._restarts: Tensor | int = 0

    def without_outliers(
        self, excess: Tensor, bad: Tensor | None, is_exact: Tensor | None = None
    ) -> Tensor:
        """Return the excess, limited to twice its running mean, and update that mean and its trend.

        An unknown excess, which is infinite, stays as it is and does not enter the mean.

        Args:
            bad: a boolean scalar; if true, nothing is updated. ``None``: the step is known to be
                good.
            is_exact: see ``Excess``; an excess that is not exact does not enter the trend.
        """
        known = _like(self._mean, excess)
        mean = torch.where(torch.isfinite(known) & (known > 0), known, excess)
        new = MEAN_DECAY * mean + (1 - MEAN_DECAY) * torch.minimum(excess, FASTEST_RISE * mean)
        is_unused = torch.isinf(excess)
        if bad is not None:
            is_unused = is_unused | moved(bad, mean.device)
        self._mean = torch.where(is_unused, known, new)
        if is_exact is not None:
            is_unused = is_unused | ~is_exact
        self._update_decrease(torch.where(is_unused, torch.nan, (mean / new).log()))
        usual = torch.minimum(excess, LARGEST_EXCESS * mean)
        return torch.where(torch.isinf(excess), excess, usual)

    def _update_decrease(self, latest: Tensor) -> None:
        """Average in the decrease of log Ē in this step, unless it is not finite."""
        before = _like(self._decrease, latest)
        new = DECREASE_DECAY * before + (1 - DECREASE_DECAY) * latest
        self._decrease = torch.where(torch.isfinite(latest), new, before)

    def limit(self, momentum: Scalar, update: Scalar, excess: Scalar) -> StepLimits:
        """Return the factors of a step m = μ m_old + v.

        Args:
            momentum: ∇hᵀ(μ m_old); zero without momentum.
            update: ∇hᵀv.
            excess: E of the objective.
        """
        is_uphill = (momentum + update > 0) & (momentum > 0)
        decrease = -where(is_uphill, update, momentum + update)
        limit = self._share * excess
        # False if either is NaN; such a step is skipped anyway.
        is_exceeded = decrease > limit
        self._factor = where(is_exceeded, limit / where(is_exceeded, decrease, 1.0), 1.0)
        self._bounds = _counted(is_exceeded, self._bounds)
        self._restarts = _counted(is_uphill, self._restarts)
        return StepLimits(where(is_uphill, 0.0, 1.0), self._factor, decrease, limit)

    def least_factor(self, decrease: Scalar, excess: Scalar) -> float:
        """Return the factor with which an update still predicts a hundredth of the decrease κE.

        It is 0 if the excess is unknown, or if the update predicts no decrease.
        """
        return least_factor(float(decrease), self._share * float(excess))

    def resize(self, predicted: Tensor, excess: Excess) -> Tensor:
        """Return the factor that brings the predicted change of the loss between κE/2 and κE.

        A step is lengthened at most threefold, and only if E is exact. κ is multiplied by up to 2
        where the mean excess has fallen by more than 4% per step: longer steps pay there.

        Args:
            predicted: |∇ᵀv|, the change to first order.
        """
        limit = self._share * self._growth(excess) * excess.usual.clamp(min=0)
        # An unknown excess is infinite; such a step, and one that changes nothing, stays as it is.
        ratio = (limit / predicted).nan_to_num(nan=1.0, posinf=1.0)
        factor = ratio.clamp(max=1) * (ratio / 2).clamp(1, LONGEST)
        if excess.is_exact is not None:
            factor = torch.where(excess.is_exact, factor, factor.clamp(max=1))
        self._factor = factor
        self._bounds = _counted(ratio < 1, self._bounds)
        return factor

    def _growth(self, excess: Excess) -> Tensor:
        """Return the factor of κ, from 1 to 2; it is 1 if E is not exact."""
        decrease = _like(self._decrease, excess.usual)
        growth = (decrease / FAST_DECREASE).clamp(1, LARGEST_GROWTH)
        return growth if excess.is_exact is None else torch.where(excess.is_exact, growth, 1.0)

    def diagnostics(self) -> dict[str, Any]:
        """Return the last factor, and how many steps were shortened and restarted.

        This waits for the device.
        """
        return {
            "loss_bound_factor": float(self._factor),
            "loss_bounds": int(self._bounds),
            "momentum_restarts": int(self._restarts),
        }

    def state_dict(self) -> dict[str, Any]:
        mean = float(self._mean)
        # An unknown excess has no mean; the next one that is known begins it.
        mean_excess = mean if math.isfinite(mean) and mean > 0 else None
        return {**self.diagnostics(), "mean_excess": mean_excess, "decrease": float(self._decrease)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        require_keys("state of the loss bound", state, self.state_dict())
        for name in ("loss_bounds", "momentum_restarts"):
            require_whole(f"the state's {name}", state[name], low=0)
        require_number("the state's loss_bound_factor", state["loss_bound_factor"])
        require_number("the state's decrease", state["decrease"], low=-math.inf)
        if state["mean_excess"] is not None:
            require_number("the state's mean_excess", state["mean_excess"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._factor = float(state["loss_bound_factor"])
        self._bounds = int(state["loss_bounds"])
        self._restarts = int(state["momentum_restarts"])
        mean = state["mean_excess"]
        self._mean = math.nan if mean is None else mean
        self._decrease = float(state["decrease"])


def least_factor(decrease: float, limit: float) -> float:
    """Return the factor of a step with which it predicts LEAST of the limit κE; at most 1.

    Args:
        decrease: the decrease that the whole step predicts.
    """
    usable = decrease > 0 and 0 < limit < math.inf
    return min(1.0, LEAST * limit / decrease) if usable else 0.0


def _like(value: Tensor | float, other: Tensor) -> Tensor:
    """Return a number in the dtype of another, without rounding it to torch's default dtype."""
    return torch.as_tensor(value, dtype=other.dtype, device=other.device)


def _counted(new: Tensor | bool, before: Tensor | int) -> Tensor | int:
    """Return a count, increased by one if a flag is set, where the flag is."""
    if isinstance(before, Tensor) and isinstance(new, Tensor):
        before = moved(before, new.device)
    return before + (new.long() if isinstance(new, Tensor) else new)


def excess_loss(engine: Engine, loss: Tensor | None = None) -> Tensor:
    """Return E of the loss on the batch of a step: the loss minus the least it could be.

    It follows from the derivatives of the loss in the outputs. With several ranks, the mean of
    theirs, as in DistributedDataParallel. If the gradients were clipped, E is multiplied by the
    same factor; see ``kfc.optimizers.rescaling``.

    Args:
        loss: the loss, if the caller knows it. It is used if the derivatives do not tell the
            excess, and if it is positive: its least value is then assumed to be zero.

    Returns:
        A scalar on the device; infinite if the excess is unknown.
    """
    observations, device = engine.collector.observations, engine.device
    examples = count_examples(observations)
    parts = [part for each in observations for part in _parts_of_pass(engine, each, examples)]
    known = [moved(part, device).to(widest(device)) for part in parts if part is not None]
    if parts and len(known) == len(parts):
        total = known[0] if len(known) == 1 else torch.stack(known).sum()
    else:
        total = torch.full((), torch.inf, dtype=widest(device), device=device)
        if loss is not None:
            value = moved(loss.detach(), device).to(total).reshape(())
            total = torch.where(value > 0, value, total)
    factor = engine.members.rescaling.factor(engine.collector.known.loss_scale)
    if isinstance(factor, Tensor):
        total = total * moved(factor, device)
    return engine.reducer.mean_product(total, examples, is_summed=True)


def _parts_of_pass(
    engine: Engine, observation: Observation, examples: int
) -> Iterator[Tensor | None]:
    """Yield the excess for every derivative of a forward pass; ``None`` where it is unknown.

    Args:
        examples: the number of examples in the step.
    """
    collector = engine.collector
    losses, scale = collector.losses, collector.known.loss_scale
    for name, derivatives in observation.derivatives.items():
        loss, outputs = losses.by_name[name], observation.outputs[name]
        found = [each for each in derivatives if each is not None]
        if not loss.tells_excess or len(found) < len(derivatives):
            yield None
            continue
        assert loss.likelihood is not None
        if not loss.is_read:
            found = [torch.stack(found).sum(0)]  # parts of one loss, as far as is known
        for derivative, terms in zip(found, collector.terms.of(observation, name), strict=True):
            weights, excess = terms
            if not losses.is_summed:  # the weights are those of a step with this pass alone
                weights = weights * (observation.examples / examples) * scale
            if excess is None:
                excess = loss.likelihood.excess(outputs, derivative, weights)
            is_scaled = isinstance(scale, Tensor) or scale != 1
            yield excess / scale if is_scaled and excess is not None else excess


def excess_of_step(engine: Engine, loss: Any) -> Scalar:
    """Return E of the loss on the batch of a step, and note it as a possible sign of divergence.

    Args:
        loss: what the closure returned, if there is one.
    """
    with engine.schedule.timed("update"), engine.full_precision():
        excess = engine.known(excess_loss(engine, loss if isinstance(loss, Tensor) else None))
    if not isinstance(excess, Tensor):
        engine.divergence.see(excess)
    return excess


def sum_of_products(vectors: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return Σ vᵀw over pairs of tensors on one device, in its widest dtype."""
    products = [inner_product(v, w) for v, w in zip(vectors, others, strict=True)]
    return torch.stack(products).sum(dtype=widest(vectors[0].device))
