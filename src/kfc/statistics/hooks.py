"""Hooks that record what flows through the layers while the model runs.

A hook on the model opens a ``RecordedPass`` if the collector wants statistics from this
forward pass; hooks on the layers record their calls in it; a second hook passes it and the
model's output to the collector. Nothing is recorded in evaluation mode (unless asked for), without
gradients, outside the model's own forward (as when checkpointing recomputes a part of it), or while
suspended.

The hooks on the model run outside of the graphs of ``torch.compile``, those on layers are left out
of them. A pass in which layers are needed runs eagerly.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from kfc._helpers import (
    is_reentrant_checkpoint,
    is_transformed,
    tree_leaves,
)
from kfc.fisher.calls import (
    ModelCall,
    accelerators_of,
    autocast_of,
    get_random_state,
    is_suspended,
)
from kfc.fisher.compiled import (
    EagerPass,
    guard_hooks,
    outside_of_compiled_graphs,
    refuse_compiled,
)
from kfc.layers import Layer
from kfc.statistics.backward import RecordedPass
from kfc.statistics.collector import Collector
from kfc.statistics.functional import FunctionalCalls


class ModelHooks:
    """The hooks on one model and its layers; they are removed with this object.

    Args:
        layers: the layers to record, by name.
        collector: what the hooks report to; held weakly.
        in_eval: whether passes in evaluation mode are recorded, too.

    Attributes:
        others: the multiply-adds of passes that are not those of layers, relative to these, in the
            first pass that was recorded; ``None`` before.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Layer],
        collector: Collector,
        *,
        in_eval: bool = False,
    ) -> None:
        refuse_hidden_layers(model)
        guard_hooks()
        self._in_eval = in_eval
        self._layers = dict(layers)
        self._collector = weakref.ref(collector)
        # Whether the calls of layers are used in the pass of the training thread; if not, their
        # hooks return at once.
        self.needs_layers = False
        # Per thread: a model may be evaluated in one thread while another trains it.
        self._thread = threading.local()
        # The layers whose modules run, and those that run without them.
        self._ran: set[str] = set()
        self._functional: set[str] = set()
        self.others: float | None = None
        self._handles: list[RemovableHandle] = []
        me = weakref.ref(self)
        self._add(model.register_forward_pre_hook, _ModelHook(me, "_before_model"))
        for name, layer in self._layers.items():
            for module in () if layer.functional else layer.modules:
                self._add(module.register_forward_hook, _LayerHook(me, "_after_layer", name))
        # Last, because hooks run in the order of registration and the model may be a layer itself.
        self._add(model.register_forward_hook, _ModelHook(me, "_after_model"), always_call=True)
        self.close = weakref.finalize(self, _remove_all, self._handles)

    def _add(self, register: Callable[..., RemovableHandle], hook: _Hook, **options: bool) -> None:
        self._handles.append(register(hook, with_kwargs=True, **options))

    def _before_model(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._end_interrupted()
        collector = self._collector()
        if collector is not None and collector.draws.replayed is not None:
            self._record_in(collector.draws.replayed)
            self.needs_layers = True  # the pass is eager already
            return
        if collector is None or not (model.training or self._in_eval):
            return
        if not torch.is_grad_enabled() or is_transformed():  # no plain backward can follow
            return
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        self._thread.running = True
        self._thread.random_state = None
        if collector.records_random_state:
            self._thread.random_state = get_random_state(accelerators_of(model))
        self._record_in(collector.new_pass(_first_size(args, kwargs)))
        self.needs_layers = self._thread.recorded is not None or collector.replays.are_active
        if self.needs_layers:
            self._thread.eager = EagerPass()

    def _end_interrupted(self) -> None:
        """End what a pass has left that was interrupted, for instance by Ctrl-C, without hooks."""
        interrupted = self.eager_pass()
        if interrupted is not None:
            interrupted.drop()
        entered: list[FunctionalCalls] = getattr(self._thread, "entered", [])
        if getattr(self._thread, "calls", None) is not None:
            entered = [*entered, self._thread.calls]
        if entered:
            self._thread.entered = [calls for calls in reversed(entered) if not calls.abandon()][
                ::-1
            ]
        self._thread.running, self._thread.recorded, self._thread.eager = False, None, None
        self._thread.calls, self._thread.elements = None, {}

    @outside_of_compiled_graphs(callees=False)
    def eager_pass(self) -> EagerPass | None:
        """Return what makes the pass of this thread eager; ``None`` if it may be compiled."""
        return getattr(self._thread, "eager", None)

    def _record_in(self, recorded: RecordedPass | None) -> None:
        """Record the pass that begins, also calls of layers without their modules."""
        self._thread.recorded, self._thread.calls = recorded, None
        if recorded is not None and (self._functional or not self._ran.issuperset(recorded.wanted)):
            self._thread.calls = calls = FunctionalCalls(recorded, self._layers)
            calls.__enter__()  # type: ignore[no-untyped-call]

    def _end_calls(self, *, failed: bool) -> None:
        calls: FunctionalCalls | None = getattr(self._thread, "calls", None)
        if calls is not None:
            self._thread.calls = None
            calls.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if not failed:
                calls.record_waiting()
                self._functional |= calls.found
                self.others = calls.others() if self.others is None else self.others

    def _after_layer(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        recorded: RecordedPass | None = getattr(self._thread, "recorded", None)
        if recorded is None and getattr(self._thread, "running", False):
            collector = self._collector()
            if collector is not None and isinstance(output, Tensor):
                elements: dict[str, int] = self._thread.elements
                elements[name] = elements.get(name, 0) + output.numel()
        if recorded is None or name not in recorded.wanted or not self._layers[name].trained():
            return
        self._ran.add(name)
        inputs = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
        calls: FunctionalCalls | None = self._thread.calls
        record = recorded.record if calls is None else calls.record_module
        record(name, inputs, output)

    def _after_model(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recorded: RecordedPass | None = getattr(self._thread, "recorded", None)
        running = getattr(self._thread, "running", False)
        failed = output is None and sys.exc_info()[0] is not None
        self._end_calls(failed=failed)
        elements: dict[str, int] = getattr(self._thread, "elements", {})
        self._thread.running, self._thread.recorded, self._thread.elements = False, None, {}
        collector = self._collector()
        if collector is None or not running:
            return
        collector.buffers.after_pass()
        if failed:
            return
        if recorded is not None and recorded.without_gradient:
            _refuse_reentrant_checkpointing(recorded.without_gradient, output)
        call = ModelCall(args, kwargs, autocast_of(model), self._thread.random_state)
        collector.end_pass(call, output, recorded, elements)


class _Hook:
    """Calls a method of a ``ModelHooks`` object without keeping it alive.

    A copied or unpickled model carries inert copies, so that it does not feed the original's
    optimizer.
    """

    def __init__(self, owner: Callable[[], ModelHooks | None], method: str, *first: Any) -> None:
        self.owner = owner
        self.method = method
        self.first = first

    @outside_of_compiled_graphs(callees=True)
    def __call__(self, *args: Any) -> None:
        owner = self.owner()
        if owner is not None and not is_suspended():
            getattr(owner, self.method)(*self.first, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing, "")

    @property
    def __name__(self) -> str:  # which torch.jit.script reads first
        raise AttributeError(
            "torch.jit.script cannot compile a model with the hooks of an optimizer of kfc. Use "
            "torch.jit.trace, or script the model before its optimizer is made (both share their "
            "parameters), or after optimizer.close()"
        )


class _ModelHook(_Hook):
    """A hook on the model, which begins or ends an eager pass."""

    # Without its callees: what the compiler does in the rest of the pass would be restored.
    @outside_of_compiled_graphs(callees=False)
    def __call__(self, *args: Any) -> None:
        owner = None if torch.compiler.is_compiling() else self.owner()  # as in torch.export
        if owner is None:
            return
        if self.method == "_before_model":
            _Hook.__call__(self, *args)
            eager = owner.eager_pass()
            if eager is not None:
                eager.begin()
            return
        eager = owner.eager_pass()
        try:
            _Hook.__call__(self, *args)
        finally:
            if eager is not None:
                eager.end()


class _LayerHook(_Hook):
    """A hook on a layer, most calls of which have nothing to do."""

    def __call__(self, *args: Any) -> None:
        owner = None if torch.compiler.is_compiling() else self.owner()
        if owner is not None and owner.needs_layers:
            _Hook.__call__(self, *args)


def _first_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the first size of the first tensor that has one, or 0."""
    if args and isinstance(args[0], Tensor) and args[0].dim():
        return len(args[0])
    leaves = tree_leaves((args, kwargs))
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _nothing() -> None:
    return None


def _remove_all(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def refuse_hidden_layers(model: nn.Module) -> None:
    """Raise ``ValueError`` if hooks would not see the model's layers run."""
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
    refuse_compiled(model)


def _refuse_reentrant_checkpointing(layers: Iterable[str], output: Any) -> None:
    """Raise if layers ran without a graph because they will be run again in the backward pass."""
    seen: set[Node] = set()
    roots = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    pending = [node for node in roots if node is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_reentrant_checkpoint(node):
            raise RuntimeError(
                f"layers {sorted(layers)} run inside reentrant checkpointing, where their "
                "derivatives cannot be taken; call torch.utils.checkpoint.checkpoint with "
                "use_reentrant=False"
            )
        pending += [parent for parent, _ in node.next_functions if parent is not None]
