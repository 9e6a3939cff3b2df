"""Functions of torch that do what the modules of layers do, with the same parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from kfc.layers.attention import InProjectionLayer
from kfc.layers.base import Layer, LinearLayer
from kfc.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer
from kfc.layers.normalisation import BatchNormLayer

# The arguments of functions, with default values of those that are optional.
LINEAR = {"input": None, "weight": None, "bias": None}
CONVOLUTION = {**LINEAR, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
TRANSPOSED = {
    **LINEAR,
    "stride": 1,
    "padding": 0,
    "output_padding": 0,
    "groups": 1,
    "dilation": 1,
}
BATCH_NORM = {
    "input": None,
    "running_mean": None,
    "running_var": None,
    "weight": None,
    "bias": None,
    "training": False,
    "momentum": 0.1,
    "eps": 1e-5,
}
# What has to be the same as in the module. The locations of a transposed convolution follow from
# the size of its output.
COMPARED = ("stride", "padding", "dilation", "groups", "eps")

# The layers that a function may belong to, and its arguments.
FUNCTIONS: dict[Any, tuple[tuple[type[Layer], ...], dict[str, Any]]] = {
    F.linear: ((LinearLayer, InProjectionLayer), LINEAR),
    F.batch_norm: ((BatchNormLayer,), BATCH_NORM),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), ((ConvolutionLayer,), CONVOLUTION)),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        ((TransposedConvolutionLayer,), TRANSPOSED),
    ),
}


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one of the functions by name."""
    defaults = FUNCTIONS[func][1]
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


def is_call_of(layer: Layer, func: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a function was called as the layer's module would call it."""
    own, module = layer.parameters(), layer.module
    if type(layer) not in FUNCTIONS[func][0] or not isinstance(arguments["input"], Tensor):
        return False
    if any(arguments[role] is not own.get(role) for role in ("weight", "bias")):
        return False
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return False
    if isinstance(layer, BatchNormLayer):
        with_batch = layer.module.training or layer.module.running_mean is None
        if arguments["training"] != with_batch:
            return False
    compared = [name for name in COMPARED if name in arguments]
    return all(_same(arguments[name], getattr(module, name)) for name in compared)


def _same(one: Any, other: Any) -> bool:
    """Return whether numbers, or tuples of numbers, are the same for every dimension."""
    length = len(other) if isinstance(other, (tuple, list)) else 1
    pair = [tuple(v) if isinstance(v, (tuple, list)) else (v,) * length for v in (one, other)]
    pair = [v * length if len(v) == 1 else v for v in pair]
    return pair[0] == pair[1]
