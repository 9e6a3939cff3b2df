"""torch's Muon for networks with convolutions, together with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

LAYERS = (nn.Linear, _ConvNd)
Named: TypeAlias = Iterable[tuple[str, Tensor]]


class Muon:
    """torch's Muon for the hidden weights and AdamW for all other parameters.

    Muon takes matrices; a convolution's weight becomes one with a row for each output map. AdamW
    trains the last layer, the biases and the scales, as Muon's author advises, and parameters that
    are not the weight of a layer, such as position embeddings.

    Args:
        muon: makes the optimizer of the hidden weights from their names and matrices.
        adamw: makes the optimizer of the other parameters from their names and tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        muon: Callable[[Named], torch.optim.Optimizer],
        adamw: Callable[[Named], torch.optim.Optimizer],
    ) -> None:
        parameters = dict(model.named_parameters())
        layers = [name for name, each in model.named_modules() if isinstance(each, LAYERS)]
        weights = [f"{name}.weight" if name else "weight" for name in layers]
        hidden = [name for name in weights if name in parameters][:-1]
        self._weights = [parameters.pop(name) for name in hidden]
        self._matrices = [nn.Parameter(as_matrix(weight.detach())) for weight in self._weights]
        self._optimizers = [adamw(parameters.items())]
        if hidden:
            self._optimizers.append(muon(zip(hidden, self._matrices, strict=True)))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of both optimizers."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

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
