"""Helpers of every room: checks of arguments, and private parts of torch with their fallbacks."""

import gc
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the host waits only if the device is the CPU."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def is_asynchronous(device: torch.device) -> bool:
    """Return whether the host has to wait for the results of a device."""
    return device.type != "cpu"


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@lru_cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, name, bool)() for name in names)


def all_finite(values: Iterable[Tensor]) -> Tensor:
    """Return whether all scalars are finite, as a boolean scalar on the first one's device."""
    scalars = list(values)
    if not scalars:
        return torch.ones((), dtype=torch.bool)
    home, dtypes = scalars[0].device, {scalar.dtype for scalar in scalars}
    if len(dtypes) == 1:
        return torch.stack([moved(scalar, home) for scalar in scalars]).isfinite().all()
    return torch.stack([moved(torch.isfinite(scalar), home) for scalar in scalars]).all()


def are_finite(scalars: Sequence[Tensor]) -> bool:
    """Return whether all scalars are finite; the host waits for them."""
    if all(scalar.device.type == "cpu" for scalar in scalars):
        return all(math.isfinite(scalar.item()) for scalar in scalars)
    return bool(all_finite(scalars))


def finite_scalars(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return a scalar for each tensor that is not finite if an entry is not.

    Entries whose sum overflows float32 count as not finite on the CPU.
    """
    values = [tensor for tensor in tensors if tensor.numel()]
    if all(value.device.type == "cpu" for value in values):
        # torch._foreach_norm takes 17 times as long on the CPU.
        return [at_least_float32(value).sum() for value in values]
    return list(torch._foreach_norm(values, ord=math.inf))


def parts_by_size(tensors: Sequence[Tensor], most: int = 2**20) -> Iterator[slice]:
    """Yield slices of a list that contain at most so many entries, or one tensor."""
    start, entries = 0, 0
    for index, tensor in enumerate(tensors):
        if entries and entries + tensor.numel() > most:
            yield slice(start, index)
            start, entries = index, 0
        entries += tensor.numel()
    yield slice(start, len(tensors))


def inner_product(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of the products of all entries, in float32 at least."""
    one, other = at_least_float32(one), at_least_float32(other)
    if one.dtype != other.dtype:
        one, other = one.double(), other.double()
    is_dense = one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last)
    if is_dense and one.stride() == other.stride():
        # In the order of the memory, which is the same for both
        flat = (one.numel(),)
        return torch.dot(one.as_strided(flat, (1,)), other.as_strided(flat, (1,)))
    return torch.dot(one.reshape(-1), other.reshape(-1))


def shown(value: object) -> str:
    """Return a value as an error message shows it, in one short line."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, {value.layout}"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def require_number(
    name: str, value: object, *, low: float = 0.0, below: float = math.inf, positive: bool = False
) -> None:
    """Raise an error that names the argument unless low <= value < below (and > 0 if positive)."""
    if not (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and low <= value < below
        and abs(value) <= sys.float_info.max
        and not (positive and value == 0)
    ):
        bounds = [] if low == -math.inf else ["above 0" if positive else f"at least {low:g}"]
        bounds += [] if below == math.inf else [f"below {below:g}"]
        limits = f", {' and '.join(bounds)}" if bounds else ""
        raise ValueError(f"{name} must be a finite number{limits}; got {shown(value)}")


def require_whole(name: str, value: object, low: int | None = 1) -> None:
    """Raise an error that names the value unless it is a whole number, of at least ``low``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (low is not None and isinstance(value, int) and value < low):
        bound = "" if low is None else f" of at least {low}"
        raise ValueError(f"{name} must be a whole number{bound}, got {shown(value)}")
    if low is not None and isinstance(value, int) and value >= 2**63:
        raise ValueError(f"{name} must be at most {2**63 - 1}, got {shown(value)}")


def require_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if not isinstance(value, (str, type(None))) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {shown(value)}")


