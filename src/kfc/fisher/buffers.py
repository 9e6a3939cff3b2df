"""Save and restore a model's buffers, such as the running statistics of batch normalisation."""

import torch
from torch import Tensor, nn


class SavedBuffers:
    """Copies of all buffers of a model, to restore them later."""

    def __init__(self, model: nn.Module) -> None:
        self._saved: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every buffer, including those that a module has replaced since."""
        for module, name, buffer, saved in self._saved:
            module._buffers[name] = buffer.copy_(saved)
