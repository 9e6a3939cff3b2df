"""The best update on a few directions, by the quadratic model of the objective (appendix A.2)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc.curvature.layer import LayerState
from kfc.fisher.calls import without_autocast
from kfc.optimizers.bound import excess_loss, sum_of_products
from kfc.optimizers.damping import FactorDamping, ModelDamping
from kfc.optimizers.engine import Engine
from kfc.optimizers.groups import CURVATURE, TREATMENT
from kfc.optimizers.norms import fisher_products
from kfc.optimizers.options import Adaptation
from kfc.optimizers.quadratic import QuadraticModel, inner_products

Vector = Mapping[str, Tensor]
# Yields (group, its parameters among the names, their names).
ByGroup = Callable[[Vector], Iterable[tuple[dict[str, Any], list[Tensor], list[str]]]]


class Proposal(NamedTuple):
    """An update coefficients[0] · direction + coefficients[1] · previous update."""

    direction: Vector
    previous: Vector
    model: QuadraticModel | None
    coefficients: list[float]

    def rounding(self, value: float) -> float:
        """Return the rounding error of differences between values of that size."""
        assert self.model is not None
        return 10 * self.model.precision * abs(value)


class Proposals:
    """Chooses α, μ and γ of an update.

    Args:
        engine: the curvature.
        by_group: iterates over the optimizer's param groups.
        options: what is fixed.
        clip: the limit on the Fisher norm of α times the natural gradient.
        model_damping: λ.
        factor_damping: γ.
    """

    def __init__(
        self,
        engine: Engine,
        by_group: ByGroup,
        options: Adaptation,
        clip: float | None,
        model_damping: ModelDamping,
        factor_damping: FactorDamping,
    ) -> None:
        self._engine = engine
        self._by_group = by_group
        self._lr = options.lr
        self._momentum = options.momentum
        self._lr_bounds = _interval(None if self._lr is None else 1.0, options.max_lr, 0)
        self._momentum_bounds = _interval(self._momentum, options.max_momentum, -1)
        self._clip = clip
        self._loss_bound = options.loss_bound
        self._largest_decrease = math.inf
        self._model_damping = model_damping
        self._factor_damping = factor_damping

    @property
    def coefficients_are_fixed(self) -> bool:
        return self._lr is not None and self._momentum is not None

    def bound_loss(self, loss: Tensor, penalty: float) -> None:
        """Limit the predicted decrease of the objective by the coming update.

        Args:
            loss: the loss on the batch.
            penalty: the objective minus the loss.
        """
        if self._loss_bound is not None:
            excess = excess_loss(self._engine, loss).item() + penalty
            self._largest_decrease = self._loss_bound * excess

    def propose(
        self, gradient: Vector, previous: Vector, *, choosing: bool, measures: bool
    ) -> Proposal | None:
        """Return the natural gradient and the previous update with the best coefficients.

        Args:
            gradient: ∇h.
            previous: the last update; empty if there was none.
            choosing: whether γ is chosen too, by the minimum of the quadratic model.
            measures: whether the model's prediction is needed.

        Returns:
            ``None`` if the curvature of the batch exceeds the range of floating point.
        """
        curvature = self._engine.curvature
        values = self._factor_damping.candidates() if choosing else [self._factor_damping.value]
        # The first candidate is the damping of the inverses in use.
        candidates = [{}, *(curvature.redamped(value**2) for value in values[1:])]
        directions = self._directions(gradient, candidates)
        if self.coefficients_are_fixed and not (choosing or measures or self._clip is not None):
            self._factor_damping.choose(values[0])
            coefficients = [1.0, self._momentum or 0.0]
            if self._loss_bound is not None:
                vectors = [directions[0], *([previous] if previous else [])]
                slopes = [_inner_product(gradient, vector) for vector in vectors]
                coefficients = self._bounded(coefficients, slopes)
            return Proposal(directions[0], previous, None, coefficients)
        whole = self._model(gradient, [*directions, *([previous] if previous else [])])
        if not whole.is_finite():
            return None
        proposals = []
        for index, direction in enumerate(directions):
            model = whole.on([index, len(directions)] if previous else [index])
            proposals.append(Proposal(direction, previous, model, self.coefficients(model)))
        best = min(range(len(proposals)), key=lambda index: self._damped_change(proposals[index]))
        curvature.restore(candidates[best])
        self._factor_damping.choose(values[best])
        return proposals[best]

    def _damped_change(self, proposal: Proposal) -> float:
        assert proposal.model is not None
        return proposal.model.change(proposal.coefficients, self._model_damping.value)

    def _directions(
        self, gradient: Vector, candidates: Sequence[Mapping[str, LayerState]]
    ) -> list[Vector]:
        """Return the direction for each candidate's inverses."""
        curvature, plain_scale = self._engine.curvature, self._plain_scale(gradient)
        in_use = curvature.snapshot()
        directions: list[Vector] = []
        for states in candidates:
            curvature.restore(states)
            directions.append(self._direction(gradient, plain_scale))
            curvature.restore(in_use)
        return directions

    def _direction(self, gradient: Vector, plain_scale: float) -> dict[str, Tensor]:
        """Return minus the natural gradient, times the learning rate if that is fixed."""
        direction = dict(gradient)
        self._engine.solve_(direction)
        for group, _, names in self._by_group(direction):
            own = 1.0 if group[TREATMENT] == CURVATURE else plain_scale
            rate = own if self._lr is None else float(group["lr"])
            torch._foreach_mul_([direction[name] for name in names], -rate)
        return direction

    def _plain_scale(self, gradient: Vector) -> float:
        """Return how far to go along plain gradients, whose scale is not a natural gradient's.

        This is the distance to the model's minimum along them alone.
        """
        plain = {n: v for n, v in gradient.items() if n in self._engine.plan.plain}
        if not plain or self._lr is not None:
            return 1.0
        model = self._model(plain, [plain])
        return -model.minimiser(self._model_damping.value)[0] if model.is_finite() else 0.0

    def _model(self, gradient: Vector, vectors: Sequence[Vector]) -> QuadraticModel:
        """Return the quadratic model of the objective on these directions."""
        if not self._engine.collector.observations:
            raise RuntimeError(
                "the closure did not run the model in training mode: call model.train(), and the "
                "model itself rather than its parts. To train in evaluation mode, pass "
                "curvature=kfc.Kronecker(gather_in_eval=True)"
            )
        count = len(vectors)
        products, decay = (torch.zeros(count + 1, count + 1).double() for _ in range(2))
        with self._engine.schedule.timed("model"):
            fisher = fisher_products(self._engine, vectors)
            for group, parameters, names in self._by_group(gradient):
                with without_autocast(parameters[0].device):
                    own = [inner_products([gradient[n], *(v[n] for v in vectors)]) for n in names]
                total = torch.stack(own).sum(0).cpu()
                products += total
                decay += float(group["weight_decay"]) * total
        precision = max(torch.finfo(value.dtype).eps for value in gradient.values())
        return QuadraticModel(products[0, 1:], fisher + decay[1:, 1:], products[1:, 1:], precision)

    def coefficients(self, model: QuadraticModel) -> list[float]:
        """Return α and μ, the minimum of the damped model within their bounds.

        Both are multiplied by a factor if the predicted decrease is too large.
        """
        found = model.minimiser(self._model_damping.value, self._bounds(model))
        return self._bounded(found, model.slopes.tolist())

    def _bounded(self, coefficients: list[float], slopes: Sequence[float]) -> list[float]:
        """Return coefficients whose predicted decrease is within the loss bound.

        Args:
            slopes: ∇hᵀv of the directions v that are used.
        """
        decrease = -sum(c * slope for c, slope in zip(coefficients, slopes, strict=False))
        if not decrease > self._largest_decrease:
            return coefficients
        return [c * self._largest_decrease / decrease for c in coefficients]

    def raise_damping(self) -> bool:
        """Raise λ tenfold if it matters; return whether that was possible."""
        return not self.coefficients_are_fixed and self._model_damping.raise_after_failure()

    def more_cautious(self, proposal: Proposal) -> Proposal | None:
        """Return the same directions with more λ; ``None`` if that changes nothing."""
        assert proposal.model is not None
        before = self._model_damping.value
        while self.raise_damping():  # α and μ may stay at their bounds for a while
            coefficients = self.coefficients(proposal.model)
            if coefficients != proposal.coefficients:
                return proposal._replace(coefficients=coefficients)
        self._model_damping.restore(before)
        return None

    def _bounds(self, model: QuadraticModel) -> list[tuple[float, float]]:
        """Return the lowest and the highest α and, if there is a previous update, μ.

        The clip limits α. If the learning rate is fixed, the direction contains it, and α is 1 or
        what the clip leaves of it.
        """
        low, high = self._lr_bounds
        norm = model.curvature[0, 0].item()
        if self._clip is not None and norm > 0:
            limit = math.sqrt(self._clip / norm)
            low, high = max(low, -limit), min(high, limit)
        bounds = [(min(low, high), high), self._momentum_bounds]
        return bounds[: len(model.slopes)]


def _inner_product(vectors: Vector, others: Vector) -> float:
    names = list(vectors)
    with without_autocast(vectors[names[0]].device):
        return sum(sum_of_products([vectors[n]], [others[n]]).item() for n in names)


def _interval(fixed: float | None, limit: float | None, lowest: int) -> tuple[float, float]:
    """Return the bounds of a coefficient; the lower one is ``lowest`` times its limit."""
    if fixed is not None:
        return fixed, fixed
    return (-math.inf, math.inf) if limit is None else (lowest * limit, limit)
