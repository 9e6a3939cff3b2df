"""Recorded forward passes of a model, to run them again."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        autocast: the dtype of autocast in the pass; ``None``: it was off.
        random_state: the state of the random generators (of the CPU and the model's devices) when
            the pass began; ``None`` if it was not recorded.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None = None
    random_state: list[Tensor] | None = None


def autocast_of(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of autocast on the model's device now; ``None`` if it is off."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context without autocast, which would round products of statistics."""
    return torch.autocast(device.type, enabled=False)
