"""The line in the log that says, after the first step, how a model is treated."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kfc.curvature.description import format_bytes, layer_memory

if TYPE_CHECKING:
    from kfc.optimizers.engine import Engine

logger = logging.getLogger("kfc")


def log_start(engine: Engine) -> None:
    """Log the share of weights with curvature, its memory and cost, and the likelihood."""
    if engine.reducer.rank > 0 or not logger.isEnabledFor(logging.INFO):
        return
    sizes = {n: p.numel() for n, p in engine.model.named_parameters() if p.requires_grad}
    covered = sum(size for name, size in sizes.items() if name in engine.plan.layer_of)
    layers = [engine.curvature.layers[name] for name in engine.curvature.trained_layers()]
    running, inverse = map(sum, zip((0, 0), *map(layer_memory, layers), strict=True))
    # Costs are those of natural gradients.
    cost = [engine.allowance.describe()] if engine.curvature.options.needs_derivatives else []
    notes = [*cost, *engine.collector.losses.describe().splitlines()]
    logger.info(
        "%.1f%% of %s trained weights have curvature; memory: factors %s, inverses %s; %s",
        100 * covered / max(1, sum(sizes.values())),
        f"{sum(sizes.values()):,}",
        format_bytes(running),
        format_bytes(inverse),
        "; ".join(notes),
    )
