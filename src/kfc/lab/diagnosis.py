"""Diagnosis of a run that has diverged: where NaN appears first, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfc.optimizers.skipping import named_ranks

ADVICE = {
    "kfc": "try a smaller --lr or a larger --damping",
    "kfac": "try a larger --initial-model-damping",
    "muon": "try a smaller --lr or --adamw-lr",
}


class Origin(NamedTuple):
    """The rank on which a run began to diverge.

    Attributes:
        rank: one of them, if there are several.
        description: empty if all ranks are alike.
    """

    rank: int
    description: str


def find_origin(ranks: Sequence[Sequence[float]]) -> Origin:
    """Return the rank on which a run began to diverge.

    Args:
        ranks: of each rank its last loss, and the first of the updates whose gradients were not
            finite there (∞ if they are finite).
    """
    began = min(since for _, since in ranks)
    first = [rank for rank, (_, since) in enumerate(ranks) if since == began]
    bad = [rank for rank, (loss, _) in enumerate(ranks) if not math.isfinite(loss)]
    if began < math.inf and len(first) < len(ranks):
        return Origin(
            first[0], f"it began with the gradients of {named_ranks(first)} at update {began:g}"
        )
    if 0 < len(bad) < len(ranks):
        return Origin(bad[0], f"only the loss of {named_ranks(bad)} is not finite")
    return Origin(0, "")


def diagnose(
    model: nn.Module,
    images: Tensor,
    *,
    update: int,
    optimizer: str,
    lr: float | None,
    diagnostics: Mapping[str, Any],
) -> str:
    """Describe a loss that is not finite, on the batch that caused it."""
    rate = "" if lr is None else f" (lr {lr:g})"
    parts = [f"the loss is not finite after {update} updates{rate}"]
    if not torch.isfinite(images).all():
        parts.append("the images themselves are not finite")
    bad = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        parts.append(f"parameters that are not finite: {', '.join(bad[:5])}{more}")
    else:
        largest, name = max((p.detach().abs().max().item(), n) for n, p in model.named_parameters())
        parts.append(f"all parameters are finite, the largest entry is {largest:.3g}, in {name}")
        if first := _first_bad_layer(model, images):
            parts.append(f"the first layer whose output is not finite is {first}")
    if diagnostics.get("fisher_norm") is not None:
        parts.append(
            f"the last Fisher norm was {diagnostics['fisher_norm']:.3g}, "
            f"{diagnostics['skipped_steps']} steps were skipped"
        )
    return "; ".join([*parts, ADVICE.get(optimizer, "try a smaller --lr")])


@torch.no_grad()
def _first_bad_layer(model: nn.Module, images: Tensor) -> str | None:
    """Return the name of the first module in the forward pass whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(name)

        return hook

    leaves = [(n, m) for n, m in model.named_modules() if not any(m.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    was_training = model.training
    try:
        model.eval()
        model(images)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return found[0] if found else None
