"""The states of torch's global generators: what a model with dropout draws from."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def accelerators_of(model: nn.Module) -> list[torch.device]:
    """The devices of a model's parameters, other than the CPU."""
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    return [device for device in devices if device.type != "cpu"]


def get_random_state(accelerators: Collection[torch.device]) -> list[Tensor]:
    """Of the CPU's generator, then of the accelerators'."""
    states = [torch.get_rng_state()]
    for device in accelerators:
        if device.type == "mps":
            states.append(torch.mps.get_rng_state())
        else:
            states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_state(states: list[Tensor], accelerators: Collection[torch.device]) -> None:
    torch.set_rng_state(states[0])
    for state, device in zip(states[1:], accelerators, strict=True):
        if device.type == "mps":
            torch.mps.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def forked_random_state(accelerators: Collection[torch.device]) -> Iterator[None]:
    """Whatever is drawn inside, the generators go on afterwards from where they were."""
    states = get_random_state(accelerators)
    try:
        yield
    finally:
        set_random_state(states, accelerators)
