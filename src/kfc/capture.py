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
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from kfc.layers import Handler, Statistics
from kfc.randomness import accelerators_of, get_random_state
from kfc.session import Call, Session, output_edge, take_in_user_backward, without_autocast

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
class ModelCall:
    """One forward pass of the whole model, to run it, or a part of it, again.

    Attributes:
        random_state: in which the pass began, of the generators of the CPU and of the model's
            devices; ``None`` if it was not kept.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[str, torch.dtype] | None = None
    random_state: list[Tensor] | None = None


class Listener(Protocol):
    """Who the hooks report to.

    Attributes:
        clock_device: the device to wait for when looking at the clock.
        keeps_calls: whether passes will be run again, from the random state they began in.
    """

    clock_device: torch.device | None
    keeps_calls: bool

    def wanted_layers(self) -> Collection[str]:
        """The layers whose statistics the coming forward pass should give."""

    def statistics_of(self, layer: str) -> Statistics:
        """A new, empty gathering for a layer."""

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
        self._thread.random_state = None
        if listener.keeps_calls:
            self._thread.random_state = get_random_state(accelerators_of(model))
        wanted = listener.wanted_layers()
        session = Session(wanted, clock_device=listener.clock_device) if wanted else None
        self._thread.session = session

    def _after_layer(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        session: Session | None = getattr(self._thread, "session", None)
        listener = self._listener()
        if listener is None or session is None or name not in session.wanted:
            return
        if not self._handlers[name].trained():
            return
        if isinstance(output, Tensor) and output.numel() == 0:
            return  # an empty batch; the model's output will be refused
        if not (isinstance(output, Tensor) and output.requires_grad):
            session.without_gradient.add(name)
            return
        if name not in session.statistics:
            session.statistics[name] = listener.statistics_of(name)
        statistics = session.statistics[name]
        inputs = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
        with session.timed(), torch.no_grad(), without_autocast(output.device):
            kept = statistics.forward(inputs, output)
        edge = output_edge(output)
        session.calls.append(Call(name, edge, kept, output.shape))
        if self._during_backward:
            # Not through the call, whose edge would hold the graph in a cycle.
            hook = partial(
                take_in_user_backward, session, statistics, [kept], output.shape, edge.output_nr
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
        call = ModelCall(args, kwargs, _autocast_of(model), self._thread.random_state)
        listener.observe(call, output, session)


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


def _remove_all(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


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
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "the model is wrapped in DataParallel, which kfc does not support: its replicas would "
            "not share their curvature; use DistributedDataParallel, or pass the plain module"
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
