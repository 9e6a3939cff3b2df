"""Algorithm 1: KFC as a preconditioner for stochastic gradient descent ("KFC-pre")."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import moved, require_keys, require_number
from kfc.curvature.damping import Damping
from kfc.curvature.options import CurvatureChoice, resolve_curvature
from kfc.distributed.options import Parallel
from kfc.fisher.heads import LikelihoodChoice, Output
from kfc.optimizers.base import CurvatureOptimizer
from kfc.optimizers.bound import LossBound, StepLimits, excess_loss, sum_of_products
from kfc.optimizers.clipping import NormClip
from kfc.optimizers.engine import Engine, check_version
from kfc.optimizers.groups import require_hyper_parameters
from kfc.optimizers.norms import fisher_products
from kfc.optimizers.options import FisherClip, resolve_clip
from kfc.schedule import Budget, Periods

Vector = dict[str, Tensor]


class KFC(CurvatureOptimizer):
    """Natural gradient descent with Kronecker Factors for Convolution, as a drop-in optimizer.

    >>> optimizer = kfc.KFC(model, lr=3e-3)
    >>> for images, labels in loader:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(images), labels).backward()
    ...     optimizer.step()

    Args:
        model: the network; its layers are found by type (see ``describe()``).
        lr: α, the learning rate.
        momentum: μ, the momentum.
        weight_decay: λ, the coefficient of ½‖θ‖² in the objective; it enters the gradient and the
            damping.
        damping: γ, added to λ in the damping √(λ + γ) of the factors. A bias is damped by the λ and
            γ of its own group.
        clip: limits on the size of an update: a ``kfc.FisherClip``, or a number, which is C, the
            limit on the Fisher norm of an update. ``None``: no limit; training can then diverge.
        averaging_timescale: τ, the timescale of the averaged parameters in updates; ``None``: no
            averaging. The paper uses the number of mini-batches in the data set.
        groups: options for some parameters, as ``{"prefix": "conv1", "lr": 1e-3}`` or
            ``{"prefix": "*.bias", "weight_decay": 0.0}``. A prefix is the name of a module or
            parameter, a pattern, or a list of these. The first that matches a parameter applies.
        fallback_lr: the learning rate of parameters without a Fisher block, which follow their
            plain gradient; by default ``lr``.

    The other arguments are those of ``kfc.Preconditioner``.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-3,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 1e-3,
        clip: FisherClip | float | None = FisherClip(0.3),  # noqa: B008 - immutable
        averaging_timescale: float | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
        fallback_lr: float | None = None,
        likelihood: LikelihoodChoice = "auto",
        output: Output | None = None,
        strict: bool = False,
        seed: int | None = None,
        curvature: CurvatureChoice = "kfc",
        schedule: Periods | Budget = Periods(overhead=0.2),  # noqa: B008 - immutable
        parallel: Parallel | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": damping,
        }
        require_hyper_parameters(defaults)
        if fallback_lr is not None:
            require_number("fallback_lr", fallback_lr)
        limits = resolve_clip(clip)
        self._clip = NormClip(limits) if limits and limits.limit is not None else None
        share = limits.loss_bound if limits else None
        self._bound = None if share is None else LossBound(share)
        engine = Engine(
            model,
            likelihood=likelihood,
            output=output,
            strict=strict,
            seed=seed,
            curvature=resolve_curvature(curvature),
            schedule=schedule,
            parallel=parallel,
            norm_rate=0.0 if self._clip is None else self._clip.lowest_rate,
            averaging_timescale=averaging_timescale,
        )
        super().__init__(engine, defaults, groups, averaging_timescale, fallback_lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once.

        Args:
            closure: clears the gradients, computes the loss, calls ``backward()`` and returns the
                loss, as for ``torch.optim.SGD``.
        """
        loss = self._loss_of(closure)
        loss_scale, overflow = self._unscale_()
        gradients, engine = self.engine.gradients(), self.engine
        self._require_batch()
        batch = engine.begin_step(gradients, loss_scale, overflow)
        if batch is None:
            return loss
        is_due = self._clip is not None and self._clip.is_due()  # whether ν is computed
        self._start_averages()  # θ̄ begins at θ₀

        # Algorithm 1
        engine.update_(batch, may_skip=is_due)  # T_s: moving averages of Ω and Γ (eqn 33)
        engine.refresh_inverses(self._layer_damping)  # T_f: (Ω ⊗ Γ)⁻¹, damped by λ + γ
        update = self._add_weight_decay(gradients)  # ∇h: gradient of the loss, plus λθ
        products = engine.solve_(update)  # F̂⁻¹∇h (eqn 11); returns ∇hᵀF̂⁻¹∇h
        self._times_learning_rate_(update)  # v = -α F̂⁻¹∇h
        factor = self._clip_factor(update, products)  # √(C/ν) if ν = vᵀFv + λvᵀv > C
        if factor is None:
            return loss  # ν is not finite: the step is skipped
        limits = self._limits(gradients, products, factor, loss)  # m not uphill; -∇hᵀm ≤ κE
        steps = self._add_momentum_(update, factor, limits)  # v ← √(C/ν) v; m ← μm + v
        self._clip_steps_(steps, is_due=is_due)  # ν of the whole step ≤ C
        self._move_(steps, update)  # θ ← θ + m
        self._update_averages(engine.in_doubt)  # θ̄ ← ζθ̄ + (1 - ζ)θ, ζ = exp(-1/τ)
        engine.end_step()
        return loss

    def _require_batch(self) -> None:
        known = self.engine.steps > 0 or not self.engine.curvature.is_empty()
        if known and self._clip and not self.engine.collector.observations:
            raise RuntimeError(
                "step() without a forward pass in training mode since the last one: the clip "
                "needs the batch; run the model first, or pass clip=kfc.FisherClip(None)"
            )

    def _layer_damping(self, layer: str) -> Damping:
        """Return δ = λ + γ of the layer's weight and bias, each from its own group."""
        parameters = self.engine.plan.layers[layer].parameters()
        deltas = {role: self._damping_of(parameter) for role, parameter in parameters.items()}
        return Damping(deltas["weight"], deltas.get("bias", deltas["weight"]))

    def _damping_of(self, parameter: nn.Parameter) -> float:
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        return float(group["weight_decay"]) + float(group["damping"])

    # Clipping

    def _clip_factor(self, update: Vector, products: Vector) -> float | Tensor | None:
        """Return the factor that shortens v if its Fisher norm exceeds the limit.

        Args:
            products: ∇hᵀF̂⁻¹∇h by parameter.

        Returns:
            A number, or a tensor if only the device knows; ``None`` if ν is not finite, after which
            the step is skipped.
        """
        estimate = self._estimated_norm(products)
        if self._clip is None or estimate is None:
            return 1.0
        if self._clip.is_due():
            with self.engine.schedule.timed("clip"):
                found = self._clip.shorten(estimate, self._fisher_norm(update))
            if found is None:
                self.engine.skip_step()
            return found
        factor = self._clip.guard(estimate)
        if isinstance(factor, Tensor):
            self.engine.doubt(~torch.isfinite(estimate))
        return factor

    def _estimated_norm(self, products: Vector) -> Tensor | None:
        """Return vᵀF̂v = α² ∇hᵀF̂⁻¹∇h of v = -α F̂⁻¹∇h, if there is a limit on it.

        Args:
            products: ∇hᵀF̂⁻¹∇h by parameter.
        """
        if self._clip is None or not products:
            return None
        parts = [
            float(group["lr"]) ** 2 * products[name]
            for group, _, names in self._by_group(products)
            for name in names
        ]
        wide, home = reduce(torch.promote_types, (p.dtype for p in parts)), parts[0].device
        return torch.stack([moved(part, home).to(wide) for part in parts]).sum()

    def _fisher_norm(self, update: Vector) -> Tensor:
        """Return ν = vᵀFv + λvᵀv, with the exact F on the first examples of the step."""
        assert self._clip is not None
        norm = fisher_products(self.engine, [update], self._clip.fraction)[0, 0]
        for group, _, names in self._by_group(update):
            if group["weight_decay"]:
                squares = [update[name].square().sum() for name in names]
                norm = norm + float(group["weight_decay"]) * torch.stack(squares).sum().to(norm)
        return norm

    # Momentum and parameters

    def _limits(
        self, gradients: Vector, products: Vector, factor: float | Tensor, loss: Any
    ) -> StepLimits | None:
        """Return the factors of the step m = μ m_old + v by the loss bound; ``None``: no bound.

        Args:
            gradients: gradients of the loss.
            products: ∇hᵀF̂⁻¹∇h by parameter.
            factor: the factor of v by the clip.
            loss: what the closure returned, if there is one.
        """
        with self.engine.schedule.timed("update"), self.engine.full_precision():
            if self._bound is None or not products:
                return None
            excess = excess_loss(self.engine, loss if isinstance(loss, Tensor) else None)
            old, new = torch.zeros_like(excess), torch.zeros_like(excess)
            for group, parameters, names in self._by_group(gradients):
                slopes = [gradients[name] for name in names]
                decay, momentum = float(group["weight_decay"]), float(group["momentum"])
                own = torch.stack([products[name] for name in names]).sum()
                new = new - float(group["lr"]) * moved(own, new.device)
                if decay:  # ∇h and E contain the penalty ½λ‖θ‖²
                    penalty = 0.5 * decay * sum_of_products(parameters, parameters)
                    excess = excess + moved(penalty, excess.device)
                if momentum:
                    buffers = self._momentum_buffers(parameters)
                    slope = sum_of_products(slopes, buffers)
                    if decay:
                        slope = slope + decay * sum_of_products(parameters, buffers)
                    old = old + momentum * moved(slope, old.device)
            if isinstance(factor, Tensor):
                factor = moved(factor, new.device)
            return self._bound.limit(old, factor * new, excess)

    def _add_momentum_(
        self, update: Vector, factor: float | Tensor, limits: StepLimits | None
    ) -> Vector:
        """Update the momentum, m ← μ m + v, and return it; without momentum, m is v.

        If the step in progress is bad, v becomes zero and m stays as it is.

        Args:
            factor: the factor of v by the clip.
            limits: the factors of μ m and of the whole step.
        """
        steps: Vector = {}
        with self.engine.schedule.timed("update", continued=True):
            if limits is not None:
                here = limits.step.device
                own = moved(factor, here) if isinstance(factor, Tensor) else factor
                factor = own * limits.step
            self._scale_(update, factor)
            for group, parameters, names in self._by_group(update):
                values, momentum = [update[name] for name in names], float(group["momentum"])
                bad = self._in_doubt_on(values[0].device)
                if bad is not None:
                    for value in values:
                        value.masked_fill_(bad, 0)
                if momentum:
                    buffers = self._momentum_buffers(parameters)
                    torch._foreach_mul_(
                        buffers, self._momentum_factor(buffers, momentum, limits, bad)
                    )
                    torch._foreach_add_(buffers, values)
                    values = buffers
                steps.update(zip(names, values, strict=True))
        return steps

    def _momentum_factor(
        self, buffers: list[Tensor], momentum: float, limits: StepLimits | None, bad: Tensor | None
    ) -> float | Tensor:
        """Return the factor of the old momentum: μ, less by the limits, 1 if the step is bad."""
        if limits is None and bad is None:
            return momentum
        wide = reduce(torch.promote_types, (b.dtype for b in buffers), torch.float32)
        factor = torch.full((), momentum, dtype=wide, device=buffers[0].device)
        if limits is not None:
            factor = factor * moved(limits.momentum * limits.step, factor.device).to(wide)
        return factor if bad is None else torch.where(bad, torch.ones_like(factor), factor)

    def _momentum_buffers(self, parameters: list[Tensor]) -> list[Tensor]:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [self.state[parameter]["momentum_buffer"] for parameter in parameters]

    def _clip_steps_(self, steps: Vector, *, is_due: bool) -> None:
        """Shorten the steps m, in place, if their Fisher norm is known to exceed the limit.

        Momentum adds up updates, each of which is within the limit.

        Args:
            is_due: whether ν of the update was computed in this step.
        """
        if self._bound is None or self._clip is None or not is_due:
            return
        has_momentum = any(group["momentum"] for group in self.param_groups)
        if not has_momentum or self.engine.steps == 0:  # m is v
            return
        with self.engine.schedule.timed("clip"):
            norm = self._fisher_norm(steps).item()
        if not norm <= self._clip.limit:
            self._scale_(steps, math.sqrt(self._clip.limit / norm) if norm == norm else 0.0)

    def _move_(self, steps: Vector, spare: Vector) -> None:
        """Add the steps to the parameters, unless the step in progress is bad.

        Args:
            spare: tensors like the steps, whose memory may be used.
        """
        with self.engine.schedule.timed("update", continued=True):
            for _, parameters, names in self._by_group(steps):
                values = [steps[name] for name in names]
                bad = self._in_doubt_on(values[0].device)
                if bad is not None:
                    moves = [spare[name] for name in names]
                    torch._foreach_copy_(moves, values)
                    torch._foreach_mul_(moves, torch.where(bad, 0.0, 1.0))
                    values = moves
                torch._foreach_add_(parameters, values)

    def _in_doubt_on(self, device: torch.device) -> Tensor | None:
        """Return whether the step in progress is bad; ``None`` if it is known to be good."""
        return None if self.engine.in_doubt is None else moved(self.engine.in_doubt, device)

    # What users see

    @property
    def step_diagnostics(self) -> dict[str, Any]:
        """A dict of numbers about clipping; reading it waits for the device.

        ``fisher_norm``, ν when it was last computed; ``clip_factor`` of the last update;
        ``clip_evaluations``, how often ν was computed; ``clip_guards``, how often the estimate
        shortened an update; ``loss_bound_factor`` of the last step; ``loss_bounds``, how often the
        loss bound shortened a step; ``momentum_restarts``, how often momentum led uphill and was
        dropped.
        """
        known = {} if self._clip is None else self._clip.state_dict()
        return {
            "fisher_norm": known.get("norm"),
            "clip_factor": known.get("factor", 1.0),
            "clip_evaluations": known.get("evaluations", 0),
            "clip_guards": known.get("guards", 0),
            **({} if self._bound is None else self._bound.diagnostics()),
        }

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        clip = None if self._clip is None else self._clip.state_dict()
        bound = None if self._bound is None else self._bound.state_dict()
        return {**super().state_dict(), "clip": clip, "loss_bound": bound}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_version(state_dict)
        parts = {"clip": self._clip, "loss_bound": self._bound}
        require_keys("optimizer state", state_dict, parts)
        if state_dict["clip"] is not None:
            NormClip.check_state(state_dict["clip"])
        if self._bound is not None and state_dict["loss_bound"] is not None:
            self._bound.check_state(state_dict["loss_bound"])
        super().load_state_dict(state_dict)
        for name, part in parts.items():
            if part is not None and state_dict[name] is not None:
                part.load_state_dict(state_dict[name])
