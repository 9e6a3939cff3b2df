"""Hooks: what flows through the layers while the model runs.

A hook on the model opens a :class:`Session` when its listener wants statistics from this forward
pass; hooks on the layers record every call in it; a second hook on the model hands the session and
the model's output to the listener. Nothing is recorded in eval mode, without gradients, outside
the model's own forward (as when checkpointing recomputes a part of it), or while suspended.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from kfc.budget import now
from kfc.layers import Handler, Moment, Statistics

_thread = threading.local()


@contextmanager
def suspended() -> Iterator[None]:
    """Let models run without their hooks recording anything, in this thread."""
    depth = getattr(_thread, "suspended", 0)
    _thread.suspended = depth + 1
    try:
        yield
    finally:
        _thread.suspended = depth


@dataclass(frozen=True)
class Call:
    """One call of one layer.

    Attributes:
        edge: where the derivative with respect to the call's output arrives. The edge, not the
            tensor: after an in-place ReLU the tensor's derivative is silently another one.
        kept: what the layer's statistics keep of the inputs until then.
        shape: of the output.
    """

    layer: str
    edge: GradientEdge
    kept: Any
    shape: torch.Size


@dataclass
class Session:
    """What one forward pass leaves behind, and the statistics it is turned into.

    Attributes:
        seconds: what the hooks on layers took.
    """

    wanted: Collection[str]
    statistics: dict[str, Statistics] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    without_gradient: set[str] = field(default_factory=set)
    examples: int = 0
    seconds: float = 0.0
    clock_device: torch.device | None = None
    _split: tuple[list[Call], list[Call]] | None = None

    def backward(self, output: Tensor, derivative: Tensor) -> None:
        """One draw: carry a derivative from the output to every call's pre-activations.

        The user's graph stays intact, and no weight gradients are computed. Derivatives that are
        only passing are taken up as they pass, so that they need not all be held until the end.
        """
        final, passing = self._final_and_passing()
        handles = [
            call.edge.node.register_prehook(partial(self._take_passing, call)) for call in passing
        ]
        try:
            derivatives = torch.autograd.grad(
                output,
                [call.edge for call in final],
                derivative.to(output.dtype),
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        for call, at_output in zip(final, derivatives, strict=True):
            self._take(call, at_output)
        self.end_draw()

    def _final_and_passing(self) -> tuple[list[Call], list[Call]]:
        """The calls at which the way back ends, and those that have another one behind them."""
        if self._split is None:
            behind = nodes_with_one_behind([call.edge.node for call in self.calls])
            passing = [call for call in self.calls if call.edge.node in behind]
            final = [call for call in self.calls if call.edge.node not in behind]
            self._split = final, passing
        return self._split

    def _take_passing(self, call: Call, derivatives: tuple[Tensor | None, ...]) -> None:
        self._take(call, derivatives[call.edge.output_nr])

    def _take(self, call: Call, derivative: Tensor | None) -> None:
        if derivative is not None:
            take_derivative(self, self.statistics[call.layer], call.kept, call.shape, derivative)

    @contextmanager
    def timed(self) -> Iterator[None]:
        start = now(self.clock_device)
        yield
        self.seconds += now(self.clock_device) - start

    def end_draw(self) -> None:
        for statistics in self.statistics.values():
            statistics.end_draw()

    def shares_rows(self) -> bool:
        """Whether a layer ran on rows that do not belong to one example each."""
        return any(call.shape[0] % self.examples for call in self.calls)

    def moments(self) -> dict[str, tuple[Moment, ...]]:
        """By layer; empty for a layer that no derivative reached."""
        return {layer: s.moments(self.examples) for layer, s in self.statistics.items()}


def nodes_with_one_behind(nodes: Collection[Node]) -> set[Node]:
    """Those of the graph's nodes from which, towards the inputs, another one of them is reached."""
    wanted = set(nodes)
    reaches: dict[Node, bool] = {}
    for root in nodes:
        # Depth first: a node is settled when all that lie behind it are.
        pending = [root]
        while pending:
            node = pending[-1]
            behind = [parent for parent, _ in node.next_functions if parent is not None]
            if node not in reaches:
                reaches[node] = False
                pending += [parent for parent in behind if parent not in reaches]
                continue
            pending.pop()
            reaches[node] = any(parent in wanted or reaches[parent] for parent in behind)
    return {node for node in wanted if reaches[node]}