def raise_differences(
    what: str, found: Mapping[str, object], expected: Mapping[str, object]
) -> None:
    """Raise ``ValueError`` with the differences between a state dict and this model."""
    differences = [f"{name}: only in the state dict" for name in found if name not in expected]
    differences += [
        f"{name}: missing from the state dict" for name in expected if name not in found
    ]
    differences += [
        f"{name}: {found[name]} in the state dict, {expected[name]} here"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if differences:
        listed = "\n  ".join(differences)
        raise ValueError(
            "the state dict is from another model, or was saved with other options; its "
            f"{what} differ:\n  {listed}"
        )


def require_keys(what: str, found: object, expected: Iterable[str]) -> None:
    """Raise ``ValueError`` if a saved state lacks a key."""
    if not isinstance(found, Mapping):
        raise ValueError(f"the {what} must be a dict, got {type(found).__name__}")
    missing = [key for key in expected if key not in found]
    if missing:
        raise ValueError(
            f"the {what} is incomplete: {missing} missing; it was truncated, or saved by another "
            "optimizer"
        )


# Private parts of torch, each with a fallback for versions that lack it


def _optional(module: str) -> ModuleType | None:
    try:
        return import_module(module)
    except ImportError:
        return None


_pytree = _optional("torch.utils._pytree")


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """Return a dual tensor at the current level of forward-mode differentiation.

    Unlike ``forward_ad.make_dual``, the fallback, the first call does not load decompositions.
    """
    private = getattr(torch, "_make_dual", None)
    level = getattr(forward_ad, "_current_level", None)
    dual: Tensor
    if private is None or level is None:
        dual = forward_ad.make_dual(primal, tangent)
    else:
        dual = private(primal, tangent, level=level)
    return dual


# torch has one level of forward-mode differentiation for all threads.
_forward_level = threading.Lock()


@contextmanager
def forward_level() -> Iterator[None]:
    """Enter a level of forward-mode differentiation; raise ``RuntimeError`` if a thread has one.

    Waiting for the other thread could take forever, if that one waits for this one.
    """
    if not _forward_level.acquire(blocking=False):
        raise RuntimeError("Nested forward mode AD: another thread is at a level of its own")
    try:
        with forward_ad.dual_level():
            yield
    finally:
        _forward_level.release()


def load_decompositions() -> bool:
    """Load forward mode for the few operations that only have it by decomposition.

    This takes a quarter of a second, and few models need it.

    Returns:
        Whether anything new may have been loaded.
    """
    if "torch._decomp.decompositions_for_jvp" in sys.modules:
        return False
    try:
        with forward_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
    except RuntimeError:  # another thread has a level
        return False
    return True


def is_transformed() -> bool:
    """Return whether this code runs under forward-mode differentiation or a torch.func transform.

    If torch does not tell the current level, forward mode outside of ``torch.func`` is not seen.
    Levels of our own do not count: they may be those of another thread.
    """
    if getattr(forward_ad, "_current_level", -1) >= 0 and not _forward_level.locked():
        return True
    current = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    if current is not None and current() is None:
        return False
    try:
        torch.zeros((), device="cpu").requires_grad_()
    except RuntimeError:  # torch.func refuses requires_grad_ inside of its transforms
        return True
    return False


# torch does not promise the names of the nodes of a graph.
_ELEMENTS_KEPT_BY = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Alias", "Clone", "Permute", "ReshapeAlias", "Squeeze", "ToCopy", "Transpose"),
        *("UnsafeView", "Unsqueeze", "View", "BackwardHookFunction"),
    )
    for number in ("", "0", "1", "2")
)


def keeps_elements(node: Node) -> bool:
    """Return whether an operation only moves, copies or casts elements; false if unknown."""
    return node.name() in _ELEMENTS_KEPT_BY


def is_reentrant_checkpoint(node: Node) -> bool:
    """Return whether a node runs a part of the model again in the backward; false if unknown."""
    return node.name() == "CheckpointFunctionBackward"


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph for another one; true if unknown."""
    private = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return private is None or bool(private())


def graph_task() -> int | None:
    """Return a number that is another one in each running backward; ``None`` if unknown."""
    private = getattr(torch._C, "_current_graph_task_id", None)
    return None if private is None else int(private())


def after_backward(action: Callable[[], None]) -> None:
    """Call a function when the running backward ends, unless it fails; at once if that is unknown.

    Must be called inside of a backward.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        action()
    else:
        engine.queue_callback(action)


def will_reach(parameters: Iterable[Tensor], reached: set[Node]) -> str:
    """Return whether the running backward adds to "gradients" of parameters, or to "nothing".

    "unknown" if it is one of ``torch.autograd.grad`` for parameters, or if torch does not tell.

    Args:
        reached: the node of a parameter that an earlier backward reached, which is updated. It
            takes long to find; on accelerators it is not kept, because it belongs to a stream.
    """
    private = getattr(torch._C, "_will_engine_execute_node", None)
    if private is None:
        return "unknown"
    try:
        if any(map(private, reached)):
            return "gradients"
        reached.clear()
        for parameter in parameters:
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                if private(node):
                    if parameter.device.type == "cpu":
                        reached.add(node)
                    return "gradients"
    except RuntimeError:  # torch.autograd.grad with respect to this parameter
        return "unknown"
    return "nothing"


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a tensor is a view of; ``None`` if it is no view, or if unknown."""
    base: Tensor | None = getattr(tensor, "_base", None)
    return base


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested containers, in order."""
    if _pytree is not None:
        return list(_pytree.tree_leaves(tree))
    if not isinstance(tree, (dict, list, tuple)):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree
    return [leaf for child in children for leaf in tree_leaves(child)]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same containers with a function applied to their leaves.

    The fallback knows the containers of Python, but not those that others have registered.
    """
    if _pytree is not None:
        return _pytree.tree_map(function, tree)
    if isinstance(tree, dict):
        return type(tree)((key, tree_map(function, child)) for key, child in tree.items())
    if isinstance(tree, (list, tuple)):
        children = [tree_map(function, child) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return function(tree)


def grad_scalers() -> list[torch.amp.GradScaler]:
    """Return all gradient scalers of the process."""
    return [each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler)]


def scaler_of(optimizer: object) -> torch.amp.GradScaler | None:
    """Return the ``GradScaler`` that has unscaled the gradients of an optimizer, if it is found.

    Without torch's record of who was unscaled, the only enabled scaler of the process is returned.
    """
    found = grad_scalers()
    for scaler in found:
        if id(optimizer) in getattr(scaler, "_per_optimizer_states", {}):
            return scaler
    enabled = [scaler for scaler in found if scaler.is_enabled()]
    recorded = any(hasattr(scaler, "_per_optimizer_states") for scaler in found)
    return enabled[0] if len(enabled) == 1 and not recorded else None


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long collectives of a gloo group wait, or ``None`` if unknown."""
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def is_in_join(wrapper: DistributedDataParallel) -> bool:
    """Return whether the wrapper is inside its ``join()`` context; ``False`` if unknown."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))
