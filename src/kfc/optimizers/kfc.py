"""Algorithm 1: KFC as a preconditioner for stochastic gradient descent ("KFC-pre")."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kfc.capture import ModelCall
from kfc.checks import moved, require_keys, require_number
from kfc.distributed.placement import PlacementKind
from kfc.distributed.workers import GroupChoice
from kfc.fisher import ForwardModeError, Output, products_of_call
from kfc.gathering import FisherKind
from kfc.layers import mixes_examples
from kfc.layers.base import DEFAULT_MAX_FACTOR_SIZE
from kfc.likelihoods import Likelihood
from kfc.optimizers.averaging import start_averages, update_averages
from kfc.optimizers.base import CurvatureOptimizer
from kfc.optimizers.clipping import FisherClip
from kfc.optimizers.groups import require_hyper_parameters
from kfc.periods import Period, require_period
from kfc.preconditioner import CurvatureKind, InverseKind, Preconditioner
from kfc.renewal import InverseWorkerKind


class KFC(CurvatureOptimizer):
    """Natural gradient descent with Kronecker Factors for Convolution, as a drop-in optimizer.

    >>> optimizer = kfc.KFC(model, lr=3e-3)
    >>> for images, labels in loader:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(images), labels).backward()
    ...     optimizer.step()

    Args:
        model: the network; its layers are found by type (see :meth:`describe`).
        lr: α, the learning rate.
        momentum: μ.
        weight_decay: λ, the coefficient of ½‖θ‖² in the objective; it enters the gradient and the
            damping.
        damping: γ, added to λ in the damping √(λ + γ) of the factors.
        statistics_period: T_s, in steps: a number or a :class:`kfc.Stretch`; by default
            ``Stretch(10)``, which begins at 1 and grows as the curvature settles.
        inverse_period: T_f, likewise; by default ``Stretch(20)``.
        overhead: instead of periods, what curvature may add to the time of a step, 0.25 for a
            quarter. The first six steps are measured; the periods that are not given follow, and
            are in ``diagnostics["periods"]``.
        factor_decay: ξ, the weight of the old value in the factors' moving averages.
        fisher_clip: C; an update v with ν = vᵀFv + λvᵀv > C, F exact, is divided by √(ν/C).
            ``None``: no clipping.
        clip_fraction: the part of the batch on which ν is computed.
        clip_period: compute ν every so many steps, and let the others pass; by default as often as
            it takes, and where an estimate of ν may exceed C in between, the estimate clips.
        averaging_timescale: τ, in updates, of the averaged parameters; ``None``: no averaging. The
            paper takes the number of mini-batches in the data set.
        fallback_lr: the learning rate of parameters with the plain gradient; by default ``lr``.
        max_factor_size: factors wider than this keep their diagonal only.
        groups: options by name, ``{"prefix": "conv1", "lr": 1e-3}`` or ``{"prefix": "*.bias",
            "weight_decay": 0.0}``; a prefix is the name of a module or parameter, a pattern, or a
            list of them. The first that fits a parameter counts.
        likelihood: what the loss says of the outputs; this and the rest as in
            :class:`kfc.Preconditioner`.
        fisher: which targets the curvature is for.
        inverse: how the damping enters.
        curvature: how the Fisher blocks are approximated: ``"kfc"``, or for comparison ``"sua"``,
            ``"prong"``, ``"diagonal"``, ``"ekfac"``.
        output: picks the tensor of outputs from what the model returns.
        seed: of the generator that draws targets.
        process_group: the ranks that train together; by default those of DistributedDataParallel,
            or torch's default group.
        inverse_placement: which of them computes inverses: ``"auto"``, ``"shared"``,
            ``"replicated"``, ``"gradients"``.
        inverse_worker: ``"thread"`` for inverses beside training.
        max_staleness: how many steps these may be late.
        deterministic: have them just so late.
        consistency_period: check every so many steps that all ranks have the same.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-3,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 1e-3,
        statistics_period: Period | None = None,
        inverse_period: Period | None = None,
        overhead: float | None = None,
        factor_decay: float = 0.95,
        fisher_clip: float | None = 0.3,
        clip_fraction: float = 0.25,
        clip_period: int | None = None,
        averaging_timescale: float | None = None,
        fallback_lr: float | None = None,
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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": damping,
        }
        require_hyper_parameters(defaults)
        if fallback_lr is not None:
            require_number("fallback_lr", fallback_lr)
        if fisher_clip is not None:
            require_number("fisher_clip", fisher_clip, positive=True)
        if clip_period is not None:
            require_period("clip_period", clip_period)
        if clip_fraction != 1:
            require_number("clip_fraction", clip_fraction, below=1, positive=True)
        preconditioner = Preconditioner(
            model,
            statistics_period=statistics_period,
            inverse_period=inverse_period,
            overhead=overhead,
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
        super().__init__(preconditioner, defaults, groups, averaging_timescale, fallback_lr)
        self.clip_fraction = clip_fraction
        self._clip = None if fisher_clip is None else FisherClip(fisher_clip, clip_period)
        preconditioner.schedule.norm_rate = 0.0 if self._clip is None else self._clip.lowest_rate

    # Algorithm 1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update.

        Args:
            closure: evaluates the model anew and returns the loss, after its backward.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._averaging:
            raise RuntimeError("step() inside averaged_parameters() would move the averages")
        self._update(*self._unscale())
        return loss

    def _update(self, loss_scale: float | Tensor, overflow: Tensor | None) -> None:
        curvature = self.preconditioner
        gradients = curvature.gradients()
        known = curvature.steps > 0 or any(curvature.curvature.running())
        if known and self._clip and not curvature.gathering.calls:
            raise RuntimeError(
                "step() without a forward pass in training mode since the last one: the clip "
                "needs the batch; run the model first, or set fisher_clip=None"
            )
        if not curvature.begin_step(gradients, self._layer_damping, loss_scale, overflow):
            return
        update = self._with_weight_decay(gradients)
        products = curvature.precondition(update)
        self._times_rate(update)
        if not self._shorten(update, products):
            curvature.skip_step(quietly=overflow is not None and bool(overflow))
            return
        with curvature.schedule.timed("update"):
            self._move(update, curvature.in_doubt)
        curvature.end_step()

    def _layer_damping(self, layer: str) -> float:
        """δ = λ + γ of the group of the layer's weight."""
        weight = self.preconditioner.plan.handlers[layer].weight
        group = next(g for g in self.param_groups if any(p is weight for p in g["params"]))
        return float(group["weight_decay"]) + float(group["damping"])

    def _times_rate(self, natural: Mapping[str, Tensor]) -> None:
        """v = -α F̂⁻¹ ∇h, in place"""
        for group, _, names in self._by_group(natural):
            torch._foreach_mul_([natural[name] for name in names], -float(group["lr"]))

    def _move(self, update: Mapping[str, Tensor], in_doubt: Tensor | None) -> None:
        """Momentum, parameters, averages; a bad step, if only the device knows, stays where it is.

        Args:
            in_doubt: a boolean scalar, true for a bad step; ``None`` for one known to be good.
        """
        averaged = self._averaged()
        if self.averaging_timescale is not None:
            start_averages(averaged, self.state)
        for group, parameters, names in self._by_group(update):
            steps = [update[name] for name in names]
            bad = None if in_doubt is None else moved(in_doubt, steps[0].device)
            if bad is not None:
                for step in steps:
                    step.masked_fill_(bad, 0)
            if group["momentum"]:
                steps = self._with_momentum(parameters, steps, group["momentum"], bad)
            torch._foreach_add_(parameters, steps)
        if self.averaging_timescale is not None:
            update_averages(averaged, self.state, self.averaging_timescale, in_doubt)

    def _with_momentum(
        self, parameters: list[Tensor], update: list[Tensor], momentum: float, bad: Tensor | None
    ) -> list[Tensor]:
        """m ← μ m + v, in place; returns the step to take."""
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        if bad is None:
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, update)
            return buffers
        # v is zero if the step is bad: m must then stay, and the parameters too.
        wide = reduce(torch.promote_types, (b.dtype for b in buffers), torch.float32)
        one = torch.ones((), dtype=wide, device=bad.device)
        torch._foreach_mul_(buffers, torch.where(bad, one, momentum * one))
        torch._foreach_add_(buffers, update)
        torch._foreach_copy_(update, buffers)
        torch._foreach_mul_(update, torch.where(bad, 0 * one, one))
        return update

    # Clipping

    def _shorten(self, update: Mapping[str, Tensor], products: Mapping[str, Tensor]) -> bool:
        """Clip the update in place; False if its norm is known not to be finite."""
        if self._clip is None or not update:
            return True
        estimate = self._estimated_norm(products)
        factor: float | Tensor | None
        if self._clip.is_due():
            with self.preconditioner.schedule.timed("clip"):
                factor = self._clip.shorten(estimate, self._fisher_norm(update))
        else:
            factor = self._clip.guard(estimate)
            if isinstance(factor, Tensor):
                self.preconditioner.doubt(~torch.isfinite(estimate))
        if factor is None:
            return False
        if isinstance(factor, Tensor) or factor < 1:
            self._scale(update, factor)
        return True

    def _estimated_norm(self, products: Mapping[str, Tensor]) -> Tensor:
        """vᵀ F̂ v = α² ∇hᵀ F̂⁻¹ ∇h"""
        parts = [
            float(group["lr"]) ** 2 * products[name]
            for group, _, names in self._by_group(products)
            for name in names
        ]
        wide, home = reduce(torch.promote_types, (p.dtype for p in parts)), parts[0].device
        return torch.stack([moved(part, home).to(wide) for part in parts]).sum()

    def _scale(self, update: Mapping[str, Tensor], factor: float | Tensor) -> None:
        for _, _, names in self._by_group(update):
            values = [update[name] for name in names]
            if isinstance(factor, Tensor):
                factor = moved(factor, values[0].device)
            torch._foreach_mul_(values, factor)

    def _fisher_norm(self, update: Mapping[str, Tensor]) -> Tensor:
        """ν = vᵀ F v + λ vᵀ v, with the exact F on the first examples of the last batch."""
        gathering = self.preconditioner.gathering
        call, examples = gathering.calls[-1]
        count = self._clip_examples(examples)
        part = first_examples(call, examples, count)
        try:
            norm = products_of_call(
                self.model, part, [update], gathering.likelihood, gathering.output
            )[0, 0]
        except ForwardModeError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"while clipping, running the model on the first {count} of {examples} examples "
                f"failed: {error}. Every tensor argument of that length was cut; if one of them "
                "is no batch, set clip_fraction=1, or fisher_clip=None"
            ) from error
        norm = norm * gathering.likelihood.growth(count, examples)
        norm = gathering.mean_over_ranks(norm, examples)
        for group, _, names in self._by_group(update):
            if group["weight_decay"]:
                squares = [update[name].square().sum() for name in names]
                norm = norm + float(group["weight_decay"]) * torch.stack(squares).sum()
        return norm

    def _clip_examples(self, examples: int) -> int:
        wanted = math.ceil(examples * self.clip_fraction)
        # Batch normalisation has no statistics of a single example.
        return min(examples, max(wanted, 2 if mixes_examples(self.model) else 1))

    @property
    def step_diagnostics(self) -> dict[str, Any]:
        """``fisher_norm`` ν when last evaluated, ``clip_factor`` of the last update,
        ``clip_evaluations`` of ν, ``clip_guards``: how often the estimate alone shortened an
        update. Reading it waits for the device.
        """
        clip = self._clip
        return {
            "fisher_norm": None if clip is None else clip.norm,
            "clip_factor": 1.0 if clip is None else clip.factor,
            "clip_evaluations": 0 if clip is None else clip.evaluations,
            "clip_guards": 0 if clip is None else clip.guards,
        }

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "clip": None if self._clip is None else self._clip.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        require_keys("optimizer state", state_dict, ("clip",))
        if state_dict["clip"] is not None:
            FisherClip.check_state(state_dict["clip"])
        super().load_state_dict(state_dict)
        if self._clip is not None and state_dict["clip"] is not None:
            self._clip.load_state_dict(state_dict["clip"])


def first_examples(call: ModelCall, examples: int, count: int) -> ModelCall:
    """The call with every tensor argument of that many examples cut down to the first few."""

    def cut(value: Any) -> Any:
        batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == examples
        return value[:count].detach() if batched else value

    return ModelCall(tree_map(cut, call.args), tree_map(cut, call.kwargs), call.autocast)
