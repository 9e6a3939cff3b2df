"""Appendix A.2: K-FAC, with step size, momentum and damping chosen by the method itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfc.checks import require_keys, require_number, require_whole
from kfc.distributed.placement import PlacementKind
from kfc.distributed.workers import GroupChoice
from kfc.fisher import Output
from kfc.gathering import FisherKind
from kfc.layers.base import DEFAULT_MAX_FACTOR_SIZE
from kfc.likelihoods import Likelihood
from kfc.optimizers.averaging import start_averages, update_averages
from kfc.optimizers.base import CurvatureOptimizer, wide
from kfc.optimizers.damping import FactorDamping, ModelDamping
from kfc.optimizers.groups import require_hyper_parameters
from kfc.optimizers.objective import Objective
from kfc.optimizers.quadratic import QuadraticModel, fisher_products, inner_products
from kfc.periods import Period, is_due
from kfc.preconditioner import CurvatureKind, InverseKind, Preconditioner
from kfc.renewal import InverseWorkerKind
from kfc.session import without_autocast
from kfc.skipping import named_ranks

# Where λ begins. (The 150 of the K-FAC paper is for a loss summed over 784 pixels.)
DEFAULT_MODEL_DAMPING = 0.01
# How often a step that led to a loss that is not finite is tried again with more damping.
MAX_RETRIES = 10

# Under which names a parameter's last update, and its value before that, are kept.
PREVIOUS, BEFORE = "previous_update", "before_update"

DAMPINGS = ("model_damping", "factor_damping")

Vector = Mapping[str, Tensor]


class Proposal(NamedTuple):
    """An update of the form coefficients[0] · direction + coefficients[1] · previous update."""

    direction: Vector
    previous: Vector
    model: QuadraticModel | None
    coefficients: list[float]

    def rounding(self, value: float) -> float:
        """What differences between values of that size may be off by."""
        assert self.model is not None
        return 10 * self.model.precision * abs(value)


class KFAC(CurvatureOptimizer):
    """Natural gradient descent without a learning rate to set.

    >>> optimizer = kfc.KFAC(model)
    >>> for images, labels in loader:
    ...     optimizer.step(lambda: F.cross_entropy(model(images), labels))

    An update is α times the natural gradient plus μ times the update before it, with the α and μ
    that minimise a quadratic model of the objective on the batch; its curvature is the exact
    Fisher matrix plus (weight decay + λ) I. λ adapts to how well the model predicts, γ, the damping
    of the Kronecker factors, to what makes the model's minimum lowest.

    Args:
        model: the network; its layers are found by type (see :meth:`describe`).
        weight_decay: the coefficient of ½‖θ‖² in the objective.
        model_damping: λ; by default it adapts.
        factor_damping: γ, which goes into the factors as (Ω + π γ I) ⊗ (Γ + γ/π I), so γ² in all;
            by default it adapts.
        lr: α; by default chosen at every step.
        momentum: μ; by default chosen at every step.
        initial_model_damping: where λ begins if it adapts; γ begins at √(λ + weight decay), the
            largest of all groups.
        damping_period: λ adapts every so many steps, which then evaluate the loss once more. (The
            first step does too, and raises λ tenfold as long as the update raises the loss.)
        damping_decrease: what λ is multiplied by if the model predicts well, and divided by if it
            predicts badly.
        gamma_period: γ is chosen anew every so many steps, among its value and that times and
            divided by ``gamma_factor``.
        statistics_period: T_s; here by default every step, which costs little beside the model.
        fisher_clip: C; if ν = α² times the natural gradient's Fisher norm is above it, α is divided
            by √(ν/C). ``None``: no clipping.
        groups: ``weight_decay``, and ``lr`` if that is given, by name, as in :class:`kfc.KFC`.

    The rest as in :class:`kfc.KFC`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.0,
        model_damping: float | None = None,
        factor_damping: float | None = None,
        lr: float | None = None,
        momentum: float | None = None,
        initial_model_damping: float = DEFAULT_MODEL_DAMPING,
        damping_period: int = 5,
        damping_decrease: float = (19 / 20) ** 5,
        gamma_period: int = 20,
        gamma_factor: float = (19 / 20) ** 10,
        statistics_period: Period = 1,
        inverse_period: Period | None = None,
        factor_decay: float = 0.95,
        fisher_clip: float | None = None,
        averaging_timescale: float | None = None,
        max_factor_size: int = DEFAULT_MAX_FACTOR_SIZE,
        groups: Sequence[Mapping[str, Any]] | None = None,
        likelihood: str | Likelihood = "categorical",
        fisher: FisherKind = "sampled",
        inverse: InverseKind = "factored",
        curvature: CurvatureKind = "kfc",
        output: Output | None = None,
        seed: int | None = None,
        process_group: GroupChoice = "auto",
        inverse_placement: PlacementKind = "auto",
        inverse_worker: InverseWorkerKind | None = None,
        max_staleness: int | None = None,
        deterministic: bool = False,
        consistency_period: int | None = None,
    ) -> None:
        defaults = {"weight_decay": weight_decay} | ({} if lr is None else {"lr": lr})
        require_hyper_parameters(defaults)
        if momentum is not None:
            require_hyper_parameters({"momentum": momentum})
        for name, fixed in (("model_damping", model_damping), ("factor_damping", factor_damping)):
            if fixed is not None:
                require_number(name, fixed)
        require_number("initial_model_damping", initial_model_damping, positive=True)
        for name, factor in (
            ("damping_decrease", damping_decrease),
            ("gamma_factor", gamma_factor),
        ):
            require_number(name, factor, below=1, positive=True)
        require_whole("damping_period", damping_period)
        require_whole("gamma_period", gamma_period)
        if fisher_clip is not None:
            require_number("fisher_clip", fisher_clip, positive=True)
        preconditioner = Preconditioner(
            model,
            statistics_period=statistics_period,
            inverse_period=inverse_period,
            factor_decay=factor_decay,
            max_factor_size=max_factor_size,
            likelihood=likelihood,
            fisher=fisher,
            inverse=inverse,
            curvature=curvature,
            output=output,
            seed=seed,
            process_group=process_group,
            inverse_placement=inverse_placement,
            inverse_worker=inverse_worker,
            max_staleness=max_staleness,
            deterministic=deterministic,
            consistency_period=consistency_period,
        )
        super().__init__(preconditioner, defaults, groups, averaging_timescale)
        self.lr = lr
        self.momentum = momentum
        self.fisher_clip = fisher_clip
        self.model_damping = ModelDamping(
            model_damping, initial_model_damping, damping_decrease, damping_period
        )
        largest = max(float(group["weight_decay"]) for group in self.param_groups)
        first = math.sqrt((self.model_damping.value or initial_model_damping) + largest)
        self.factor_damping = FactorDamping(factor_damping, first, gamma_factor, gamma_period)
        self._last: dict[str, float | None] = {}

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """One update.

        Args:
            closure: runs the model on the batch and returns the loss, **without** calling
                backward; gradients that were there before are dropped. It is evaluated again, on
                the same batch, to see what the update did.

        Returns:
            The loss before the update; of several ranks, this one's.

        Raises:
            FloatingPointError: the loss is not finite, and more damping did not help. As after any
                error, parameters, buffers, dampings and random state are as they were.
        """
        if self._averaging:
            raise RuntimeError("step() inside averaged_parameters() would move the averages")
        objective = Objective(self.model, closure, self.preconditioner.workers)
        gathering = self.preconditioner.gathering
        entry = self._snapshot()
        gathering.drop()
        gathering.keeps_calls = True
        try:
            found = objective.differentiate()
            if found is None:
                found = self._differentiate_from_before(objective)
            loss, mean_over_ranks = found
            self._update(objective, mean_over_ranks)
        except BaseException:
            self._restore(entry)
            objective.rewind()
            raise
        finally:
            gathering.keeps_calls = False
            gathering.drop()
        return loss

    def _differentiate_from_before(self, objective: Objective) -> tuple[Tensor, float]:
        """The last update led astray: try the batch where that began, with more damping."""
        moved = [p for p in self._parameters() if PREVIOUS in self.state[p]]
        if not moved or not self._raise_damping():
            raise self._failure(objective, "before the update")
        for parameter in moved:
            parameter.copy_(self.state[parameter][BEFORE])
            del self.state[parameter][PREVIOUS]
        self.preconditioner.gathering.drop()
        objective.rewind()
        found = objective.differentiate()
        if found is None:
            raise self._failure(objective, "before the update")
        return found

    def _raise_damping(self) -> bool:
        """Much more λ, if that is possible and has a say; whether it was."""
        return not self._coefficients_are_given() and self.model_damping.raise_alarm()

    def _coefficients_are_given(self) -> bool:
        return self.lr is not None and self.momentum is not None

    def _failure(self, objective: Objective, when: str) -> FloatingPointError:
        adapts = self.model_damping.adapts and not self._coefficients_are_given()
        hope = (
            "more damping did not help" if adapts else "lr, momentum or model_damping are too bold"
        )
        where = ""
        if self.preconditioner.workers.size > 1:
            found = self.preconditioner.gathering.find_bad_ranks()
            where = f" on {named_ranks(objective.bad_ranks or found)}"
        step = self.preconditioner.steps + 1
        return FloatingPointError(
            f"step {step}: the loss, or its gradient, is not finite{where} "
            f"{when}, and {hope}. The parameters are as they were; look at the batch and the loss"
        )

    def _update(self, objective: Objective, loss: float) -> None:
        curvature = self.preconditioner
        step = curvature.steps + 1
        gradients = curvature.gradients()
        choosing = self.factor_damping.is_due(step)
        damping = self.factor_damping.value**2
        if not curvature.begin_step(gradients, lambda _: damping, wait=True, renew=choosing):
            return
        # Periods count as those of statistics do: the first step is due too.
        measures = is_due(self.model_damping.period, step) and (
            self.model_damping.adapts or not self._coefficients_are_given()
        )
        proposal = self._propose(self._with_weight_decay(gradients), choosing, measures)
        if proposal is None:
            curvature.skip_step()
            return
        value = loss + self._penalty() if measures else loss
        with curvature.schedule.timed("update"):
            self._remember(proposal.direction)
            self._place(proposal)
        if measures:
            with curvature.schedule.timed("reduction ratio"):
                self._measure(objective, value, proposal)
        if self.averaging_timescale is not None:
            update_averages(self._averaged(), self.state, self.averaging_timescale, None)
        curvature.end_step()

    # Directions, and the model on them

    def _propose(self, gradient: Vector, choosing: bool, measures: bool) -> Proposal | None:
        """The natural gradient and the previous update, with the best coefficients.

        Args:
            choosing: whether γ is chosen too, by the model's value (appendix A.2).
            measures: whether the model's prediction is asked for.

        Returns:
            ``None`` if the batch's curvature is beyond what floating point holds.
        """
        curvature = self.preconditioner.curvature
        previous = self._previous(gradient)
        dampings = self.factor_damping.candidates() if choosing else [self.factor_damping.value]
        # The first has the inverses in use, which are new if γ is to be chosen.
        inverses = [{}, *(curvature.redamped_inverses(γ**2) for γ in dampings[1:])]
        directions, plain_scale = [], self._plain_scale(gradient)
        for others in inverses:
            in_use = curvature.use_inverses(others)
            directions.append(self._direction(gradient, plain_scale))
            curvature.use_inverses(in_use)
        clips = self.fisher_clip is not None
        if self._coefficients_are_given() and not (choosing or measures or clips):
            return Proposal(directions[0], previous, None, [1.0, self.momentum or 0.0])
        whole = self._model(gradient, [*directions, *([previous] if previous else [])])
        if not whole.is_finite():
            return None
        proposals = []
        for index, direction in enumerate(directions):
            model = whole.on([index, len(directions)] if previous else [index])
            proposals.append(Proposal(direction, previous, model, self._coefficients(model)))
        best = min(range(len(proposals)), key=lambda index: self._damped_change(proposals[index]))
        curvature.use_inverses(inverses[best])
        self.factor_damping.value = dampings[best]
        return proposals[best]

    def _damped_change(self, proposal: Proposal) -> float:
        assert proposal.model is not None
        return proposal.model.change(proposal.coefficients, self.model_damping.value)

    def _parameters(self) -> list[nn.Parameter]:
        """All of them, also those that are frozen now."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _previous(self, gradient: Vector) -> dict[str, Tensor]:
        """The last update, zero for parameters that were not in it; nothing if there was none."""
        states = {self._names[p]: self.state[p] for p in self._parameters()}
        if not any(PREVIOUS in states[name] for name in gradient):
            return {}
        return {
            name: states[name].get(PREVIOUS, torch.zeros_like(value)).to(value)
            for name, value in gradient.items()
        }

    def _direction(self, gradient: Vector, plain_scale: float) -> dict[str, Tensor]:
        """Minus the natural gradient; times the learning rate, if that is given."""
        direction = {name: value.clone() for name, value in gradient.items()}
        self.preconditioner.precondition(direction)
        for group, _, names in self._by_group(direction):
            own = plain_scale if group["plain_gradient"] else 1.0
            rate = own if self.lr is None else float(group["lr"])
            torch._foreach_mul_([direction[name] for name in names], -rate)
        return direction

    def _plain_scale(self, gradient: Vector) -> float:
        """How far to go along plain gradients, of whose scale natural gradients know nothing.

        To the model's minimum along them alone; any number if there are none.
        """
        plain = {n: v for n, v in gradient.items() if n in self.preconditioner.plan.plain}
        if not plain or self.lr is not None:
            return 1.0
        model = self._model(plain, [plain])
        return -model.minimiser(self.model_damping.value)[0] if model.is_finite() else 0.0

    def _model(self, gradient: Vector, vectors: Sequence[Vector]) -> QuadraticModel:
        """Of the objective on the batch, on these directions."""
        count = len(vectors)
        products, decay = (torch.zeros(count + 1, count + 1).double() for _ in range(2))
        with self.preconditioner.schedule.timed("model"):
            fisher = fisher_products(self.preconditioner.gathering, vectors)
            for group, parameters, names in self._by_group(gradient):
                with without_autocast(parameters[0].device):
                    own = [inner_products([gradient[n], *(v[n] for v in vectors)]) for n in names]
                total = torch.stack(own).sum(0).cpu()
                products += total
                decay += float(group["weight_decay"]) * total
        precision = max(torch.finfo(value.dtype).eps for value in gradient.values())
        return QuadraticModel(products[0, 1:], fisher + decay[1:, 1:], products[1:, 1:], precision)

    def _coefficients(self, model: QuadraticModel) -> list[float]:
        """α and μ: given, or those that minimise the damped model; α no larger than the clip lets.

        If the learning rate is given, the direction contains it.
        """
        fixed = {} if self.lr is None else {0: 1.0}
        if self.momentum is not None and len(model.slopes) > 1:
            fixed[1] = self.momentum
        coefficients = model.minimiser(self.model_damping.value, fixed)
        if self.fisher_clip is not None:
            norm = coefficients[0] ** 2 * model.curvature[0, 0].item()
            if norm > self.fisher_clip:
                fixed[0] = coefficients[0] * math.sqrt(self.fisher_clip / norm)
                coefficients = model.minimiser(self.model_damping.value, fixed)
        return coefficients

    # Moving, and looking back

    def _snapshot(self) -> dict[str, Any]:
        """What an error must leave as it was."""
        return {
            "values": [(p, p.detach().clone(), dict(self.state[p])) for p in self._parameters()],
            "dampings": [(d, d.value) for d in (self.model_damping, self.factor_damping)],
            "inverses": self.preconditioner.curvature.inverses(),
            "renewal": self.preconditioner.renewal.snapshot(),
        }

    def _restore(self, entry: Mapping[str, Any]) -> None:
        for parameter, value, state in entry["values"]:
            parameter.copy_(value)
            self.state[parameter] = state
        for damping, value in entry["dampings"]:
            damping.value = value
        self.preconditioner.curvature.use_inverses(entry["inverses"])
        self.preconditioner.renewal.restore(entry["renewal"])

    def _penalty(self) -> float:
        """½ Σ weight decay · θ²"""
        total = 0.0
        for group in self.param_groups:
            if group["weight_decay"]:
                squares = [wide(p).square().sum() for p in group["params"]]
                sums = torch.stack([square.cpu() for square in squares]).sum().item()
                total += 0.5 * float(group["weight_decay"]) * sums
        return total

    def _remember(self, direction: Vector) -> None:
        """Where the parameters are, to come back to; those that stay have nowhere to go back to."""
        if self.averaging_timescale is not None:
            start_averages(self._averaged(), self.state)
        for parameter in self._parameters():
            self.state[parameter].pop(PREVIOUS, None)
            self.state[parameter].pop(BEFORE, None)
            if self._names[parameter] in direction:
                self.state[parameter][BEFORE] = parameter.detach().clone()

    def _place(self, proposal: Proposal) -> None:
        """The parameters from before, plus the update."""
        self._note(proposal)
        alpha, *mu = proposal.coefficients
        for _, parameters, names in self._by_group(proposal.direction):
            steps = torch._foreach_mul([proposal.direction[name] for name in names], alpha)
            if mu and proposal.previous:
                last = [proposal.previous[name] for name in names]
                torch._foreach_add_(steps, last, alpha=mu[0])
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.copy_(self.state[parameter][BEFORE] + step)
                self.state[parameter][PREVIOUS] = step

    def _measure(self, objective: Objective, value: float, proposal: Proposal) -> None:
        """ρ, and λ by it; if the loss is not finite now, first more cautious updates.

        The very first update must not raise the objective either: where λ began was a guess.

        Args:
            value: of the objective before the update.
        """
        damping, bold = self.model_damping.value, proposal
        first = self.preconditioner.steps == 0
        for attempt in range(MAX_RETRIES + 1):
            change = objective.value() + self._penalty() - value
            worse = first and change > proposal.rounding(value)
            if math.isfinite(change) and not worse:
                break
            cautious = self._more_cautious(proposal) if attempt < MAX_RETRIES else None
            if cautious is None:
                break
            proposal = cautious
            self._place(proposal)
        if not math.isfinite(change):
            raise self._failure(objective, "after the update")
        if worse and proposal is not bold:  # then λ was not the reason
            proposal, self.model_damping.value = bold, damping
            self._place(proposal)
            change = objective.value() + self._penalty() - value
        self._adapt(change, proposal, value)

    def _more_cautious(self, proposal: Proposal) -> Proposal | None:
        """The same directions with more λ; ``None`` if that changes nothing."""
        assert proposal.model is not None
        if not self._raise_damping():
            return None
        coefficients = self._coefficients(proposal.model)
        if coefficients == proposal.coefficients:
            return None
        return proposal._replace(coefficients=coefficients)

    def _adapt(self, change: float, proposal: Proposal, value: float) -> None:
        """Levenberg-Marquardt: λ by ρ, what the objective did over what the model said of it."""
        model = proposal.model
        assert model is not None
        predicted = model.change(proposal.coefficients)
        self._last["objective_change"] = change
        due = self.model_damping.is_due(self.preconditioner.steps + 1)
        if abs(predicted) > proposal.rounding(value):
            self._last["reduction_ratio"] = change / predicted
            if due:
                self.model_damping.adapt(change / predicted)
        elif due and model.is_dominated_by(self.model_damping.value, proposal.coefficients):
            # Both are lost in rounding, since λ leaves next to nothing of the step.
            self.model_damping.adapt(1.0)

    # What the user sees

    def _note(self, proposal: Proposal) -> None:
        alpha, *mu = proposal.coefficients
        model = proposal.model
        self._last = {
            "lr": alpha * (1.0 if self.lr is None else float(self.param_groups[0]["lr"])),
            "momentum": mu[0] if mu else 0.0,
            "model_damping": self.model_damping.value,
            "factor_damping": self.factor_damping.value,
            "fisher_norm": None if model is None else alpha**2 * model.curvature[0, 0].item(),
            "model_change": None if model is None else model.change(proposal.coefficients),
            "objective_change": None,
            "reduction_ratio": None,
        }

    @property
    def step_diagnostics(self) -> dict[str, Any]:
        """``lr`` α, ``momentum`` μ, ``model_damping`` λ and ``factor_damping`` γ of the last step;
        ``fisher_norm``, α² times the natural gradient's; ``model_change``, what the model, without
        λ, said the objective would do; and, where that was measured, ``objective_change``, what it
        did, and ``reduction_ratio`` ρ of the two.
        """
        return dict(self._last)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        dampings = {name: getattr(self, name).value for name in DAMPINGS}
        return {**super().state_dict(), "dampings": dampings}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state dict; what is given here stays, whatever was given there."""
        require_keys("optimizer state", state_dict, ("dampings", "param_groups"))
        saved = state_dict["dampings"]
        require_keys("state of the dampings", saved, DAMPINGS)
        for name in DAMPINGS:
            require_number(f"the state's {name}", saved[name])
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group in groups:
            if self.lr is None:
                group.pop("lr", None)
            else:
                group.setdefault("lr", self.lr)
        super().load_state_dict({**state_dict, "param_groups": groups})
        for name in DAMPINGS:
            getattr(self, name).resume_at(saved[name])
