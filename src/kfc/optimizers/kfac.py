"""Appendix A.2: K-FAC, which chooses step size, momentum and damping itself."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfc.curvature.damping import Damping
from kfc.curvature.options import CurvatureChoice, resolve_curvature
from kfc.distributed.options import Parallel
from kfc.fisher.compiled import outside_of_compiled_graphs
from kfc.fisher.heads import LikelihoodChoice, Output
from kfc.optimizers.base import CurvatureOptimizer
from kfc.optimizers.checkpoints import Component
from kfc.optimizers.damping import Dampings, FactorDamping, ModelDamping
from kfc.optimizers.engine import Engine
from kfc.optimizers.groups import require_hyper_parameters
from kfc.optimizers.objective import Objective, decay_penalty
from kfc.optimizers.options import Adaptation, require_limit
from kfc.optimizers.proposals import Proposal, Proposals, Vector
from kfc.optimizers.versions import check_version
from kfc.schedule import Periods, Stretch, is_due

# How often a step that led to a loss that is not finite is repeated with more damping.
MAX_RETRIES = 10

# The keys of a parameter's last update, and of its value before that, in the state.
PREVIOUS, BEFORE = "previous_update", "before_update"


class KFAC(CurvatureOptimizer):
    """Natural gradient descent that chooses its learning rate, momentum and damping.

    Examples:
        >>> optimizer = kfc.KFAC(model)
        >>> for images, labels in loader:
        ...     optimizer.step(lambda: F.cross_entropy(model(images), labels))

    An update is α times the natural gradient plus μ times the previous update. α and μ minimise a
    quadratic model of the objective on the batch, whose curvature is the exact Fisher matrix plus
    (weight decay + λ) I. λ adapts to how well the model predicts. γ, the damping of the Kronecker
    factors, adapts to make the model's minimum as low as possible.

    Args:
        model: the network; its layers are found by type (see ``describe()``).
        weight_decay: the coefficient of ½‖θ‖² in the objective.
        adaptation: which of α, μ, λ and γ are adapted, and how.
        clip: C, a limit on the Fisher norm of α times the natural gradient; ``None``: no limit.
        averaging_timescale: as in ``kfc.KFC``.
        groups: ``weight_decay``, and ``lr`` if the adaptation fixes it, as in ``kfc.KFC``.
        schedule: the periods of statistics and inverses. By default statistics are gathered in
            every step, which costs little compared with the quadratic model.

    The other arguments are those of ``kfc.Preconditioner``.
    """

    _narrow_parts, _wide_parts = (BEFORE,), (PREVIOUS,)
    _required_components = ("dampings",)

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.0,
        adaptation: Adaptation = Adaptation(),  # noqa: B008 - immutable
        clip: float | None = None,
        averaging_timescale: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
        likelihood: LikelihoodChoice = "auto",
        output: Output | None = None,
        strict: bool = False,
        seed: int | None = None,
        curvature: CurvatureChoice = "kfc",
        schedule: Periods = Periods(1, Stretch(20)),  # noqa: B008 - immutable
        parallel: Parallel | None = None,
    ) -> None:
        if not isinstance(adaptation, Adaptation):
            raise TypeError(f"adaptation must be a kfc.Adaptation, got {adaptation!r}")
        if not isinstance(schedule, Periods):
            raise TypeError(f"schedule must be kfc.Periods for KFAC, got {schedule!r}")
        lr = adaptation.lr
        defaults = {"weight_decay": weight_decay} | ({} if lr is None else {"lr": lr})
        require_hyper_parameters(defaults)
        require_limit(clip)
        engine = Engine(
            model,
            likelihood=likelihood,
            output=output,
            strict=strict,
            seed=seed,
            curvature=resolve_curvature(curvature),
            schedule=schedule,
            parallel=parallel,
            averaging_timescale=averaging_timescale,
            groups=groups,
        )
        super().__init__(engine, defaults, groups, averaging_timescale)
        self.lr = lr
        self.model_damping = ModelDamping(adaptation)
        self.factor_damping = FactorDamping(adaptation, self.model_damping, self._largest_decay)
        self._dampings = Dampings(self.model_damping, self.factor_damping)
        self._proposals = Proposals(
            engine, self._by_group, adaptation, clip, self.model_damping, self.factor_damping
        )
        self._last: dict[str, float | None] = {}
        self._compare_ranks(adaptation=adaptation, clip=clip, likelihood=likelihood)

    @torch.no_grad()
    @outside_of_compiled_graphs(callees=True)
    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor], held_out: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Update the parameters once.

        Args:
            closure: runs the model on the batch and returns the loss, **without** calling
                backward; existing gradients are dropped. It is evaluated again, on the same batch,
                to measure the effect of the update.
            held_out: runs the model on another batch of the training data and returns the loss,
                without calling backward. If given, the change of the objective in ρ is measured on
                that batch, and not on the batch that the update was made for, whose loss falls
                more. In a step that measures ρ, ``held_out`` is evaluated before and after the
                update, without gradients, in place of the second evaluation of ``closure``; in the
                other steps it is not called.

        Returns:
            The loss before the update; with several ranks, this rank's.

        Raises:
            FloatingPointError: the loss is not finite, and more damping did not help. As after any
                error, parameters, buffers, dampings and random state are as they were.
        """
        self._begin_step()
        objective = Objective(self.model, closure, self.engine.reducer)
        other = None if held_out is None else self._held_out(held_out)
        collector = self.engine.collector
        collector.undo()  # passes before the step, whose gradients are dropped
        before = self._snapshot()
        try:
            with collector.recording_random_state():
                found = objective.differentiate() or self._differentiate_from_before(objective)
                loss, mean_over_ranks = found
                self.engine.divergence.see(mean_over_ranks)
                self._update(loss, other or objective, None if other else mean_over_ranks)
        except BaseException:
            self.engine.undo_step()
            self._restore(before)
            objective.rewind()
            raise
        finally:
            collector.drop()
        return loss

    def _held_out(self, closure: Callable[[], Tensor]) -> Objective:
        if not self._adapts():
            raise ValueError(
                "held_out has no effect with fixed lr, momentum and model_damping; remove it"
            )
        return Objective(self.model, closure, self.engine.reducer, "held_out=")

    def _update(self, loss: Tensor, measured: Objective, before: float | None) -> None:
        """Update the parameters after a backward pass.

        Args:
            loss: the loss on the batch.
            measured: the objective that ρ is measured on.
            before: its value, if known.
        """
        engine, step = self.engine, self.engine.steps + 1
        gradients = engine.gradients()
        choosing, measures = self.factor_damping.is_due(step), self._measures(step)
        at_once = choosing or self.factor_damping.is_raised()
        batch = engine.begin_step(gradients, wait=True)
        if batch is None:
            return
        self._start_averages()  # θ̄ begins at θ₀

        # Appendix A.2
        engine.update_(batch, may_skip=True)  # moving averages of Ω and Γ (eqn 33)
        engine.refresh_inverses(self._damping, at_once=at_once)  # (Ω ⊗ Γ)⁻¹, damped by γ²
        gradient = self._add_weight_decay(gradients)  # ∇h: gradient of the loss, plus decay
        previous = self._previous(gradient)  # v_prev, the last update
        self._proposals.bound_loss(loss, self._penalty())  # -∇hᵀ(αΔ + μ v_prev) ≤ κE
        proposal = self._proposals.propose(  # Δ = -F̂⁻¹∇h; α, μ and γ minimise M(αΔ + μ v_prev)
            gradient, previous, choosing=choosing, measures=measures
        )
        if proposal is None:
            engine.skip_step()  # the curvature of the batch is not finite
            return
        value = self._value_before(measured, before) if measures else None  # h(θ)
        self._move(proposal)  # θ ← θ + αΔ + μ v_prev
        self._measure(measured, value, proposal)  # λ by ρ = actual / predicted change of h
        self._update_averages(None)  # θ̄ ← ζθ̄ + (1 - ζ)θ
        engine.end_step()

    def _damping(self, layer: str) -> Damping:
        return Damping.uniform(self.factor_damping.value**2)

    def _largest_decay(self) -> float:
        return max(float(group["weight_decay"]) for group in self.param_groups)

    def _adapts(self) -> bool:
        """Return whether the effect of updates is ever needed."""
        return self.model_damping.adapts or not self._proposals.coefficients_are_fixed

    def _measures(self, step: int) -> bool:
        """Return whether the effect of the update is measured; in the first step it is."""
        return self._adapts() and is_due(self.model_damping.period, step)

    # Errors

    def _differentiate_from_before(self, objective: Objective) -> tuple[Tensor, float]:
        """Return to the parameters before the last update, and raise the damping."""
        moved = [p for p in self._parameters() if PREVIOUS in self.state[p]]
        if not moved or not self._proposals.raise_damping():
            raise self._failure(objective, "before the update")
        for parameter in moved:
            parameter.copy_(self.state[parameter][BEFORE])
            del self.state[parameter][PREVIOUS]
        self.engine.collector.drop()
        objective.rewind()
        found = objective.differentiate()
        if found is None:
            raise self._failure(objective, "before the update")
        return found

    def _failure(self, objective: Objective, when: str) -> FloatingPointError:
        adapts = self.model_damping.adapts and not self._proposals.coefficients_are_fixed
        advice = "more damping did not help" if adapts else "lr, momentum or model_damping is fixed"
        where = self.engine.reducer.where(objective.bad_ranks or None)
        return FloatingPointError(
            f"step {self.engine.steps + 1}: the loss or its gradient is not finite{where} {when}, "
            f"and {advice}. The parameters are as they were; look at the batch and the loss"
        )

    def _snapshot(self) -> dict[str, Any]:
        """Return what an error must leave as it was."""
        return {
            "values": [(p, p.detach().clone(), dict(self.state[p])) for p in self._parameters()],
            "dampings": self._dampings.state_dict(),
            "curvature": self.engine.curvature.snapshot(),
            "refresher": self.engine.refresher.snapshot(),
        }

    def _restore(self, before: Mapping[str, Any]) -> None:
        for parameter, value, state in before["values"]:
            parameter.copy_(value)
            self.state[parameter] = state
        self._dampings.restore(before["dampings"])
        self.engine.curvature.restore(before["curvature"])
        self.engine.refresher.restore(before["refresher"])

    # Moving, and measuring the effect

    def _parameters(self) -> list[nn.Parameter]:
        """Return all parameters, also frozen ones."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _previous(self, gradient: Vector) -> dict[str, Tensor]:
        """Return the last update, zero for parameters that were not in it; empty if none."""
        states = {self._names[p]: self.state[p] for p in self._parameters()}
        if not any(PREVIOUS in states[name] for name in gradient):
            return {}
        return {
            name: states[name].get(PREVIOUS, torch.zeros_like(value)).to(value)
            for name, value in gradient.items()
        }

    def _penalty(self) -> float:
        return decay_penalty(self.param_groups)

    def _move(self, proposal: Proposal) -> None:
        """Add the update to the parameters, and keep the values that they had."""
        with self.engine.schedule.timed("update"):
            for parameter in self._parameters():
                self.state[parameter].pop(PREVIOUS, None)
                self.state[parameter].pop(BEFORE, None)
                if self._names[parameter] in proposal.direction:
                    self.state[parameter][BEFORE] = parameter.detach().clone()
            self._place(proposal)

    def _place(self, proposal: Proposal) -> None:
        """Set the parameters to their values before the step plus the update."""
        self._last = self._described(proposal)
        alpha, *mu = proposal.coefficients
        for _, parameters, names in self._by_group(proposal.direction):
            steps = torch._foreach_mul([proposal.direction[name] for name in names], alpha)
            if mu and proposal.previous:
                last = [proposal.previous[name] for name in names]
                torch._foreach_add_(steps, last, alpha=mu[0])
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.copy_(self.state[parameter][BEFORE] + step)
                self.state[parameter][PREVIOUS] = step

    def _value_before(self, measured: Objective, loss: float | None) -> float:
        """Return the objective before the update."""
        if loss is None:
            loss = measured.value()
            if not math.isfinite(loss):
                raise self._failure(measured, "on the held-out batch before the update")
        return loss + self._penalty()

    def _measure(self, objective: Objective, value: float | None, proposal: Proposal) -> None:
        """Adapt λ to the effect of the update, and retry with more λ if the loss is not finite.

        The very first update must not raise the objective either, because λ starts with a guess.

        Args:
            value: the objective before the update; ``None``: the effect is not measured.
        """
        if value is not None:
            with self.engine.schedule.timed("reduction ratio"):
                self._adapt_to(objective, value, proposal)

    def _adapt_to(self, objective: Objective, value: float, proposal: Proposal) -> None:
        damping, bold = self.model_damping.value, proposal
        first = self.engine.steps == 0
        for attempt in range(MAX_RETRIES + 1):
            change = objective.value() + self._penalty() - value
            worse = first and change > proposal.rounding(value)
            if math.isfinite(change) and not worse:
                break
            cautious = self._proposals.more_cautious(proposal) if attempt < MAX_RETRIES else None
            if cautious is None:
                break
            proposal = cautious
            self._place(proposal)
        if not math.isfinite(change):
            raise self._failure(objective, "after the update")
        if worse and proposal is not bold:  # λ was not the reason
            proposal = bold
            self.model_damping.restore(damping)
            self._place(proposal)
            change = objective.value() + self._penalty() - value
        self._adapt(change, proposal, value)

    def _adapt(self, change: float, proposal: Proposal, value: float) -> None:
        """Adapt λ to ρ, the change of the objective over the predicted change."""
        model = proposal.model
        assert model is not None
        predicted = model.change(proposal.coefficients)
        self._last["objective_change"] = change
        due = self.model_damping.is_due(self.engine.steps + 1)
        if abs(predicted) > proposal.rounding(value):
            self._last["reduction_ratio"] = change / predicted
            if due:
                self.model_damping.adapt(change / predicted)
        elif due and model.is_dominated_by(self.model_damping.value, proposal.coefficients):
            # Rounding hides both changes, because λ makes the step tiny.
            self.model_damping.adapt(1.0)

    # What users see

    def _described(self, proposal: Proposal) -> dict[str, float | None]:
        alpha, *mu = proposal.coefficients
        model = proposal.model
        return {
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
        """Numbers about the last step.

        ``lr`` α, ``momentum`` μ, ``model_damping`` λ and ``factor_damping`` γ; ``fisher_norm`` of α
        times the natural gradient; ``model_change``, the change of the objective that the model
        predicts without λ; and, if it was measured, ``objective_change``, the actual change, and
        ``reduction_ratio`` ρ of the two.
        """
        return dict(self._last)

    # Checkpoints

    def _components(self) -> Mapping[str, Component | None]:
        return {"dampings": self._dampings}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, all of it or nothing; what ``adaptation`` fixes stays fixed."""
        check_version(state_dict)
        groups = state_dict.get("param_groups")
        if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups):
            fixed = {} if self.lr is None else {"lr": self.lr}
            groups = [{**fixed, **group} for group in groups]
            if self.lr is None:
                groups = [{k: v for k, v in group.items() if k != "lr"} for group in groups]
            state_dict = {**state_dict, "param_groups": groups}
        super().load_state_dict(state_dict)
