"""What the ranks have in common: that it is the same, who does what of it, what they send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kfc.curvature import Curvature
from kfc.distributed.consistency import require_same
from kfc.distributed.exchange import statistics_bytes
from kfc.distributed.placement import size_of

# In the place of one that a rank has not: that is a difference too.
NO_GRADIENT = torch.ones(1)


def require_equal_ranks(
    model: nn.Module, curvature: Curvature, gradients: Mapping[str, Tensor], step: int
) -> None:
    """Raise an error that names the first difference between ranks, if there is one."""
    workers = curvature.inverter.workers
    require_same(
        workers,
        {f"parameter {name!r}": p for name, p in model.named_parameters()},
        f"step {step}",
        "Ranks that differ train different models: give all the same seed, or wrap the model in "
        "DistributedDataParallel before the optimizer is made",
    )
    require_same(
        workers,
        {
            f"the gradient of {name!r}": gradients.get(name, NO_GRADIENT)
            for name, _ in model.named_parameters()
        },
        f"step {step}",
        "Wrap the model in DistributedDataParallel and run the wrapper, or average gradients over "
        "the ranks before step()",
    )
    require_same(
        workers,
        curvature.common_tensors(),
        f"step {step}",
        "The ranks compute different things from the same: do they have the same hardware and "
        'number of threads? inverse_placement="shared" sends results instead',
    )


def describe_ranks(curvature: Curvature) -> dict[str, Any] | None:
    """For ``diagnostics``: who does what, and what is sent; ``None`` for one process alone."""
    workers = curvature.inverter.workers
    if workers.size == 1:
        return None
    return {
        "rank": workers.rank,
        "size": workers.size,
        "placement": {n: p._asdict() for n, p in curvature.inverter.placements.items()},
        "sent": dict(workers.traffic),
        "expected": expected_traffic(curvature),
    }


def expected_traffic(curvature: Curvature) -> dict[str, int]:
    """Bytes that one gathering of statistics, one renewal of inverses, one step send."""
    handlers, placed = curvature.handlers, curvature.inverter.placements
    sizes = {name: size_of(handler, curvature.inverse_kind) for name, handler in handlers.items()}
    shapes = {
        n: curvature.moment_shapes(n, afresh=False) for n, h in handlers.items() if h.trained()
    }
    numbers = {name: torch.finfo(h.dtype).bits // 8 for name, h in handlers.items()}
    sent = [name for name in handlers if placed[name].owner is not None]
    return {
        "statistics": statistics_bytes(shapes, numbers, curvature.inverter.workers.size),
        "inverses": sum(sizes[n].inverse_bytes for n in sent if not placed[n].kept),
        "natural gradients": sum(sizes[n].gradient_bytes for n in sent if placed[n].kept),
    }
