"""Private parts of torch, each with a fallback for versions that lack it."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel


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


def load_decompositions() -> bool:
    """Load forward mode for the few operations that only have it by decomposition.

    This takes a quarter of a second, and few models need it.

    Returns:
        Whether anything new may have been loaded.
    """
    if "torch._decomp.decompositions_for_jvp" in sys.modules:
        return False
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
    return True


def is_transformed() -> bool:
    """Return whether this code runs under forward-mode differentiation or a torch.func transform.

    If torch does not tell the current level, forward mode outside of ``torch.func`` is not seen.
    """
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return True
    try:
        torch.zeros((), device="cpu").requires_grad_()
    except RuntimeError:  # torch.func refuses requires_grad_ inside of its transforms
        return True
    return False


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph for another one; true if unknown."""
    private = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return private is None or bool(private())


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
