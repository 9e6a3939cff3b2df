"""A random generator that leaves the user's generators alone."""

from collections.abc import Mapping
from typing import Any

import torch

from kfc._helpers import require_keys, require_whole, shown
from kfc.curvature.saved import require_tensor


class OwnGenerator:
    """A seeded generator, created on the device that first uses it.

    Its state is saved as plain tensors and numbers. A state saved on another type of device cannot
    be restored; the generator then starts again from its seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator: torch.Generator | None = None
        self._to_restore: tuple[str, torch.Tensor] | None = None

    def on(self, device: torch.device) -> torch.Generator:
        """Return the generator on a device."""
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self.seed)
            if self._to_restore is not None and self._to_restore[0] == device.type:
                self._generator.set_state(self._to_restore[1])
            self._to_restore = None
        return self._generator

    def snapshot(self) -> tuple[Any, ...]:
        """Return the state, to be passed to ``restore()``."""
        generator = self._generator
        state = None if generator is None else generator.get_state()
        return generator, state, self._to_restore

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Return to an earlier state."""
        self._generator, state, self._to_restore = snapshot
        if self._generator is not None:
            self._generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        saved = self._to_restore
        if self._generator is not None:
            saved = self._generator.device.type, self._generator.get_state()
        device, state = (None, None) if saved is None else saved
        return {"seed": self.seed, "device": device, "state": state}

    def check_state(self, saved: object) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        require_keys("generator state", saved, ("seed", "device", "state"))
        assert isinstance(saved, Mapping)
        seed, device, state = saved["seed"], saved["device"], saved["state"]
        require_whole("the generator's seed", seed, low=None)
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"the generator's seed must have at most 64 bits, got {seed}")
        if device is None and state is None:
            return
        if not isinstance(device, str) or not device.isidentifier():
            raise ValueError(f"the generator's device must be a name, got {shown(device)}")
        require_tensor("the generator's state", state, dtypes=(torch.uint8,))
        try:
            if device == "cpu":
                torch.Generator().set_state(state.cpu())
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"the generator's state is none of a generator: {reason}") from error

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.seed = saved["seed"]
        self._generator = None
        self._to_restore = None
        if saved["state"] is not None:
            self._to_restore = saved["device"], saved["state"].to("cpu", copy=True)
