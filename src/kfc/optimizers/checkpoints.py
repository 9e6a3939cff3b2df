"""State dicts of the optimizers: all of a state is checked before any of it is loaded."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch

from kfc._helpers import require_keys
from kfc.curvature.saved import in_entry
from kfc.layers import Plan
from kfc.optimizers.access import CurvatureAccess
from kfc.optimizers.adam import SQUARE, STEP
from kfc.optimizers.averaging import KEY as AVERAGE
from kfc.optimizers.saved import Part, check_groups, check_parts, check_shapes, shared_digest
from kfc.optimizers.versions import check_version, versioned

STATE_KEYS = ("state", "param_groups", "parameters", "parts", "curvature")


class Component(Protocol):
    """A part of a method with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that ``check_state()`` has accepted."""


class CheckpointedOptimizer(CurvatureAccess, torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose state dict contains its curvature."""

    #: The parts of a parameter's state with its shape, in its dtype and in float32 at least.
    _narrow_parts: ClassVar[tuple[str, ...]] = ()
    _wide_parts: ClassVar[tuple[str, ...]] = ()
    #: The components that every state has; the others depend on options.
    _required_components: ClassVar[tuple[str, ...]] = ()

    _names: dict[Any, str]
    _options: tuple[str, ...]
    # A checksum of the state that was loaded last.
    _loaded = 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume bit for bit; call it between steps.

        It can be loaded with ``torch.load(..., weights_only=True)``. Save the states of the model,
        of the scheduler and of the global random generators separately.
        """
        components = self._components().items()
        own = {
            **super().state_dict(),
            "parameters": self._parameter_shapes(),
            "parts": {self._names[p]: list(own) for p, own in self.state.items() if own},
            "curvature": self.engine.state_dict(),
            **{name: None if part is None else part.state_dict() for name, part in components},
        }
        return versioned(own)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, all of it or nothing.

        Raises:
            ValueError: an entry does not fit this optimizer, or is not usable; the message names
                it. Nothing has changed then.
        """
        check_version(state_dict)
        self._check_state(state_dict)
        super().load_state_dict(
            {"state": state_dict["state"], "param_groups": state_dict["param_groups"]}
        )
        self._restore_exactly(state_dict)
        self.engine.restore_state(state_dict["curvature"])
        for name, part in self._components().items():
            if part is not None and state_dict[name] is not None:
                part.load_state_dict(state_dict[name])
        if self.engine.reducer.size > 1:
            self._loaded = shared_digest(state_dict)

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if anything in a state dict cannot be loaded; change nothing."""
        components = self._components()
        require_keys("optimizer state", state_dict, (*STATE_KEYS, *components))
        check_shapes(state_dict["parameters"], self._parameter_shapes())
        check_groups(state_dict["param_groups"], self.param_groups, self._options)
        with in_entry("curvature"):
            self.engine.check_state(state_dict["curvature"])
        plan = self.engine.fallback.plan_without(state_dict["curvature"]["without_statistics"])
        check_parts(state_dict, lambda name, part: self._state_part(plan, name, part))
        for name, component in components.items():
            is_saved = state_dict[name] is not None or name in self._required_components
            if component is not None and is_saved:
                with in_entry(name):
                    component.check_state(state_dict[name])

    def _components(self) -> Mapping[str, Component | None]:
        """Return the parts of the method with a state of their own, by their key in the state."""
        return {}

    def _state_part(self, plan: Plan, name: str, part: str) -> Part | None:
        """Return what a part of a parameter's state has to be; ``None`` if there is no such part.

        Args:
            plan: the layers with curvature.
            name: the name of the parameter.
        """
        shape = self.engine.members[name].shape
        if part in self._narrow_parts:
            return Part(shape, is_wide=False)
        if part == STEP and SQUARE in self._wide_parts:
            return Part((), low=0, is_whole=True)
        low = 0.0 if part == SQUARE else -math.inf
        return Part(shape, low=low) if part in (AVERAGE, *self._wide_parts) else None

    def _parameter_shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for parameter, name in self._names.items()}

    def _restore_exactly(self, state_dict: Mapping[str, Any]) -> None:
        # torch casts the state to the parameters' dtype, but some parts are wider.
        plan = self.engine.fallback.plan_without(state_dict["curvature"]["without_statistics"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    part = self._state_part(plan, self._names[parameter], name)
                    assert part is not None
                    own = value.detach().to(parameter.device, part.dtype(parameter), copy=True)
                    self.state[parameter][name] = own
