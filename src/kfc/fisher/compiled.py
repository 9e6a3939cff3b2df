"""Eager passes of models that ``torch.compile`` has compiled.

Hooks see the layers of a model, and forward mode differentiates it, only while it runs eagerly.
Nothing here imports the compiler, which takes seconds, unless the user has done so.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from torch._C._dynamo import eval_frame as _frames

    _SKIP, _DEFAULT = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
    _SKIPS = {both: _frames._FrameExecStrategy(_SKIP, both) for both in (_SKIP, _DEFAULT)}
    _frames.set_code_exec_strategy, _frames.set_eval_frame  # noqa: B018 - both are needed
except (AttributeError, ImportError):  # another version of torch
    _frames = None  # type: ignore[assignment]


def refuse_compiled(model: nn.Module) -> None:
    """Raise ``ValueError`` if a part of the model is compiled and torch cannot run it eagerly."""
    for name, module in model.named_modules():
        if _frames is None and (is_wrapper(module) or _is_compiled(module)):
            where = f"submodule {name!r}" if name else "the model"
            raise ValueError(
                f"{where} is compiled, and this version of torch cannot run it eagerly when "
                "statistics are due; pass the module without torch.compile"
            )


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is what ``torch.compile`` returns for another module."""
    return type(module).__name__ == "OptimizedModule"


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def eager_module(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given, or the module itself."""
    while is_wrapper(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def outside_of_compiled_graphs(*, callees: bool) -> Callable[[Function], Function]:
    """Return a decorator of functions that are never compiled; compiled code calls them.

    This is what ``torch.compiler.disable`` does, which imports the compiler.

    Args:
        callees: whether the functions that it calls are not compiled either.
    """

    def mark(function: Function) -> Function:
        if _frames is not None:
            strategy = _SKIPS[_SKIP if callees else _DEFAULT]
            _frames.set_code_exec_strategy(function.__code__, strategy)
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
        return function

    return mark


class _EagerContexts:
    """Turns compilation off while at least one context is open.

    Contexts may end in any order: that of an interrupted pass ends when its model is collected.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # collecting a model may end a context in between
        self._open = 0
        self._stance: Any = None

    def enter(self) -> None:
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()

    def leave(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._stance.__exit__(None, None, None)


_CONTEXTS = _EagerContexts()


@contextmanager
def eagerly() -> Iterator[None]:
    """Run models eagerly in this context, compiled or not."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    _CONTEXTS.enter()
    try:
        yield
    finally:
        _CONTEXTS.leave()


def guard_hooks() -> None:
    """Let compiled graphs of modules without hooks not run for modules with hooks.

    torch compiles the hooks of containers such as ``nn.Sequential`` with them if they are wrapped,
    and assumes by default that hooks are never added, and are the same for modules that are alike.
    """
    from torch._dynamo import config, external_utils  # which torch.optim imports, too

    config.skip_nnmodule_hook_guards = False
    if _frames is not None:
        # Graphs from before; the code is the same for all such modules.
        _frames.reset_code(external_utils.wrap_inline(eagerly).__code__)


class EagerPass:
    """Runs a forward pass eagerly that compiled code may have begun.

    A hook before the pass calls ``begin()``, one after it ``end()``. Both hooks, but not all that
    they call, have to be outside of compiled graphs.
    """

    def __init__(self) -> None:
        self._callback: Any = None
        self._context: AbstractContextManager[None] | None = None

    @outside_of_compiled_graphs(callees=False)
    def begin(self) -> None:
        if _frames is not None:
            self._callback = _frames.set_eval_frame(None)  # of the compiled code around the pass
        # Parts of the model may be compiled on their own.
        self._context = eagerly()
        self._context.__enter__()

    @outside_of_compiled_graphs(callees=False)
    def end(self) -> None:
        if self._context is None:
            return
        self.drop()
        if _frames is None:
            return
        # With fullgraph=True, compiled code raises an error unless it has run a graph.
        count = getattr(_frames, "set_fullgraph_compiled_frame_count", None)
        if count is not None and count(-1) >= 0:
            count(1)
        _frames.set_eval_frame(self._callback)

    def drop(self) -> None:
        """End a pass that was interrupted, after which compiled code has ended, too."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)
