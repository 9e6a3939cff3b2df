"""Recorded forward passes of a model, to run them again without effect on the model."""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_thread = threading.local()


@contextmanager
def suspended() -> Iterator[None]:
    """Let models run in this thread without their hooks recording anything."""
    depth = getattr(_thread, "suspended", 0)
    _thread.suspended = depth + 1
    try:
        yield
    finally:
        _thread.suspended = depth


def is_suspended() -> bool:
    return bool(getattr(_thread, "suspended", 0))


@dataclass(frozen=True)
class ModelCall:
    """One forward pass of the whole model.

    Attributes:
        autocast: the dtype of autocast in the pass; ``None`` if it was off.
        random_state: the state of the random generators (of the CPU and the model's devices) when
            the pass began; ``None`` if it was not recorded.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None = None
    random_state: list[Tensor] | None = None


def call_of(model: nn.Module, inputs: Any) -> ModelCall:
    """Return the call of a model with one batch: a tensor, a tuple of arguments, or a dict."""
    if isinstance(inputs, Mapping):
        return ModelCall((), dict(inputs), autocast_of(model))
    return ModelCall(inputs if isinstance(inputs, tuple) else (inputs,), {}, autocast_of(model))


def autocast_of(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of autocast on the model's device now; ``None`` if it is off."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast, which would round products of statistics."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class SavedBuffers:
    """Copies of all buffers of a model, such as running statistics, to restore them later.

    A buffer that cannot be changed in place is not copied, only put back where it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self._saved: list[tuple[nn.Module, str, Tensor, Tensor | None]] = [
            (module, name, buffer, buffer.clone() if is_writable(buffer) else None)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every buffer, including those that a module has replaced since."""
        for module, name, buffer, saved in self._saved:
            module._buffers[name] = buffer if saved is None else buffer.copy_(saved)


def is_writable(tensor: Tensor) -> bool:
    """Return whether a tensor can be changed in place: not if entries share their memory."""
    if tensor.is_inference():
        return False
    if tensor.layout != torch.strided:
        return True
    return all(n == 1 or stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def accelerators_of(model: nn.Module) -> list[torch.device]:
    """Return the devices of a model's parameters, other than the CPU."""
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    return [device for device in devices if device.type != "cpu"]


def get_random_state(accelerators: Collection[torch.device]) -> list[Tensor]:
    """Return the state of the CPU's generator, then that of each accelerator's."""
    states = [torch.get_device_module(device).get_rng_state(device) for device in accelerators]
    return [torch.get_rng_state(), *states]


def set_random_state(states: list[Tensor], accelerators: Collection[torch.device]) -> None:
    """Restore what ``get_random_state`` returned for the same accelerators."""
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
