"""The multiply-adds of functions that a model calls, counted from the shapes of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from kfc.layers.functions import FUNCTIONS, arguments_of

# The places of the two factors among the arguments of products, by the name of the function.
PRODUCTS = {"matmul": (0, 1), "mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class Operation(NamedTuple):
    """A call of a function.

    Attributes:
        multiply_adds: those of the forward pass.
        factors: the tensors that are multiplied.
    """

    multiply_adds: float
    factors: tuple[Tensor, ...]

    def with_backward(self) -> float:
        """Return the multiply-adds of the forward and the backward pass."""
        return self.multiply_adds * (1 + sum(each.requires_grad for each in self.factors[:2]))


def operation(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> Operation | None:
    """Return what a function did, or ``None`` if it is none of those that are counted.

    These are linear layers, convolutions, products of matrices, fused attention and recurrent
    layers.
    """
    if func in FUNCTIONS:
        return _of_layer(func, arguments_of(func, args, kwargs), output)
    name = getattr(func, "__name__", "")
    if name in PRODUCTS:
        first, second = PRODUCTS[name]
        if len(args) <= second or not all(isinstance(a, Tensor) for a in (*args, output)):
            return None
        one, other = args[first], args[second]
        return Operation(float(output.numel() * one.shape[-1]), (one, other))
    if func is F.scaled_dot_product_attention:
        query, key, value = (*args, *kwargs.values())[:3]
        pairs = query.numel() / query.shape[-1] * key.shape[-2]
        return Operation(pairs * (query.shape[-1] + value.shape[-1]), (query, value))
    if name in RECURRENT and isinstance(args[0], Tensor):
        weights = next(each for each in reversed(args[:4]) if isinstance(each, (tuple, list)))
        rows, matrices = args[0].numel() / args[0].shape[-1], [w for w in weights if w.dim() == 2]
        return Operation(rows * sum(w.numel() for w in matrices), (args[0], *matrices))
    return None


def _of_layer(func: Any, arguments: Mapping[str, Any], output: Any) -> Operation | None:
    inputs, weight = arguments["input"], arguments["weight"]
    if not all(isinstance(each, Tensor) for each in (inputs, weight, output)) or weight.dim() < 2:
        return None  # normalisation
    if not inputs.is_floating_point():
        return None  # an embedding
    locations = inputs if func in TRANSPOSED else output
    return Operation(float(locations.numel() * weight.shape[1:].numel()), (inputs, weight))
