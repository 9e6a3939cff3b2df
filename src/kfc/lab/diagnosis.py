"""Diagnosis of a run that diverges: by what it is noticed, where it begins, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from kfc.distributed.reducer import named_ranks
from kfc.lab.config import RunConfig
from kfc.lab.method import Optimizer
from kfc.optimizers.base import CurvatureOptimizer

# A loss this many times that of the initial parameters, or of 1 if that is larger, has diverged.
MOST_GROWTH = 1000.0
MOST_SKIPPED_IN_A_ROW = 10
ADVICE = {
    "kfc": "try a smaller --lr or a larger --damping",
    "kfac": "try a larger --initial-model-damping",
    "whitened-adam": "try a smaller --lr or a larger --damping",
    "muon": "try a smaller --lr or --adamw-lr",
}


class DivergenceWatch:
    """Notices that a run diverges: by its loss, or by steps that are skipped one after another.

    Attributes:
        first_loss: the loss of the initial parameters; NaN if unknown.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.first_loss = math.nan
        self._engine = optimizer.engine if isinstance(optimizer, CurvatureOptimizer) else None
        self._update = 0  # when the skipped steps were last counted
        self._skipped = 0
        self._in_a_row = 0

    def begin(self, first_loss: float, update: int = 0) -> None:
        """Start to watch after this update."""
        self.first_loss, self._update, self._in_a_row = first_loss, update, 0
        self._skipped = self._count()

    def sign_in_loss(self, loss: float) -> str:
        """Return how a loss shows that the run has diverged; an empty string if it does not."""
        if not math.isfinite(loss):
            return "the loss is not finite"
        limit = MOST_GROWTH * max(self.first_loss, 1.0)
        if loss <= limit or math.isnan(self.first_loss):
            return ""
        return f"the loss is {loss:.3g}, and was {self.first_loss:.3g} at the beginning,"

    def sign_in_steps(self, update: int) -> str:
        """Return how skipped steps show that the run has diverged; waits for the device."""
        skipped = self._count()
        all_skipped = skipped - self._skipped == update - self._update
        self._in_a_row = self._in_a_row + update - self._update if all_skipped else 0
        self._update, self._skipped = update, skipped
        if self._in_a_row < MOST_SKIPPED_IN_A_ROW:
            return ""
        return f"{self._in_a_row} steps in a row were skipped, without finite gradients,"

    def _count(self) -> int:
        return 0 if self._engine is None else self._engine.skipped_steps.count()


def find_origin(ranks: Sequence[Sequence[float]]) -> tuple[int, str]:
    """Return the rank on which a run began to diverge, and how; "" if all ranks are alike.

    Args:
        ranks: for each rank, its last loss and the first update with non-finite gradients (∞ if
            none).
    """
    began = min(since for _, since in ranks)
    first = [rank for rank, (_, since) in enumerate(ranks) if since == began]
    bad = [rank for rank, (loss, _) in enumerate(ranks) if not math.isfinite(loss)]
    if began < math.inf and len(first) < len(ranks):
        return first[0], f"it began with the gradients of {named_ranks(first)} at update {began:g}"
    if 0 < len(bad) < len(ranks):
        return bad[0], f"only the loss of {named_ranks(bad)} is not finite"
    return 0, ""


def diagnose(
    sign: str,
    model: nn.Module,
    images: Tensor,
    update: int,
    config: RunConfig,
    diagnostics: Mapping[str, Any],
) -> str:
    """Describe a run that has diverged, on the batch that showed it.

    Args:
        sign: by what it was noticed.
    """
    rate = "" if config.method.lr is None else f" (lr {config.method.lr:g})"
    parts = [f"{sign} after {update} updates{rate}"]
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
    return "; ".join([*parts, ADVICE.get(config.method.optimizer, "try a smaller --lr")])


@torch.no_grad()
def _first_bad_layer(model: nn.Module, images: Tensor) -> str | None:
    """Return the name of the first module in the forward pass whose output is not finite."""
    leaves = {module: name for name, module in model.named_modules() if not any(module.children())}
    found: list[str] = []

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        if module in leaves and isinstance(output, Tensor) and not output.isfinite().all():
            found.append(leaves[module])

    was_training = model.training
    try:
        with register_module_forward_hook(watch):
            model.eval()(images)
    finally:
        model.train(was_training)
    return found[0] if found else None


def described(layer: nn.Module) -> str:
    """Return the type of a layer and its numbers of inputs and outputs, where it has them."""
    kind = type(layer).__name__
    for names in (("in_channels", "out_channels"), ("in_features", "out_features")):
        if all(hasattr(layer, name) for name in names):
            inputs, outputs = (getattr(layer, name) for name in names)
            return f"{kind} {inputs}→{outputs}"
    return kind


def diagnostics_of(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the optimizer's diagnostics without its timings, and with a description of layers."""
    if not isinstance(optimizer, CurvatureOptimizer):
        return {}
    timing = ("seconds", "total_seconds")
    found = {key: value for key, value in optimizer.diagnostics.items() if key not in timing}
    modules = dict(model.named_modules())
    layers = {
        name: {"kind": described(modules[name]), **own} if name in modules else own
        for name, own in found.get("layers", {}).items()
    }
    return {**found, "layers": layers} if layers else found
