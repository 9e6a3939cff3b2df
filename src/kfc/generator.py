"""A random generator of our own, so that the user's stays as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from kfc.checks import require_keys, require_whole


class OwnGenerator:
    """A seeded generator that is made on whatever device first asks for it.

    Its state can be saved as plain tensors and numbers. A state saved on another type of device
    cannot be carried over; the generator then starts again from its seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator: torch.Generator | None = None
        self._to_restore: tuple[str, torch.Tensor] | None = None

    def on(self, device: torch.device) -> torch.Generator:
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self.seed)
            if self._to_restore is not None and self._to_restore[0] == device.type:
                self._generator.set_state(self._to_restore[1])
            self._to_restore = None
        return self._generator

    def of_rank(self, rank: int, size: int, device: torch.device) -> torch.Generator:
        """This generator, or of several ranks, for each a new one of its own.

        The ranks' generators stay alike meanwhile, so that the state of one is the state of all,
        however many there are.
        """
        if size == 1:
            return self.on(device)
        number = torch.randint(2**62, (), generator=self.on(torch.device("cpu"))).item()
        digest = hashlib.sha256(f"{number} {rank}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def state_dict(self) -> dict[str, Any]:
        saved = self._to_restore
        if self._generator is not None:
            saved = self._generator.device.type, self._generator.get_state()
        device, state = (None, None) if saved is None else saved
        return {"seed": self.seed, "device": device, "state": state}

    def check_state(self, saved: object) -> None:
        """Raise ``ValueError`` if it is not what ``state_dict`` gives."""
        require_keys("generator state", saved, ("seed", "device", "state"))
        assert isinstance(saved, Mapping)
        require_whole("the generator's seed", saved["seed"], low=None)
        state = saved["state"]
        if state is not None and not isinstance(state, torch.Tensor):
            raise ValueError(f"the generator's state must be a tensor, got {type(state).__name__}")

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.seed = saved["seed"]
        self._generator = None
        self._to_restore = None
        if saved["state"] is not None:
            self._to_restore = saved["device"], saved["state"].to("cpu", torch.uint8, copy=True)
