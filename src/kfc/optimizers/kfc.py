"""Algorithm 1: KFC as a preconditioner for stochastic gradient descent ("KFC-pre")."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import moved, require_keys, require_number
from kfc.curvature.damping import Damping
from kfc.curvature.options import CurvatureChoice
from kfc.distributed.options import Parallel
from kfc.fisher.heads import LikelihoodChoice, Output
from kfc.optimizers.base import CurvatureOptimizer
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
        clip: C, a limit on the Fisher norm of an update: a number, a ``kfc.FisherClip``, or
            ``None`` for no limit.
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
        schedule: Periods | Budget = Periods(),  # noqa: B008 - immutable
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
        limit = resolve_clip(clip)
        self._clip = None if limit is None else NormClip(limit)
        engine = Engine(
            model,
            likelihood=likelihood,
            output=output,
            strict=strict,
            seed=seed,
            curvature=curvature,
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
        self._refuse_averaged()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        loss_scale, overflow = self._unscale()
        gradients = self.engine.gradients()
        self._require_batch()
        batch = self.engine.begin_step(gradients, loss_scale, overflow)
        if batch is None:
            return loss

        # Only a computed ν can be found not to be finite.
        may_skip = self._clip is not None and self._clip.is_due()

        # Algorithm 1
        self.engine.update_(batch, may_skip=may_skip)  # T_s: moving averages of Ω and Γ (eqn 33)
        self.engine.refresh_inverses(self._layer_damping)  # T_f: (Ω ⊗ Γ)⁻¹, damped by λ + γ
        update = self._add_weight_decay(gradients)  # ∇h: gradient of the loss, plus λθ
        products = self.engine.solve_(update)  # F̂⁻¹∇h in place (eqn 11); returns ∇hᵀF̂⁻¹∇h
        self._times_learning_rate_(update)  # v = -α F̂⁻¹∇h
        estimate = self._estimated_norm(products)  # vᵀF̂v = α² ∇hᵀF̂⁻¹∇h
        factor = self._clip_factor(update, estimate)  # √(C/ν) if ν = vᵀFv + λvᵀv > C, else 1
        if factor is None:
            self.engine.skip_step(quietly=overflow is not None and bool(overflow))
            return loss
        self._scale_(update, factor)
        with self.engine.schedule.timed("update"):
            self._start_averages()  # θ̄ begins at θ₀
            self._move_(update, self.engine.in_doubt)  # m ← μm + v; θ ← θ + m
            self._update_averages(self.engine.in_doubt)  # θ̄ ← ζθ̄ + (1 - ζ)θ, ζ = exp(-1/τ)
        self.engine.end_step()
        return loss

    def _require_batch(self) -> None:
        known = self.engine.steps > 0 or not self.engine.curvature.is_empty()
        if known and self._clip and not self.engine.collector.observations:
            raise RuntimeError(
                "step() without a forward pass in training mode since the last one: the clip "
                "needs the batch; run the model first, or set clip=None"
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

    def _clip_factor(self, update: Vector, estimate: Tensor | None) -> float | Tensor | None:
        """Return the factor that brings the update's Fisher norm to the limit, or 1.

        Args:
            estimate: vᵀF̂v, if there is a limit.

        Returns:
            A number, or a tensor if only the device knows; ``None`` if the norm is not finite.
        """
        if self._clip is None or estimate is None:
            return 1.0
        if self._clip.is_due():
            with self.engine.schedule.timed("clip"):
                return self._clip.shorten(estimate, self._fisher_norm(update))
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

    def _scale_(self, update: Vector, factor: float | Tensor) -> None:
        """Multiply the update by a number or by a scalar on the device, in place."""
        if not isinstance(factor, Tensor) and factor == 1:
            return
        for _, _, names in self._by_group(update):
            values = [update[name] for name in names]
            if isinstance(factor, Tensor):
                factor = moved(factor, values[0].device)
            torch._foreach_mul_(values, factor)

    # Momentum and parameters

    def _move_(self, update: Vector, bad: Tensor | None) -> None:
        """Add the update to the momentum and the momentum to the parameters.

        Args:
            bad: a boolean scalar; if true, momentum and parameters stay as they are. ``None``: the
                step is known to be good.
        """
        for group, parameters, names in self._by_group(update):
            steps = [update[name] for name in names]
            here = None if bad is None else moved(bad, steps[0].device)
            if here is not None:
                for step in steps:
                    step.masked_fill_(here, 0)
            if group["momentum"]:
                steps = self._add_momentum_(parameters, steps, group["momentum"], here)
            torch._foreach_add_(parameters, steps)

    def _add_momentum_(
        self, parameters: list[Tensor], update: list[Tensor], momentum: float, bad: Tensor | None
    ) -> list[Tensor]:
        """Update the momentum buffers, m ← μ m + v, and return the step to take.

        The step may take the memory of the update.
        """
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        if bad is None:
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, update)
            return buffers
        # v is zero if the step is bad; then neither m nor the parameters may change.
        wide = reduce(torch.promote_types, (b.dtype for b in buffers), torch.float32)
        one = torch.ones((), dtype=wide, device=bad.device)
        torch._foreach_mul_(buffers, torch.where(bad, one, momentum * one))
        torch._foreach_add_(buffers, update)
        torch._foreach_copy_(update, buffers)
        torch._foreach_mul_(update, torch.where(bad, 0 * one, one))
        return update

    # What users see

    @property
    def step_diagnostics(self) -> dict[str, Any]:
        """A dict of numbers about clipping; reading it waits for the device.

        ``fisher_norm``, ν when it was last computed; ``clip_factor`` of the last update;
        ``clip_evaluations``, how often ν was computed; ``clip_guards``, how often the estimate
        shortened an update.
        """
        known = {} if self._clip is None else self._clip.state_dict()
        return {
            "fisher_norm": known.get("norm"),
            "clip_factor": known.get("factor", 1.0),
            "clip_evaluations": known.get("evaluations", 0),
            "clip_guards": known.get("guards", 0),
        }

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        clip = None if self._clip is None else self._clip.state_dict()
        return {**super().state_dict(), "clip": clip}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_version(state_dict)
        require_keys("optimizer state", state_dict, ("clip",))
        if state_dict["clip"] is not None:
            NormClip.check_state(state_dict["clip"])
        super().load_state_dict(state_dict)
        if self._clip is not None and state_dict["clip"] is not None:
            self._clip.load_state_dict(state_dict["clip"])