@dataclass(frozen=True)
class ModelCall:
    """The arguments of one forward pass of the whole model, to run (a part of) it again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[str, torch.dtype] | None = None


class Listener(Protocol):
    """Who the hooks report to.

    Attributes:
        clock_device: the device to wait for when looking at the clock.
    """

    clock_device: torch.device | None

    def wanted_layers(self) -> Collection[str]:
        """The layers whose statistics the coming forward pass should give."""

    def observe(self, call: ModelCall, output: Any, session: Session | None) -> None:
        """The model has run in training mode."""


class Capture:
    """The hooks on one model and its layers; they go when this object goes."""

    def __init__(
        self,
        model: nn.Module,
        handlers: Mapping[str, Handler],
        listener: Listener,
        *,
        during_backward: bool,
    ) -> None:
        """
        Args:
            during_backward: take derivatives as they pass in the user's own backward, instead of
                leaving them to :meth:`Session.backward`.
        """
        refuse_hidden_layers(model)
        self._handlers = dict(handlers)
        self._listener = weakref.ref(listener)
        self._during_backward = during_backward
        # Of each thread its own: a model may be evaluated in one while another trains it.
        self._thread = threading.local()
        self._handles: list[RemovableHandle] = []
        me = weakref.ref(self)
        self._add(model.register_forward_pre_hook, _Hook(me, "_before_model"))
        for name, handler in self._handlers.items():
            for module in handler.modules:
                self._add(module.register_forward_hook, _Hook(me, "_after_layer", name))
        # Last, for hooks run in the order they came, and the model may itself be a layer.
        self._add(model.register_forward_hook, _Hook(me, "_after_model"), always_call=True)
        self.close = weakref.finalize(self, _remove_all, self._handles)

    def _add(self, register: Callable[..., RemovableHandle], hook: _Hook, **options: bool) -> None:
        self._handles.append(register(hook, with_kwargs=True, **options))

    def _before_model(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._thread.running, self._thread.session = False, None
        listener = self._listener()
        if listener is None or not model.training or not _plain_gradients_enabled():
            return
        self._thread.running = True
        wanted = listener.wanted_layers()
        session = Session(wanted, clock_device=listener.clock_device) if wanted else None
        self._thread.session = session

    def _after_layer(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        session: Session | None = getattr(self._thread, "session", None)
        handler = self._handlers[name]
        if session is None or name not in session.wanted or not handler.trained():
            return
        if isinstance(output, Tensor) and output.numel() == 0:
            return  # an empty batch; the model's output will be refused
        if not (isinstance(output, Tensor) and output.requires_grad):
            session.without_gradient.add(name)
            return
        statistics = session.statistics.setdefault(name, handler.statistics())
        inputs = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
        with session.timed(), torch.no_grad(), without_autocast(output.device):
            kept = statistics.forward(inputs, output)
        edge = output_edge(output)
        session.calls.append(Call(name, edge, kept, output.shape))
        if self._during_backward:
            # Not through the call, whose edge would hold the graph in a cycle.
            hook = partial(
                _take_in_user_backward, session, statistics, kept, output.shape, edge.output_nr
            )
            edge.node.register_prehook(hook)

    def _after_model(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        session: Session | None = getattr(self._thread, "session", None)
        running = getattr(self._thread, "running", False)
        self._thread.running, self._thread.session = False, None
        listener = self._listener()
        failed = output is None and sys.exc_info()[0] is not None
        if listener is None or not running or failed:
            return
        if session is not None and session.without_gradient:
            _refuse_reentrant_checkpointing(session.without_gradient, output)
        listener.observe(ModelCall(args, kwargs, _autocast_of(model)), output, session)


class _Hook:
    """Calls a method of a :class:`Capture` that it does not keep alive.

    A copied or unpickled model carries inert copies: it must not feed the original's optimizer.
    """

    def __init__(self, capture: Callable[[], Capture | None], method: str, *first: Any) -> None:
        self.capture = capture
        self.method = method
        self.first = first

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            if self.method == "_before_model" and args[0].training:
                _refuse_compiled()
            return
        capture = self.capture()
        if capture is not None and not getattr(_thread, "suspended", 0):
            getattr(capture, self.method)(*self.first, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_hook, ()


def _inert_hook() -> _Hook:
    return _Hook(_nothing, "")


def _nothing() -> None:
    return None


def output_edge(output: Tensor) -> GradientEdge:
    """Where the derivative with respect to a layer's output arrives, come what may after it.

    Of a view of all of another tensor (as a linear layer's output for several leading dimensions)
    that of the other tensor: an operation in place replaces the view's own.
    """
    base = output._base
    if base is not None and base.requires_grad and base.numel() == output.numel():
        same = base.is_contiguous() and output.is_contiguous()
        if same and base.storage_offset() == output.storage_offset():
            return get_gradient_edge(base)
    return get_gradient_edge(output)


def take_derivative(
    session: Session, statistics: Statistics, kept: Any, shape: torch.Size, value: Tensor
) -> None:
    with torch.no_grad(), without_autocast(value.device):
        statistics.backward(kept, value.reshape(shape), session.examples)


def _take_in_user_backward(
    session: Session,
    statistics: Statistics,
    kept: Any,
    shape: torch.Size,
    output_nr: int,
    derivatives: tuple[Tensor | None, ...],
) -> None:
    value = derivatives[output_nr]
    if session.examples and value is not None:
        with session.timed():
            take_derivative(session, statistics, kept, shape, value)


def _remove_all(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def without_autocast(device: torch.device) -> torch.autocast:
    """Statistics are full-precision mathematics: inside autocast their products would not be."""
    return torch.autocast(device.type, enabled=False)


def _autocast_of(model: nn.Module) -> tuple[str, torch.dtype] | None:
    device = next(model.parameters()).device.type
    if not torch.is_autocast_enabled(device):
        return None
    return device, torch.get_autocast_dtype(device)


def _plain_gradients_enabled() -> bool:
    """Whether a usual backward can follow: no forward mode, no functional transform."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    dual = getattr(forward_ad, "_current_level", -1) >= 0
    return torch.is_grad_enabled() and not transformed and not dual


def refuse_hidden_layers(model: nn.Module) -> None:
    """Raise if the model's layers would run where no hook sees them."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(model, wrappers):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, which kfc does not support: its "
            "replicas would not share their curvature; pass the plain module"
        )
    for name, module in model.named_modules():
        where = f"submodule {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} is a ScriptModule, whose layers hooks cannot see; pass the eager module"
            )
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or type(module).__name__ == "OptimizedModule":
            raise ValueError(
                f"{where} is compiled, which hides its layers from hooks; pass the module "
                "without torch.compile"
            )


def _refuse_compiled() -> None:
    raise RuntimeError(
        "the model was compiled after its kfc optimizer was made: torch.compile hides its layers "
        "from the hooks that gather statistics; train the eager module (a compiled one may "
        "evaluate), or call optimizer.close() first"
    )


# What torch.compiler.disable sets, without the seconds that importing the compiler takes: the call
# breaks the compiled graph, so that the error is raised when the model runs.
_refuse_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]


def _refuse_reentrant_checkpointing(layers: set[str], output: Any) -> None:
    """Layers that ran without gradients are fine (a frozen part), unless they will run again."""
    seen: set[Node] = set()
    roots = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    pending = [node for node in roots if node is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise RuntimeError(
                f"layers {sorted(layers)} run inside reentrant checkpointing, where their "
                "derivatives cannot be taken; call torch.utils.checkpoint.checkpoint with "
                "use_reentrant=False"
            )
        pending += [parent for parent, _ in node.next_functions if parent is not None]
