"""A model's buffers, as they were: running statistics of batch normalisation and the like."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SavedBuffers:
    """Copies of all buffers, to be put back; also where a module has replaced its buffer since."""

    def __init__(self, model: nn.Module) -> None:
        self._saved: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        for module, name, buffer, saved in self._saved:
            with torch.no_grad():
                module._buffers[name] = buffer.copy_(saved)
