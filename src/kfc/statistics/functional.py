"""Calls of functions such as ``F.linear`` with the parameters of a layer, without its module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from kfc.layers import InProjectionLayer, Layer
from kfc.layers.functions import FUNCTIONS, arguments_of, is_call_of
from kfc.statistics.backward import output_edge
from kfc.statistics.operations import Operation, operation


class Recorder(Protocol):
    """What calls of layers are reported to, such as ``RecordedPass``."""

    wanted: Collection[str]

    def record(
        self, layer: str, inputs: Tensor, output: Tensor, edge: GradientEdge | None = None
    ) -> None:
        """Add one call of a layer."""


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
    layer runs, and is dropped if the hook of its own module comes first. A layer that is
    ``functional`` has no such hook.

    The multiply-adds of all calls are counted, too.

    Args:
        recorded: the pass in progress.
        layers: the layers of the model, by name.

    Attributes:
        found: the layers that ran without their modules.
    """

    def __init__(self, recorded: Recorder, layers: Mapping[str, Layer]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._recorded, self._layers = recorded, layers
        self._names = {id(layers[name].weight): name for name in recorded.wanted}
        self._waiting: _Call | None = None
        self._in_attention = self._is_recording = False
        # The multiply-adds of forward and backward passes, in layers and elsewhere.
        self._own = self._others = 0.0
        # The last operation elsewhere, and its output.
        self._last: tuple[Operation, Any] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_attention = func is F.multi_head_attention_forward and not self._in_attention
        if is_attention and set(types) <= {Tensor, nn.Parameter}:
            return self._attend(*args, **kwargs)
        output = func(*args, **kwargs)
        self._count(func, args, kwargs, output)
        if func in FUNCTIONS and isinstance(output, Tensor) and output.requires_grad:
            arguments = arguments_of(func, args, kwargs)
            name = self._names.get(id(arguments["weight"]))
            if name is None and func is F.linear:
                return self._with_part(output, arguments)
            if name is not None and is_call_of(self._layers[name], func, arguments):
                self._note(name, arguments["input"], output)
        return output

    def _count(self, func: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        done = None if self._is_recording else operation(func, args, kwargs, output)
        if done is not None:
            bases = [getattr(each, "_base", None) for each in done.factors]
            if any(id(each) in self._names for each in (*done.factors, *bases)):
                self._own += 3 * done.multiply_adds
            else:
                self._others += done.with_backward()
                self._last = done, output

    def others(self) -> float:
        """Return the multiply-adds that are not those of layers, relative to these."""
        return self._others / self._own if self._own else 0.0

    def _note(self, name: str, inputs: Tensor, output: Tensor) -> None:
        self.record_waiting()
        self._waiting = _Call(name, inputs, inputs._version, output, output_edge(output))
        if self._layers[name].functional:
            self.record_waiting()

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``F.multi_head_attention_forward``, and see the functions that it calls."""
        self._in_attention = True
        try:
            with self:
                return _unchecked(F.multi_head_attention_forward)(*args, **kwargs)
        finally:
            self._in_attention = False

    def _with_part(self, output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Return the output of ``F.linear``, and record the call if it uses a part of a layer.

        The derivative with respect to the recorded output is zero in the other parts.
        """
        weight, bias = arguments["weight"], arguments["bias"]
        name = self._names.get(id(getattr(weight, "_base", None)))
        if name is None or not isinstance(self._layers[name], InProjectionLayer):
            return output
        own = self._layers[name].parameters()
        start = _first_row(weight, own["weight"])
        first = None if bias is None and "bias" not in own else _first_row(bias, own.get("bias"))
        if start is None or ("bias" in own and first != start):
            return output
        stop = start + output.shape[-1]
        padded = F.pad(output, (start, len(own["weight"]) - stop))
        self._note(name, arguments["input"], padded)
        return padded[..., start:stop].contiguous()

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

    def record_module(self, layer: str, inputs: Any, output: Any) -> None:
        """Record a call of a layer's module, but not the function that the module calls."""
        if self._last is not None and self._last[1] is output:
            # The module multiplies by a weight that it computes from its own.
            done, self._last = self._last[0], None
            self._others -= done.with_backward()
            self._own += 3 * done.multiply_adds
        if self._waiting is not None and self._waiting.layer == layer:
            self._waiting = None
        self.record_waiting()
        self._is_recording = True  # what is computed now does not belong to the pass
        try:
            self._recorded.record(layer, inputs, output)
        finally:
            self._is_recording = False

    def record_waiting(self) -> None:
        """Record the call that waits, if there is one."""
        call, self._waiting = self._waiting, None
        # Inputs that have changed since are lost.
        if call is not None and call.inputs._version == call.version:
            self.found.add(call.layer)
            self._recorded.record(call.layer, call.inputs, call.output, call.edge)


def _first_row(part: Tensor | None, whole: Tensor | None) -> int | None:
    """Return the place of the first row of a part of a tensor; ``None`` if it is not one."""
    if part is None or whole is None or part._base is not whole:
        return None
    place, of_row = part.storage_offset() - whole.storage_offset(), whole.stride(0)
    is_rows = part.stride() == whole.stride() and part.shape[1:] == whole.shape[1:]
    return place // of_row if is_rows and place % of_row == 0 else None


def _unchecked(function: Any) -> Callable[..., Any]:
    """Return a copy of a function of torch that does not pass itself to the mode in force.

    Functions of torch that are written in Python do so, and the mode does not see what they call.
    """
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)
