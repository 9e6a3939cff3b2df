"""What the optimizers share: param groups, averaged parameters, checkpoints."""

import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from kfc._helpers import (
    at_least_float32,
    moved,
    require_number,
    scaler_of,
)
from kfc.fisher.compiled import outside_of_compiled_graphs
from kfc.optimizers.attempts import Attempt
from kfc.optimizers.averaging import (
    averages_of,
    has_average,
    start_averages_,
    swapped_in,
    update_averages_,
)
from kfc.optimizers.checkpoints import CheckpointedOptimizer
from kfc.optimizers.engine import Engine
from kfc.optimizers.groups import PLAIN, SCALED, TREATMENT, build_groups
from kfc.optimizers.scaling import GradientScales, Scaled

# A param group, some of its parameters, and their names.
Members = tuple[dict[str, Any], list[Tensor], list[str]]


class CurvatureOptimizer(CheckpointedOptimizer):
    """A ``torch.optim.Optimizer`` over all parameters of one model, with its curvature.

    Args:
        engine: the curvature; closed if anything here fails.
        defaults, groups, fallback_lr, of_weight: see ``kfc.optimizers.groups.build_groups``.
        averaging_timescale: τ of the averaged parameters; ``None``: none are kept.
    """

    #: The treatment of parameters without a Fisher block.
    fallback: ClassVar[str] = PLAIN

    def __init__(
        self,
        engine: Engine,
        defaults: dict[str, Any],
        groups: Sequence[Mapping[str, Any]] | None,
        averaging_timescale: float | None = None,
        fallback_lr: float | None = None,
        of_weight: Sequence[str] = (),
    ) -> None:
        try:
            if averaging_timescale is not None:
                require_number("averaging_timescale", averaging_timescale, positive=True)
            param_groups = build_groups(
                engine.model, engine.plan, groups, defaults, fallback_lr, of_weight, self.fallback
            )
        except BaseException:
            engine.close()
            raise
        self.engine = engine
        self.averaging_timescale = averaging_timescale
        self._options = tuple(defaults)
        self._averaging = False
        self._gradient_scales = GradientScales()
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        # The names that ``_by_group()`` was last called with in this step, and what it returned.
        self._members: tuple[set[str], list[Members]] | None = None
        self._complete = False
        super().__init__(param_groups, defaults)
        self._complete = True
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        engine.members.listen(self._replace)

    def _compare_ranks(self, **options: object) -> None:
        """Raise an error on all ranks if they differ in their models or options, now or later."""
        me = weakref.ref(self)
        fixed = {"optimizer": type(self).__name__, "averaging_timescale": self.averaging_timescale}

        def current() -> dict[str, str]:
            optimizer = me()
            return {} if optimizer is None else optimizer._current_options()

        try:
            self.engine.compare_ranks({**fixed, **options}, current)
        except BaseException:
            self.engine.close()
            raise

    def _current_options(self) -> dict[str, str]:
        """Return the options of param groups, and a checksum of the state that was loaded."""
        found = {"the checksum of the state that was loaded": str(self._loaded)}
        for index, group in enumerate(self.param_groups):
            values = (f"{option}={group[option]}" for option in self._options)
            found[f"param group {index}"] = ", ".join(values)
        return found

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Train a new parameter instead of an old one, whose state is dropped."""
        for group in self.param_groups:
            group["params"] = [
                new if parameter is old else parameter for parameter in group["params"]
            ]
        self.state.pop(old, None)
        self._names = {new if each is old else each: name for each, name in self._names.items()}

    @property
    def diagnostics(self) -> dict[str, Any]:
        """A dict of numbers about the last steps.

        It has the entries of ``kfc.Preconditioner.diagnostics`` and ``step_diagnostics``.
        """
        return {**super().diagnostics, **self.step_diagnostics}

    @property
    @abstractmethod
    def step_diagnostics(self) -> dict[str, Any]:
        """Numbers about the last step, cheap enough to read in every step."""

    def _treatments_without_block(self) -> dict[str, str]:
        found = super()._treatments_without_block()
        members = self._find_members(found) if self.fallback == SCALED else ()
        return found | {n: f"{group[TREATMENT]} gradient" for group, _, ns in members for n in ns}

    # Steps

    @torch.no_grad()
    @outside_of_compiled_graphs(callees=True)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once.

        If an error is raised, also by the closure, the next steps are as if this one had not been
        tried. Buffers are as before the first forward pass since the last step; the gradients and
        the global random generators are not.

        Args:
            closure: clears the gradients, computes the loss, calls ``backward()`` and returns the
                loss, as for ``torch.optim.SGD``.
        """
        self._begin_step()
        if closure is None:
            self._require_batch()
        with Attempt(self.engine):
            loss = self._loss_of(closure)
            if closure is not None:
                self._require_batch()
            self._make_step(loss)
            return loss

    def _require_batch(self) -> None:
        """Raise an error on all ranks if a step needs a forward pass, and there was none."""

    def _make_step(self, loss: Any) -> None:
        """Update the parameters after a backward pass.

        Args:
            loss: what the closure of the step returned; ``None`` without one.
        """
        raise NotImplementedError

    # Parameters and gradients

    def _loss_of(self, closure: Callable[[], Any] | None) -> Any:
        """Return what the closure of a step returns; ``None`` without one."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _scale_(self, update: Mapping[str, Tensor], factor: float | Tensor) -> None:
        """Multiply the update by a number or by a scalar on the device, in place."""
        if not isinstance(factor, Tensor) and factor == 1:
            return
        for _, _, names in self._by_group(update):
            values = [update[name] for name in names]
            if isinstance(factor, Tensor):
                factor = moved(factor, values[0].device)
            torch._foreach_mul_(values, factor)

    def _averaged(self) -> list[nn.Parameter]:
        """Return the parameters that have an average or will have one, also if now frozen."""
        return [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad or has_average(parameter, self.state)
        ]

    def _by_group(self, names: Mapping[str, Any]) -> list[Members]:
        """Return (group, its parameters among the names, their names), one device at a time."""
        if self._members is None or self._members[0] != names.keys():
            self._members = set(names), list(self._find_members(names))
        return self._members[1]

    def _find_members(self, names: Mapping[str, Any]) -> Iterator[Members]:
        for group in self.param_groups:
            pairs = zip(group["params"], group["param_names"], strict=True)
            members = [(parameter, name) for parameter, name in pairs if name in names]
            for options, some in self._without_fallen(group, members):
                for device in dict.fromkeys(parameter.device for parameter, _ in some):
                    here = [pair for pair in some if pair[0].device == device]
                    yield options, [parameter for parameter, _ in here], [name for _, name in here]

    def _without_fallen(
        self, group: dict[str, Any], members: list[tuple[Tensor, str]]
    ) -> list[tuple[dict[str, Any], list[tuple[Tensor, str]]]]:
        """Return a group in parts: with curvature, without, and without in this step only.

        A new group would not fit the schedulers of the learning rate. In the last part, weights may
        have had no gradient yet: they do not decay, because nothing could tell how far.
        """
        fallen = self.engine.fallback.parameters
        if not fallen:
            return [(group, members)]
        for_now = self.engine.fallback.parameters_for_now()
        lr = {"lr": float(group["lr"]) * group["fallback_factor"]} if "lr" in group else {}
        without = {**group, **lr, TREATMENT: self.fallback}
        return [
            (group, [pair for pair in members if pair[1] not in fallen]),
            (without, [pair for pair in members if pair[1] in fallen - for_now]),
            ({**without, "weight_decay": 0.0}, [pair for pair in members if pair[1] in for_now]),
        ]

    def _add_weight_decay(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ∇h, the gradient of the loss plus λθ, in float32 at least.

        Natural gradients may overflow half precision. Without weight decay, the tensors are the
        gradients themselves.
        """
        result: dict[str, Tensor] = {}
        for group, parameters, names in self._by_group(gradients):
            values = [at_least_float32(gradients[name]) for name in names]
            if group["weight_decay"]:
                current = [at_least_float32(parameter) for parameter in parameters]
                decay = float(group["weight_decay"])
                values = list(torch._foreach_add(values, current, alpha=decay))
            result.update(zip(names, values, strict=True))
        return result

    def _in_doubt_on(self, device: torch.device) -> Tensor | None:
        """Return whether the step in progress is bad; ``None`` if it is known to be good."""
        return None if self.engine.in_doubt is None else moved(self.engine.in_doubt, device)

    def _diagonals(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the diagonal block of every parameter with a scaled gradient, by name."""
        scaled = [
            Scaled(name, parameter, self.state[parameter], group["momentum"], group["weight_decay"])
            for group, parameters, names in self._by_group(gradients)
            if group[TREATMENT] == SCALED
            for name, parameter in zip(names, parameters, strict=True)
        ]
        return self._gradient_scales.diagonals(gradients, scaled)

    def _times_learning_rate_(self, directions: Mapping[str, Tensor]) -> None:
        """Multiply directions by -α, in place."""
        for group, _, names in self._by_group(directions):
            torch._foreach_mul_([directions[name] for name in names], -float(group["lr"]))

    def _unscale_(self) -> tuple[float | Tensor, Tensor | None]:
        """Return the loss scale of ``torch.amp.GradScaler``, and whether it overflowed.

        The gradients are divided by the scale, unless the user has done that already.
        """
        overflowed = getattr(self, "found_inf", None)
        if overflowed is None:
            return 1.0, None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            gradients = self.engine.gradients()
            for _, _, names in self._by_group(gradients):
                values = [gradients[name] for name in names]
                torch._foreach_div_(values, moved(scale, values[0].device))
            return scale, overflowed > 0
        return self._hidden_scale(), overflowed > 0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step()`` takes scaled gradients and overflows from ``torch.amp.GradScaler``.

        Lightning also reads this, and does not clip the gradients of optimizers that do. Ours may
        be unscaled and clipped before ``step()``, so that it gets another answer than torch.
        """
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return caller.split(".")[0] == "torch"

    def _hidden_scale(self) -> float:
        """Return the loss scale of a scaler that has unscaled the gradients already."""
        scaler = None if self._scaler is None else self._scaler()
        scaler = scaler_of(self) if scaler is None else scaler
        if scaler is None:
            raise RuntimeError(
                "the curvature needs the loss scale, which GradScaler.unscale_() hides; do not "
                "call unscale_() before step()"
            )
        self._scaler = weakref.ref(scaler)
        return float(scaler.get_scale())

    @outside_of_compiled_graphs(callees=True)
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, and forget the statistics of the backward passes they came from."""
        super().zero_grad(set_to_none)
        self.engine.collector.drop_backward()

    # Averaged parameters

    @contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Return a context with averaged parameters, for evaluation; contexts may be nested.

        These are the averages of ``averaging_timescale``; in ``kfc.WhitenedAdam``, the running
        average that is a part of the method. Save checkpoints outside of the context.
        """
        if self._averaging:
            yield
            return
        averages = self._averages()
        self._averaging = True
        try:
            with swapped_in(averages):
                yield
        finally:
            self._averaging = False

    def _averages(self) -> dict[Tensor, Tensor]:
        """Return the averages of the parameters."""
        if self.averaging_timescale is None:
            raise RuntimeError(
                "no averages are kept; pass averaging_timescale=, for instance the number of "
                "mini-batches in the data set"
            )
        return averages_of(self._averaged(), self.state)

    def _begin_step(self) -> None:
        self._members = None  # param groups and devices may have changed since the last step
        if self._averaging:
            raise RuntimeError("step() inside averaged_parameters() would change the averages")

    def _start_averages(self) -> None:
        if self.averaging_timescale is not None:
            start_averages_(self._averaged(), self.state)

    def _update_averages(self, bad: Tensor | None) -> None:
        """Update θ̄ ← ζ θ̄ + (1 - ζ) θ, unless a boolean scalar says that the step was bad."""
        if self.averaging_timescale is not None:
            with self.engine.schedule.timed("update", continued=True):
                update_averages_(self._averaged(), self.state, self.averaging_timescale, bad)

    # torch.optim.Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error: all layers and parameters are found at construction."""
        if self._complete:
            raise RuntimeError(
                f"{type(self).__name__} covers all parameters of its model already; set options "
                "with groups= or in optimizer.param_groups, and make a new optimizer for new "
                "layers"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} depends on hooks of its model and cannot be copied or pickled; "
            "save its state_dict()"
        )
