"""Save and restore the states of torch's global generators, from which dropout draws."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def accelerators_of(model: nn.Module) -> list[torch.device]:
    """Return the devices of a model's parameters, other than the CPU."""
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    return [device for device in devices if device.type != "cpu"]


def get_random_state(accelerators: Collection[torch.device]) -> list[Tensor]:
    """Return the state of the CPU's generator, then that of each accelerator's."""
    states = [torch.get_device_module(device).get_rng_state(device) for device in accelerators]
    return [torch.get_rng_state(), *states]


def set_random_state(states: list[Tensor], accelerators: Collection[torch.device]) -> None:
    """Restore what :func:`get_random_state` returned for the same accelerators."""
    torch.set_rng_state(states[0])
    for state, device in zip(states[1:], accelerators, strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def forked_random_state(
    accelerators: Collection[torch.device], start: list[Tensor] | None = None
) -> Iterator[None]:
    """Restore the generators on exit, whatever is drawn inside; begin with ``start`` if given."""
    states = get_random_state(accelerators)
    try:
        if start is not None:
            set_random_state(start, accelerators)
        yield
    finally:
        set_random_state(states, accelerators)
