"""Algorithm 1: KFC as a preconditioner for stochastic gradient descent ("KFC-pre")."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import require_number
from kfc.curvature.damping import Damping
from kfc.curvature.options import CurvatureChoice, resolve_curvature
from kfc.distributed.options import Parallel
from kfc.fisher.heads import LikelihoodChoice, Output
from kfc.fisher.products import ProductError
from kfc.optimizers.adam import SQUARE
from kfc.optimizers.allowance import NORMS
from kfc.optimizers.base import CurvatureOptimizer
from kfc.optimizers.bound import (
    LossBound,
    StepLimits,
    excess_of_step,
    least_factor,
    sum_of_products,
)
from kfc.optimizers.checkpoints import Component
from kfc.optimizers.clipping import FROZEN, NormClip
from kfc.optimizers.engine import Engine
from kfc.optimizers.groups import SCALED, require_hyper_parameters
from kfc.optimizers.norms import fisher_products
from kfc.optimizers.options import FisherClip, resolve_clip
from kfc.optimizers.steps import (
    Scalar,
    StepScales,
    add_steps_,
    add_steps_on_device_,
    sum_of_scalars,
)
from kfc.schedule import Budget, Periods

Vector = dict[str, Tensor]
Products = dict[str, Scalar]


class KFC(CurvatureOptimizer):
    """Natural gradient descent with Kronecker Factors for Convolution, as a drop-in optimizer.

    Examples:
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
            ``{"prefix": "*.qkv", "treatment": "scaled"}`` excludes layers from the curvature;
            ``"plain"`` also uses their gradient as it is.
        fallback_lr: the learning rate of parameters without a Fisher block, whose gradient is
            divided by the square root of its second moment; by default ``lr``.

    The other arguments are those of ``kfc.Preconditioner``.
    """

    fallback = SCALED
    _narrow_parts, _wide_parts = ("momentum_buffer",), (SQUARE,)

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
            clip=limits,
            averaging_timescale=averaging_timescale,
            groups=groups,
        )
        super().__init__(engine, defaults, groups, averaging_timescale, fallback_lr)
        self._compare_ranks(clip=limits, likelihood=likelihood)

    def _make_step(self, loss: Any) -> None:
        loss_scale, overflow = self._unscale_()
        gradients, engine = self.engine.gradients(), self.engine
        batch = engine.begin_step(gradients, loss_scale, overflow, solves=True)
        if batch is None:
            return
        is_due = self._norm_is_due()  # whether ν is computed
        self._start_averages()  # θ̄ begins at θ₀

        # Algorithm 1
        engine.update_(batch, may_skip=is_due)  # T_s: moving averages of Ω and Γ (eqn 33)
        excess = excess_of_step(engine, loss) if self._bound else None  # E: loss minus its least
        engine.refresh_inverses(self._layer_damping)  # T_f: (Ω ⊗ Γ)⁻¹, damped by λ + γ
        update = self._add_weight_decay(gradients)  # ∇h: gradient of the loss, plus λθ
        diagonals = self._diagonals(gradients)  # of parameters without a Fisher block
        products = engine.solve_(update, diagonals)  # F̂⁻¹∇h (eqn 11); returns ∇hᵀF̂⁻¹∇h
        if products is None:
            return  # a gradient is not finite: the step is skipped
        norms = self._fisher_norms(update) if is_due and products else None
        factor = self._clip_factor(products, norms)  # √(C/ν) if ν = vᵀFv + λvᵀv > C; v = -α F̂⁻¹∇h
        if factor is None:
            return  # ν is not finite: the step is skipped
        factor, limits = self._limits(gradients, products, factor, excess)  # m downhill; -∇hᵀm ≤ κE
        scales = self._scales(factor, limits, norms)  # ν of the whole step ≤ C
        self._move_(update, scales)  # m ← μm + √(C/ν) v; θ ← θ + m
        self._gradient_scales.keep_(engine.in_doubt)
        self._update_averages(engine.in_doubt)  # θ̄ ← ζθ̄ + (1 - ζ)θ, ζ = exp(-1/τ)
        engine.end_step(with_norms=norms is not None)

    def _require_batch(self) -> None:
        known = self.engine.steps > 0 or not self.engine.curvature.is_empty()
        if known and self._clip and not self.engine.collector.observations:
            self.engine.reducer.fail(
                "step() without a forward pass in training mode since the last one: the clip "
                "needs the batch; run the model first, or pass clip=kfc.FisherClip(None), or "
                "curvature=kfc.Kronecker(gather_in_eval=True) to train in evaluation mode"
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

    def _norm_is_due(self) -> bool:
        return self._clip is not None and self._clip.is_due(
            is_affordable=self.engine.allowance.allows(NORMS)
        )

    def _clip_factor(self, products: Products, norms: Tensor | None) -> Scalar | None:
        """Return the factor that shortens v if its Fisher norm exceeds the limit.

        Args:
            products: ∇hᵀF̂⁻¹∇h by parameter.
            norms: ν of v and more, if it was computed; see ``_fisher_norms()``.

        Returns:
            ``None`` if ν is not finite, after which the step is skipped.
        """
        estimate = self._estimated_norm(products)
        if self._clip is None or estimate is None:
            return 1.0
        if norms is not None:
            found = self._clip.shorten(estimate, norms[0, 0])
            if found is None:
                self.engine.skip_step()
            return found
        if isinstance(estimate, Tensor):
            self.engine.doubt(~torch.isfinite(estimate))
        elif not math.isfinite(estimate):
            self.engine.doubt(torch.ones((), dtype=torch.bool, device=self.engine.device))
        return self._clip.guard(estimate)

    def _estimated_norm(self, products: Products) -> Scalar | None:
        """Return vᵀF̂v = α² ∇hᵀF̂⁻¹∇h of v = -α F̂⁻¹∇h, if there is a limit on it."""
        if self._clip is None or not products:
            return None
        parts = [
            float(group["lr"]) ** 2 * sum_of_scalars([products[name] for name in names])
            for group, _, names in self._by_group(products)
        ]
        return sum_of_scalars(parts)

    def _fisher_norms(self, update: Vector) -> Tensor | None:
        """Return xᵀFy + λxᵀy of v and of μm, (2, 2), with the exact F on a part of the step.

        μm is left out if the step is v, or if only v is limited. ``None`` if the products cannot be
        computed for this model.

        Args:
            update: F̂⁻¹∇h.
        """
        assert self._clip is not None
        pairs = [self._times_option(update, "lr", -1.0)]
        has_momentum = any(group["momentum"] for group in self.param_groups)
        if self._bound is not None and has_momentum and self.engine.steps > 0:
            old: Vector = {}
            for _, parameters, names in self._by_group(update):
                old.update(zip(names, self._momentum_buffers(parameters), strict=True))
            pairs.append(self._times_option(old, "momentum", 1.0))
        scales = torch.tensor([scale for scale, _ in pairs], dtype=torch.float64)
        vectors = [vector for _, vector in pairs]
        with self.engine.schedule.timed("clip"):
            try:
                norms = fisher_products(self.engine, vectors, self._clip.examples_used)
            except ProductError as error:
                self._clip.estimate_only()
                warnings.warn(
                    f"{error}. The clip limits the estimated norm vᵀF̂v instead of ν",
                    stacklevel=2,
                )
                return None
            for group, _, names in self._by_group(update):
                if group["weight_decay"]:
                    flat = [[vector[name] for name in names] for vector in vectors]
                    squares = [[sum_of_products(x, y).item() for y in flat] for x in flat]
                    norms += float(group["weight_decay"]) * norms.new_tensor(squares)
        return norms * scales * scales.unsqueeze(1)

    def _times_option(self, vector: Vector, option: str, sign: float) -> tuple[float, Vector]:
        """Return a number and a vector, whose product is the vector times an option by group.

        The vector is copied only if the groups differ in the option.
        """
        values = {float(group[option]) for group, _, _ in self._by_group(vector)}
        if len(values) == 1:
            return sign * values.pop(), vector
        scaled: Vector = {}
        for group, _, names in self._by_group(vector):
            own = torch._foreach_mul([vector[name] for name in names], float(group[option]))
            scaled.update(zip(names, own, strict=True))
        return sign, scaled

    def _scales(
        self, factor: Scalar, limits: StepLimits | None, norms: Tensor | None
    ) -> StepScales:
        """Return the factors of v and of μm in the step, whose Fisher norm is within the limit.

        Momentum adds up updates, each of which is within the limit.

        Args:
            factor: the factor of v by the clip.
            limits: the factors of μm and of the whole step by the loss bound.
            norms: see ``_fisher_norms()``; ``None`` if they were not computed.
        """
        if limits is None:
            return StepScales(factor, 1.0)
        new, old = self.engine.known(factor) * limits.step, limits.momentum * limits.step
        if norms is None:
            return StepScales(new, old)
        scales = torch.tensor([float(new), float(old)], dtype=torch.float64)
        if len(norms) > 1:
            assert self._clip is not None
            norm = float(scales @ norms @ scales)
            if not norm <= self._clip.limit:
                shrinkage = math.sqrt(self._clip.limit / norm) if norm == norm else 0.0
                if self._clip.is_frozen and norm == norm:
                    decrease, limit = float(limits.decrease * limits.step), float(limits.limit)
                    shrinkage = max(shrinkage, least_factor(decrease, limit))
                scales = scales * shrinkage
        return StepScales(*scales.tolist())

    # Momentum and parameters

    def _limits(
        self, gradients: Vector, products: Products, factor: Scalar, excess: Scalar | None
    ) -> tuple[Scalar, StepLimits | None]:
        """Return the factor of v, and those of m = μ m_old + v by the loss bound, if there is one.

        Args:
            gradients: gradients of the loss.
            products: ∇hᵀF̂⁻¹∇h by parameter.
            factor: the factor of v by the clip.
            excess: E of the loss.
        """
        engine = self.engine
        with engine.schedule.timed("update", continued=True), engine.full_precision():
            if self._bound is None or excess is None or not products:
                return factor, None
            old: Scalar = 0.0
            new: Scalar = 0.0
            for group, parameters, names in self._by_group(gradients):
                decay, momentum = float(group["weight_decay"]), float(group["momentum"])
                own = sum_of_scalars([products[name] for name in names])
                new = new - float(group["lr"]) * engine.known(own)
                if decay:  # ∇h and E contain the penalty ½λ‖θ‖²
                    square = sum_of_products(parameters, parameters)
                    excess = excess + 0.5 * decay * engine.known(square)
                if momentum:
                    buffers = self._momentum_buffers(parameters)
                    slope = sum_of_products([gradients[name] for name in names], buffers)
                    if decay:
                        slope = slope + decay * sum_of_products(parameters, buffers)
                    old = old + momentum * engine.known(slope)
            if not isinstance(factor, Tensor) and self._clip is not None and self._clip.is_frozen:
                # v still lowers h by κE/100
                factor = max(factor, min(FROZEN, self._bound.least_factor(-new, excess)))
                self._clip.lengthen(factor)
            return factor, self._bound.limit(old, engine.known(factor) * new, excess)

    def _momentum_buffers(self, parameters: list[Tensor]) -> list[Tensor]:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [self.state[parameter]["momentum_buffer"] for parameter in parameters]

    def _move_(self, update: Vector, scales: StepScales) -> None:
        """Update the momentum, m ← μm + v, and the parameters, θ ← θ + m; without momentum, m is v.

        If the step in progress is bad, m and θ stay as they are.

        Args:
            update: F̂⁻¹∇h, whose memory is used.
        """
        with self.engine.schedule.timed("update", continued=True):
            for group, parameters, names in self._by_group(update):
                values, momentum = [update[name] for name in names], float(group["momentum"])
                new, old = -float(group["lr"]) * scales.new, momentum * scales.old
                buffers = self._momentum_buffers(parameters) if momentum else None
                bad = self._in_doubt_on(values[0].device)
                if bad is None and not isinstance(new, Tensor) and not isinstance(old, Tensor):
                    add_steps_(parameters, buffers, values, new, old)
                else:
                    add_steps_on_device_(parameters, buffers, values, new, old, bad)

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

    def _components(self) -> Mapping[str, Component | None]:
        return {"clip": self._clip, "loss_bound": self._bound}
