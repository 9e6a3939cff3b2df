"""Modules that are affine in a scale and a shift per channel, whatever they do to their inputs."""

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor, nn

from kfc.layers.base import NormalisationLayer
from kfc.layers.normalisation import channels_last_rows, channels_second_rows

CONTAINERS = (list, dict, set)


class AffineLayer(NormalisationLayer):
    """A module that computes scale · x̂ + shift + rest, where x̂ and the rest depend on its inputs.

    Both are computed by the module itself, with other values of its parameters.
    """

    def normaliser(self, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        parts = affine_parts(self.module)
        return lambda inputs: parts(inputs)[0]


class AffineLastLayer(AffineLayer):
    """Channels are the last dimension, as in ``LlamaRMSNorm`` of Transformers."""

    def channel_rows(self, values: Tensor, examples: int) -> Tensor:
        return channels_last_rows(values, examples, self.weight)


class AffineSecondLayer(AffineLayer):
    """Channels are dimension 1, as in ``LayerNorm2d`` of timm."""

    def channel_rows(self, values: Tensor, examples: int) -> Tensor:
        return channels_second_rows(values)


def affine_parts(module: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function that computes x̂ and the rest from the inputs of a module.

    They are the module's output for a scale of 1, minus that for a scale of 0; and the latter.
    Buffers and mode are those of the moment when the function was made.
    """
    twin = bare_copy(module)
    buffers = dict(twin._buffers)

    @torch.no_grad()
    def output(inputs: Tensor, scale: float) -> Tensor:
        values = {"weight": scale, "bias": 0.0}
        parameters = {
            role: None if p is None else torch.full_like(p, values[role], dtype=inputs.dtype)
            for role, p in module._parameters.items()
        }
        # The dtype of the statistics, which may be wider than the module's
        own = {
            role: b.to(inputs.dtype, copy=True) if b is not None and b.is_floating_point() else b
            for role, b in buffers.items()
        }
        vars(twin).update(_parameters=parameters, _buffers=own)
        # Not the call of the module, which would run hooks
        result: Tensor = type(twin).forward(twin, inputs.clone())
        return result

    def parts(inputs: Tensor) -> tuple[Tensor, Tensor]:
        rest = output(inputs, 0.0)
        return output(inputs, 1.0) - rest, rest

    return parts


def bare_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module without hooks, with buffers and containers of its own.

    Parameters are shared.
    """
    attributes = vars(module)
    hooks = {key: type(value)() for key, value in attributes.items() if "_hooks" in key}
    plain = {key: copy(value) for key, value in attributes.items() if type(value) in CONTAINERS}
    buffers = {role: None if b is None else b.clone() for role, b in module._buffers.items()}
    children = {
        name: None if child is None else bare_copy(child) for name, child in module._modules.items()
    }
    twin = copy(module)
    vars(twin).update({**plain, **hooks, "_buffers": buffers, "_modules": children})
    return twin
