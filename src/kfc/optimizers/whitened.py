"""Schedule-free Adam in coordinates in which the inputs of every layer are white."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import at_least_float32, moved, require_number, require_whole
from kfc.curvature.damping import Damping
from kfc.curvature.options import Whitening
from kfc.distributed.options import Parallel
from kfc.fisher.heads import LikelihoodChoice, Output
from kfc.layers import MatrixLayer, Plan
from kfc.optimizers.adam import SQUARE, STEP, normalise_
from kfc.optimizers.base import CurvatureOptimizer
from kfc.optimizers.bound import Excess, LossBound, excess_loss, sum_of_products
from kfc.optimizers.checkpoints import Component
from kfc.optimizers.costs import Costs
from kfc.optimizers.engine import Engine
from kfc.optimizers.groups import require_hyper_parameters
from kfc.optimizers.rotation import BASIS, GRAM, OutputRotation
from kfc.optimizers.saved import Part
from kfc.optimizers.schedule_free import FAST, WIDE, ScheduleFree
from kfc.schedule import Budget, Periods, Stretch

Vector = dict[str, Tensor]

WHITENING = Whitening()
# Ω changes slowly: longer periods than those of Algorithm 1 lose nothing.
PERIODS = Periods(Stretch(64, pace=1, doubling=True), Stretch(64, pace=1, doubling=True))


class WhitenedAdam(CurvatureOptimizer):
    """Schedule-free Adam in input-whitened coordinates, as a drop-in optimizer.

    The gradient G of a linear or convolutional layer is multiplied by L⁻ᵀ, where L Lᵀ = Ω + δ I is
    the Cholesky decomposition of the damped second moment of the layer's inputs (of its patches,
    with a 1 for the bias); in wide layers, without the correlations between blocks of inputs. The
    result is divided by the root of its second moments, as in Adam, in the eigenbasis of the
    layer's outputs. This step is multiplied by L⁻¹ and scaled to the norm that it had before. Ω
    comes from forward passes alone. All other parameters are updated by Adam in their own
    coordinates.

    Schedule-free averaging takes the place of momentum and of a falling learning rate: the
    parameters stay close to a running average of the points that the steps lead to. The learning
    rate rises over the first 20 steps. The loss bound shortens steps that would change the loss too
    much, and lengthens steps that would change it little. The parameters can be evaluated as they
    are; ``averaged_parameters()`` gives the running average itself, which is usually a little
    better. It follows from the parameters, the last step and β₁, so neither of them must be changed
    between the step and the evaluation. Groups with β₁ = 0 have no average.

    Examples:
        >>> optimizer = kfc.WhitenedAdam(model)
        >>> for images, labels in loader:
        ...     optimizer.zero_grad()
        ...     F.cross_entropy(model(images), labels).backward()
        ...     optimizer.step()

    Args:
        model: the network; its layers are found by type (see ``describe()``).
        lr: the learning rate. As in Adam, the entries of a step have a size of about ``lr``, before
            the loss bound changes the length of the step.
        betas: β₁, the weight of the running average in the parameters, and β₂, the weight of the
            old value in the moving average of squared gradients.
        eps: ε, added to the root of the second moments.
        weight_decay: λ, decoupled as in ``torch.optim.AdamW``: every step adds -lr λ θ.
        damping: δ as a fraction of Ω's mean eigenvalue. A layer has the damping, the β₂ and the
            eps of its weight's group; groups of its bias must have the same values.
        groups: as in ``kfc.KFC``.
        likelihood: the distribution that the outputs parametrise, as in ``kfc.KFC``. The loss bound
            and the choice of rotated layers depend on it. If the loss fits none, the last layer is
            treated as for a squared error.
        output: selects the tensor of outputs from what the model returns, if that is not a tensor.
            Its first dimension is that of the examples.
        loss_bound: κ. Let E be the excess, the loss on the batch minus the least it could be. A
            step that would at once change the loss by more than κE, to first order, is shortened to
            κE; one that would change it by less than κE/2 is lengthened to that, at most threefold.
            If E is exact and its running mean falls by more than 4% per step, κ is increased, at
            most twofold.
            Batches with an excess of more than twice the running mean count less. If the loss fits
            no likelihood, E is unknown and steps keep their length, except that the loss that a
            closure returns still limits them. ``None``: steps are neither shortened nor lengthened.
        rotation_period: the number of steps between refreshes of the eigenbases of the outputs;
            ``None``: second moments are kept in whitened coordinates, without a rotation. A layer
            whose output is an output of the model is not rotated if the likelihood treats its
            elements independently, as Bernoulli and Gaussian do.
        whitening: how Ω is averaged, and the size of its blocks in wide layers: ``kfc.Whitening``.
        schedule: when Ω and its root are refreshed: ``kfc.Periods`` or ``kfc.Budget``.
        parallel: how ranks divide the work, and asynchronous roots: ``kfc.Parallel``.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.015,
        *,
        betas: tuple[float, float] = (0.8, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.02,
        damping: float = 0.3,
        groups: Sequence[Mapping[str, Any]] | None = None,
        likelihood: LikelihoodChoice = "auto",
        output: Output | None = None,
        loss_bound: float | None = 0.4,
        rotation_period: int | None = 10,
        whitening: Whitening = WHITENING,
        schedule: Periods | Budget = PERIODS,
        parallel: Parallel | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "damping": damping,
        }
        require_hyper_parameters(defaults)
        if not isinstance(whitening, Whitening):
            raise TypeError(f"whitening must be kfc.Whitening, got {whitening!r}")
        if rotation_period is not None:
            require_whole("rotation_period", rotation_period)
        if loss_bound is not None:
            require_number("loss_bound", loss_bound, positive=True)
        elif likelihood != "auto" and rotation_period is None:
            raise ValueError(
                "likelihood has no effect without a loss_bound and a rotation_period; remove it"
            )
        engine = Engine(
            model,
            likelihood=likelihood,
            output=output,
            strict=False,
            seed=None,
            curvature=whitening,
            schedule=schedule,
            parallel=parallel,
            groups=groups,
        )
        of_weight = ("damping", "betas", "eps")
        super().__init__(engine, defaults, groups, of_weight=of_weight)
        self._bound = None if loss_bound is None else LossBound(loss_bound)
        self._iterates = ScheduleFree()
        self._rotation = None
        if rotation_period is not None:
            self._rotation = OutputRotation(engine.plan, rotation_period, whitening.max_factor_size)
        self._compare_ranks(
            likelihood=likelihood, loss_bound=loss_bound, rotation_period=rotation_period
        )

    def _make_step(self, loss: Any) -> None:
        loss_scale, overflow = self._unscale_()
        gradients = self.engine.gradients()
        batch = self.engine.begin_step(gradients, loss_scale, overflow)
        if batch is None:
            return

        self.engine.update_(batch)  # T_s: moving average of Ω
        self.engine.refresh_inverses(self._layer_damping)  # T_f: L⁻¹ of Ω + δ I = L Lᵀ
        with self.engine.schedule.timed("natural gradient"), self.engine.full_precision():
            excess = self._excess(loss)  # E of the loss, and ω = min(1, 2Ē/E)
            white = self._whitened(gradients)  # G' = G L⁻ᵀ
            self._weight_outliers_(white, excess)  # G' ← ω G'
            steps = self._adam_steps_(white)  # Δ' = G' / (√v̂ + ε), with the second moments of G'
            update = self._mapped_back(steps, gradients)  # Δ = Δ' L⁻¹, norm of Δ'
            self._times_learning_rate_(update)  # v = -lr Δ
            self._resize_(update, gradients, excess)  # s |∇ᵀv| / min(E, 2Ē) towards [κ/2, κ]
        with self.engine.schedule.timed("update"):
            self._move_(update, self.engine.in_doubt)  # z ← z + v - lr λ θ; θ = β₁ x + (1 - β₁) z
        self.engine.end_step()

    def _layer_damping(self, layer: str) -> Damping:
        """Return the damping of a layer, as a fraction of Ω's mean eigenvalue."""
        weight = self.engine.plan.layers[layer].weight
        group = next(g for g in self.param_groups if any(p is weight for p in g["params"]))
        return Damping.uniform(float(group["damping"]))

    def _whitened(self, gradients: Vector) -> Vector:
        """Return the whitened gradients of layers, and copies of the gradients of the others.

        The matrix (groups, I, n) of a layer has the name of its weight, or of its bias if only that
        is trained. A trained parameter without a gradient counts as one with a gradient of zero.
        """
        by_layer: dict[str, dict[str, Tensor]] = {}
        result: Vector = {}
        for name, gradient in gradients.items():
            layer, role = self.engine.plan.layer_of.get(name, (None, ""))
            if layer is None:
                result[name] = _copied(gradient)
            else:
                by_layer.setdefault(layer, {})[role] = gradient
        keys, matrices = {}, {}
        for layer, parts in by_layer.items():
            geometry = self._geometry(layer)
            for role, parameter in geometry.trained().items():
                keys[layer] = self._names[parameter]  # the weight comes last
                if role not in parts:
                    parts[role] = torch.zeros_like(parameter)
            matrices[layer] = geometry.to_matrix(parts).to(geometry.dtype)
        white = self.engine.curvature.whiten(matrices)
        return result | {keys[layer]: matrix for layer, matrix in white.items()}

    def _geometry(self, layer: str) -> MatrixLayer:
        geometry = self.engine.plan.layers[layer]
        assert isinstance(geometry, MatrixLayer)
        return geometry

    def _adam_steps_(self, gradients: Vector) -> Vector:
        """Return normalised steps Δ' from whitened gradients G', and update the second moments.

        The moments are those of Uᵀ G'. They are not transformed when U or L is refreshed. The
        gradients are overwritten.
        """
        rotation, engine = self._rotation, self.engine
        states_by_name = {name: self.state[self.engine.members[name]] for name in gradients}
        if rotation is not None:
            rotation.exclude_(engine.collector.losses, engine.reducer)
            rotation.forget_(states_by_name, engine.fallback.parameters)
            rotation.update_(gradients, states_by_name, engine.steps + 1, engine.in_doubt)
            gradients = rotation.rotated(gradients, states_by_name)
        steps: Vector = {}
        for group, names, states, bad in self._states_by_group(gradients):
            values = [gradients[name] for name in names]
            normalise_(values, states, float(group["betas"][1]), float(group["eps"]), bad)
            steps.update(zip(names, values, strict=True))
        return steps if rotation is None else rotation.rotated_back(steps, states_by_name)

    def _states_by_group(
        self, vectors: Vector
    ) -> Iterator[tuple[dict[str, Any], list[str], list[dict[str, Any]], Tensor | None]]:
        """Yield (group, names, states, bad) with the flag of a bad step on the same device."""
        bad = self.engine.in_doubt
        for group, parameters, names in self._by_group(vectors):
            here = None if bad is None else moved(bad, parameters[0].device)
            yield group, names, [self.state[parameter] for parameter in parameters], here

    def _mapped_back(self, steps: Vector, gradients: Vector) -> Vector:
        """Return steps in the coordinates of the network, with the same norm for each layer.

        Args:
            gradients: by the names of the parameters that get a step.
        """
        layer_of = self.engine.plan.layer_of
        result = {name: step for name, step in steps.items() if name not in layer_of}
        white = {layer_of[name][0]: step for name, step in steps.items() if name in layer_of}
        mapped = self.engine.curvature.unwhiten(white)
        kinds = {layer: (matrix.device, matrix.dtype) for layer, matrix in mapped.items()}
        for kind in set(kinds.values()):
            here = [layer for layer in mapped if kinds[layer] == kind]
            before, after = (
                torch.stack(torch._foreach_norm([steps[layer] for layer in here]))
                for steps in (white, mapped)
            )
            ratios = torch.where(after > 0, before / after, 1)
            torch._foreach_mul_([mapped[layer] for layer in here], list(ratios.unbind()))
        parts = {layer: self._geometry(layer).from_matrix(m) for layer, m in mapped.items()}
        for name in gradients:
            if name in layer_of:
                layer, role = layer_of[name]
                result[name] = parts[layer][role]
        return result

    def _excess(self, loss: Any) -> Excess | None:
        """Return the excess E of the loss, and E limited to twice its running mean Ē.

        Args:
            loss: what the closure returned, if there is one.
        """
        if self._bound is None:
            return None
        excess, is_exact = excess_loss(self.engine), None
        if isinstance(loss, Tensor):
            is_exact = torch.isfinite(excess)
            excess = excess_loss(self.engine, loss)
        if not self.engine.is_asynchronous:
            self.engine.divergence.see(excess.item())
        usual = self._bound.without_outliers(excess, self.engine.in_doubt, is_exact)
        return Excess(excess, usual, is_exact)

    def _weight_outliers_(self, gradients: Vector, excess: Excess | None) -> None:
        """Multiply the whitened gradients of an outlier by 2Ē/E, in place."""
        if excess is not None:
            is_outlier = excess.value > excess.usual
            factor = torch.where(is_outlier, excess.usual / excess.value, 1.0)
            self._scale_(gradients, factor)

    def _resize_(self, update: Vector, gradients: Vector, excess: Excess | None) -> None:
        """Multiply the update v by the warm-up factor and by that of the loss bound.

        The bound holds for the change of the parameters that v makes at once: its share
        s = 1 - β₁ + β₁c. A step is lengthened at most threefold.
        """
        iterates, device = self._iterates, self.engine.device
        factor = iterates.warm_up(device)
        if self._bound is not None and excess is not None and update:
            slope = torch.zeros_like(excess.usual)
            for group, _, names in self._by_group(update):
                values = [update[name] for name in names]
                own = sum_of_products([gradients[name] for name in names], values)
                share = iterates.share_at_once(float(group["betas"][0]), device)
                slope = slope + share * moved(own, slope.device)
            factor = factor * self._bound.resize((factor * slope).abs(), excess)
        self._scale_(update, factor)

    def _move_(self, update: Vector, bad: Tensor | None) -> None:
        """Add the update, and weight decay, to z, and move the parameters.

        Args:
            bad: a boolean scalar; if true, the parameters stay as they are. ``None``: the step is
                known to be good.
        """
        for group, parameters, names in self._by_group(update):
            steps = [update[name] for name in names]
            here = None if bad is None else moved(bad, steps[0].device)
            if group["weight_decay"]:
                decay = float(group["lr"]) * float(group["weight_decay"])
                torch._foreach_add_(steps, parameters, alpha=-decay)
            states = [self.state[parameter] for parameter in parameters]
            self._iterates.move_(parameters, states, steps, float(group["betas"][0]), here)
        self._iterates.count_(bad)

    # What users see

    def _averages(self) -> dict[Tensor, Tensor]:
        """Return x of every parameter that was updated; it is unknown if β₁ = 0."""
        found: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            beta = float(group["betas"][0])
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                if beta and FAST in state:
                    found[parameter] = self._iterates.average(parameter, state, beta)
        return found

    def _notes(self, expected: Costs | None) -> list[str]:
        rotation = [] if self._rotation is None else [self._rotation.describe()]
        return [*rotation, self.engine.collector.losses.describe()]

    def _state_part(self, plan: Plan, name: str, part: str) -> Part | None:
        shape: Sequence[int] = self.engine.members[name].shape
        if part == STEP:
            return Part((), low=0, is_whole=True)
        low = 0.0 if part == SQUARE else -math.inf
        if name not in plan.layer_of or part not in (SQUARE, GRAM, BASIS):
            return Part(shape, low=low) if part in (SQUARE, FAST, WIDE) else None
        layer = plan.layers[plan.layer_of[name][0]]
        assert isinstance(layer, MatrixLayer)
        matrix = layer.weight_to_matrix(torch.empty(layer.weight.shape, device="meta"))
        groups, rows, columns = matrix.shape
        if part != SQUARE:
            return Part((groups, rows, rows), is_symmetric=part == GRAM)
        # Of weight and bias, or of the one that was trained
        both, *others = [(groups, rows, size) for size in (columns + 1, columns, 1)]
        return Part(both, low=low, other_shapes=others)

    @property
    def step_diagnostics(self) -> dict[str, Any]:
        """A dict of numbers about the loss bound; reading it waits for the device.

        ``loss_bound_factor`` of the last step, above 1 if the step was lengthened, and
        ``loss_bounds``, how often the bound shortened a step.
        """
        if self._bound is None:
            return {}
        numbers = self._bound.diagnostics()
        return {name: numbers[name] for name in ("loss_bound_factor", "loss_bounds")}

    # Checkpoints

    _required_components = ("iterates",)

    def _components(self) -> Mapping[str, Component | None]:
        return {
            "loss_bound": self._bound,
            "iterates": self._iterates,
            "rotation": self._rotation,
        }


def _copied(gradient: Tensor) -> Tensor:
    """Return a copy in float32 at least, for products and moments."""
    wide = at_least_float32(gradient)
    return wide.clone() if wide is gradient else wide
