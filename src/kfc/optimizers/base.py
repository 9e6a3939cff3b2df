"""What the optimizers share: the curvature, param groups, averaging, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kfc.checks import moved, raise_differences, require_keys, require_number
from kfc.kronecker import Factors
from kfc.optimizers.averaging import has_average, swapped_in
from kfc.optimizers.groups import build_groups
from kfc.preconditioner import Preconditioner

STATE_KEYS = ("state", "param_groups", "parameters", "preconditioner")


class CurvatureOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` over all parameters of one model, and the model's curvature.

    Args:
        preconditioner: the curvature; closed if anything here fails.
        defaults, groups, fallback_lr: see :func:`kfc.optimizers.groups.build_groups`.
    """

    # GradScaler then leaves scaled gradients and overflows to step(), which has to know of both.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        preconditioner: Preconditioner,
        defaults: dict[str, Any],
        groups: Sequence[Mapping[str, Any]] | None,
        averaging_timescale: float | None,
        fallback_lr: float | None = None,
    ) -> None:
        try:
            if averaging_timescale is not None:
                require_number("averaging_timescale", averaging_timescale, positive=True)
            param_groups = build_groups(
                preconditioner.model, preconditioner.plan, groups, defaults, fallback_lr
            )
        except BaseException:
            preconditioner.close()
            raise
        self.preconditioner = preconditioner
        self.averaging_timescale = averaging_timescale
        self._options = tuple(defaults)
        self._averaging = False
        self._complete = False
        super().__init__(param_groups, defaults)
        self._complete = True
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}

    @property
    def model(self) -> nn.Module:
        return self.preconditioner.model

    # The curvature, as the user sees it

    @property
    def factors(self) -> dict[str, Factors]:
        """See :attr:`kfc.Preconditioner.factors`."""
        return self.preconditioner.factors

    @property
    def blocks(self) -> dict[str, Tensor]:
        """See :attr:`kfc.Preconditioner.blocks`."""
        return self.preconditioner.blocks

    @property
    def diagnostics(self) -> dict[str, Any]:
        """What the last steps did.

        ``step``, ``skipped_steps``; ``seconds`` by part, of the last time it was done, as the host
        sees them, and ``total_seconds`` of all times; ``periods``; ``layers``: pi, damping and
        factor traces by layer; and ``step_diagnostics``. Reading it waits for the device.
        """
        return {**self.preconditioner.diagnostics, **self.step_diagnostics}

    @property
    @abstractmethod
    def step_diagnostics(self) -> dict[str, Any]:
        """Numbers of the last step alone, cheap enough to read at every step."""

    def estimate_factors(
        self, batches: Iterable[Any], progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        """See :meth:`kfc.Preconditioner.estimate_factors`."""
        self.preconditioner.estimate_factors(batches, progress)

    def describe(self) -> str:
        """Print, and return, how every parameter is treated, and why."""
        return self.preconditioner.describe()

    def close(self) -> None:
        """Remove every hook from the model. The optimizer cannot step any more."""
        self.preconditioner.close()

    # Parameters and gradients

    def _trained(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _averaged(self) -> list[nn.Parameter]:
        """Parameters that have an average, or will; also those that were frozen since."""
        return [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad or has_average(parameter, self.state)
        ]

    def _by_group(
        self, names: Mapping[str, Tensor]
    ) -> Iterator[tuple[dict[str, Any], list[Tensor], list[str]]]:
        """(group, its parameters among the names, their names), one device at a time."""
        for group in self.param_groups:
            members = [p for p in group["params"] if self._names[p] in names]
            for device in dict.fromkeys(p.device for p in members):
                here = [p for p in members if p.device == device]
                yield group, here, [self._names[p] for p in here]

    def _with_weight_decay(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """∇h: the gradient of the loss plus λθ, in new tensors, of float32 at least."""
        result: dict[str, Tensor] = {}
        for group, parameters, names in self._by_group(gradients):
            values = [wide(gradients[name]) for name in names]
            if group["weight_decay"]:
                current = [wide(parameter) for parameter in parameters]
                new = torch._foreach_add(values, current, alpha=float(group["weight_decay"]))
            else:
                new = torch._foreach_mul(values, 1.0)
            result.update(zip(names, new, strict=True))
        return result

    def _unscale(self) -> tuple[float | Tensor, Tensor | None]:
        """What ``torch.amp.GradScaler`` multiplied the loss by, and whether it overflowed.

        The gradients are divided by it, unless the user has had that done already.
        """
        overflowed = getattr(self, "found_inf", None)
        if overflowed is None:
            return 1.0, None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            gradients = self.preconditioner.gradients()
            for _, _, names in self._by_group(gradients):
                values = [gradients[name] for name in names]
                torch._foreach_div_(values, moved(scale, values[0].device))
            return scale, overflowed > 0
        if self.preconditioner.gathering.fisher == "empirical":
            raise RuntimeError(
                'fisher="empirical" has to know the loss scale, which GradScaler.unscale_() hides; '
                'do not call it, or use fisher="sampled"'
            )
        return 1.0, overflowed > 0

    # Averaged parameters

    @contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Let the model hold the averaged parameters, for evaluation; may be nested."""
        if self.averaging_timescale is None:
            raise RuntimeError(
                "no averages are kept: pass averaging_timescale=, for instance the number of "
                "mini-batches in the data set"
            )
        if self._averaging:
            yield
            return
        self._averaging = True
        try:
            with swapped_in(self._averaged(), self.state):
                yield
        finally:
            self._averaging = False

    # torch.optim.Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: parameters belong to layers, which are found when the optimizer is made."""
        if self._complete:
            raise RuntimeError(
                f"{type(self).__name__} covers all parameters of its model already: set options "
                "with groups=, or change optimizer.param_groups; for new layers make a new one"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} hangs on its model's hooks and cannot be copied or pickled; "
            "save its state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on bit for bit; call it between steps.

        Loadable with ``torch.load(..., weights_only=True)``. The model's own state dict and, if
        you use them, the scheduler's and the global random state are saved separately.
        """
        return {
            **super().state_dict(),
            "parameters": self._parameter_shapes(),
            "preconditioner": self.preconditioner.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state dict; one that does not fit changes nothing."""
        self._check_state(state_dict)
        self.preconditioner.check_state(state_dict["preconditioner"])
        super().load_state_dict(
            {"state": state_dict["state"], "param_groups": state_dict["param_groups"]}
        )
        self._restore_exactly(state_dict)
        self.preconditioner.load_state_dict(state_dict["preconditioner"])

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        require_keys("optimizer state", state_dict, STATE_KEYS)
        raise_differences("parameters", state_dict["parameters"], self._parameter_shapes())
        for group in state_dict["param_groups"]:
            require_keys("param group", group, ("params", "param_names", *self._options))
        saved, own = (
            {f"group {i}": list(group["param_names"]) for i, group in enumerate(groups)}
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        raise_differences("param groups", saved, own)
        found, expected = {}, {}
        for group in state_dict["param_groups"]:
            for key, name in zip(group["params"], group["param_names"], strict=True):
                for part, value in state_dict["state"].get(key, {}).items():
                    found[f"{name}: {part}"] = list(value.shape)
                    expected[f"{name}: {part}"] = state_dict["parameters"][name]
        raise_differences("momentum and averages", found, expected)

    def _parameter_shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for parameter, name in self._names.items()}

    def _restore_exactly(self, state_dict: Mapping[str, Any]) -> None:
        # torch casts state to the parameters' dtype; averages may be wider.
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def wide(tensor: Tensor) -> Tensor:
    """A natural gradient may leave half precision's range before the learning rate is applied."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
