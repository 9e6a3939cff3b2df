"""Functions of torch that do what the modules of layers do, with the same parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kfc.layers.attention import InProjectionLayer
from kfc.layers.base import Layer, LinearLayer
from kfc.layers.convolution import ConvolutionLayer, TransposedConvolutionLayer
from kfc.layers.embedding import EmbeddingLayer, TiedEmbeddingLayer
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
EMBEDDING = {
    "input": None,
    "weight": None,
    "padding_idx": None,
    "max_norm": None,
    "norm_type": 2.0,
    "scale_grad_by_freq": False,
    "sparse": False,
}
# What has to be the same as in the module. The locations of a transposed convolution follow from
# the size of its output.
COMPARED = ("stride", "padding", "dilation", "groups", "eps")

# The layers that a function may belong to, and its arguments.
FUNCTIONS: dict[Any, tuple[tuple[type[Layer], ...], dict[str, Any]]] = {
    F.linear: ((LinearLayer, InProjectionLayer, TiedEmbeddingLayer), LINEAR),
    F.embedding: ((EmbeddingLayer, TiedEmbeddingLayer), EMBEDDING),
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
    """Return whether a function was called as the layer's module would call it.

    If the layer has no bias, the function may add another one, which changes nothing for the layer.
    """
    own, module = layer.parameters(), layer.module
    if type(layer) not in FUNCTIONS[func][0] or not isinstance(arguments["input"], Tensor):
        return False
    if arguments["weight"] is not own["weight"]:
        return False
    if func is F.embedding:
        return _is_lookup_of(layer, arguments)
    if "bias" in own and arguments["bias"] is not own["bias"]:
        return False
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return False
    if isinstance(layer, BatchNormLayer):
        with_batch = layer.module.training or layer.module.running_mean is None
        if arguments["training"] != with_batch:
            return False
    compared = [name for name in COMPARED if name in arguments]
    return all(_same(arguments[name], getattr(module, name)) for name in compared)


def _is_lookup_of(layer: Layer, arguments: Mapping[str, Any]) -> bool:
    """Return whether indices are looked up as the layer's embedding would do it."""
    embedding = layer.modules[-1]
    assert isinstance(embedding, nn.Embedding)
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    padding = arguments["padding_idx"]
    if padding is not None and padding < 0:
        padding += embedding.num_embeddings
    return padding == embedding.padding_idx and not any(arguments[name] for name in options)


def _same(one: Any, other: Any) -> bool:
    """Return whether numbers, or tuples of numbers, are the same for every dimension."""
    length = len(other) if isinstance(other, (tuple, list)) else 1
    pair = [tuple(v) if isinstance(v, (tuple, list)) else (v,) * length for v in (one, other)]
    pair = [v * length if len(v) == 1 else v for v in pair]
    return pair[0] == pair[1]
