"""Calls of ``F.linear`` and ``F.conv2d`` with the parameters of a layer, without its module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from kfc.layers import ConvolutionLayer, Layer, LinearLayer, TransposedConvolutionLayer
from kfc.statistics.backward import RecordedPass, output_edge

# The arguments after input, weight and bias, with their default values.
CONVOLUTION = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
TRANSPOSED = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
FUNCTIONS: dict[Any, tuple[type[Layer], dict[str, int]]] = {
    F.linear: (LinearLayer, {}),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), (ConvolutionLayer, CONVOLUTION)),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        (TransposedConvolutionLayer, TRANSPOSED),
    ),
}


class _Call(NamedTuple):
    """A call that may belong to the layer's module, whose hook has not run yet."""

    layer: str
    inputs: Tensor
    version: int
    output: Tensor
    edge: GradientEdge


class FunctionalCalls(TorchFunctionMode):
    """Records calls of functions that do what a layer's module would do.

    A module calls the same function, and its hook follows at once: a call waits until the next
    layer runs, and is dropped if the hook of its own module comes first.

    Args:
        recorded: the pass in progress.
        layers: the layers of the model, by name.

    Attributes:
        found: the layers that ran without their modules.
    """

    def __init__(self, recorded: RecordedPass, layers: Mapping[str, Layer]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._recorded, self._layers = recorded, layers
        self._names = {id(layers[name].weight): name for name in recorded.wanted}
        self._waiting: _Call | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in FUNCTIONS and isinstance(output, Tensor) and output.requires_grad:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs or {})
            name = self._names.get(id(given.get("weight")))
            if name is not None and _is_own(self._layers[name], func, args[3:], given):
                self.record_waiting()
                inputs = given["input"]
                edge = output_edge(output)
                self._waiting = _Call(name, inputs, inputs._version, output, edge)
        return output

    def abandon(self) -> bool:
        """Stop recording an interrupted pass, and leave the mode; return whether it was possible.

        If another mode was entered since, this one stays behind it, without effect.
        """
        self._names, self._waiting = {}, None
        current = getattr(torch.overrides, "_get_current_function_mode", lambda: self)
        is_last: bool = current() is self
        if is_last:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return is_last

    def drop_waiting(self, layer: str) -> None:
        """Process a hook of a layer's module, whose call is not to be recorded twice."""
        if self._waiting is not None and self._waiting.layer == layer:
            self._waiting = None
        self.record_waiting()

    def record_waiting(self) -> None:
        """Record the call that waits, if there is one."""
        call, self._waiting = self._waiting, None
        # Inputs that have changed since are lost.
        if call is not None and call.inputs._version == call.version:
            self.found.add(call.layer)
            self._recorded.record(call.layer, call.inputs, call.output, call.edge)


def _is_own(layer: Layer, func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    """Return whether a function was called as the layer's module would call it.

    Args:
        args: the positional arguments after input, weight and bias.
        given: these three and the keyword arguments.
    """
    kind, defaults = FUNCTIONS[func]
    module = layer.module
    if type(layer) is not kind or given.get("bias") is not module._parameters.get("bias"):
        return False
    options = defaults | dict(zip(defaults, args, strict=False))
    options |= {name: given[name] for name in defaults if name in given}
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return False
    # The locations of a transposed convolution follow from the size of its output.
    compared = [name for name in options if name != "output_padding"]
    return all(_same(options[name], getattr(module, name)) for name in compared)


def _same(one: Any, other: Any) -> bool:
    """Return whether numbers, or tuples of numbers, are the same for every dimension."""
    length = len(other) if isinstance(other, (tuple, list)) else 1
    pair = [tuple(v) if isinstance(v, (tuple, list)) else (v,) * length for v in (one, other)]
    pair = [v * length if len(v) == 1 else v for v in pair]
    return pair[0] == pair[1]
