"""torch's Muon as one optimizer for a whole network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from kfc.lab.optimizers import Setup


class Muon:
    """torch's Muon for the hidden weights and AdamW for all other parameters.

    Muon takes matrices; a convolution's weight becomes one with a row for each output map. AdamW
    trains the last layer, the biases and the scales, as Muon's author recommends.
    """

    def __init__(self, model: nn.Module, setup: Setup, *, momentum: float, adamw_lr: float) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"muon needs torch 2.9 or later, this is torch {torch.__version__}")
        parameters = dict(model.named_parameters())
        hidden = [name for name, parameter in parameters.items() if parameter.dim() > 1][:-1]
        self._weights = [parameters.pop(name) for name in hidden]
        self._matrices = [nn.Parameter(as_matrix(weight.detach())) for weight in self._weights]
        rest = setup.groups(parameters.items(), lr=adamw_lr)
        self._optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest)]
        if hidden:
            groups = setup.groups(zip(hidden, self._matrices, strict=True), lr=setup.lr)
            self._optimizers.append(torch.optim.Muon(groups, momentum=momentum))

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for weight in self._weights:
            weight.grad = None

    def step(self) -> None:
        for weight, matrix in zip(self._weights, self._matrices, strict=True):
            matrix.grad = None if weight.grad is None else as_matrix(weight.grad, like=weight)
        for optimizer in self._optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [optimizer.state_dict() for optimizer in self._optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self._optimizers, state_dict["parts"], strict=True):
            optimizer.load_state_dict(state)


def as_matrix(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a matrix with one row for each output map, in the memory order of ``like``.

    The matrix of ``like`` itself is a view, so that a step on the matrix is a step on the weight.
    The order of the columns does not affect the orthogonal factor.
    """
    like = tensor if like is None else like
    if like.dim() == 4 and not like.is_contiguous():
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.flatten(1)
