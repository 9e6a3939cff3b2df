"""A closure that can be evaluated again as it was the first time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kfc.buffers import SavedBuffers
from kfc.capture import suspended
from kfc.checks import all_finite, largest_entries
from kfc.distributed import Workers
from kfc.randomness import accelerators_of, get_random_state, set_random_state


class Objective:
    """The loss on one batch, with one draw of whatever is random in it.

    Of several ranks, the mean of their losses, as DistributedDataParallel has it.

    Args:
        closure: runs the model on the batch and returns the loss, without its backward.

    Attributes:
        bad_ranks: those whose loss was not finite when it was last evaluated.
    """

    def __init__(self, model: nn.Module, closure: Callable[[], Tensor], workers: Workers) -> None:
        if not callable(closure):
            raise TypeError(
                "step() needs a closure that runs the model and returns the loss: "
                "optimizer.step(lambda: F.cross_entropy(model(images), labels))"
            )
        self._model = model
        self._closure = closure
        self._workers = workers
        self.bad_ranks: list[int] = []
        self._accelerators = accelerators_of(model)
        self._random_state = get_random_state(self._accelerators)
        self._buffers = SavedBuffers(model)

    def differentiate(self) -> tuple[Tensor, float] | None:
        """The loss, and its mean over ranks, after its backward; ``None`` if not all is finite."""
        self._model.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()  # of casts of parameters that have moved
        with torch.enable_grad():
            loss = self._closure()
            self._check(loss)
            # All ranks go backward, or none: they average gradients on the way.
            mean = self._mean_over_ranks(loss.item())
            if not math.isfinite(mean):
                return None
            loss.backward()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        dense = [g for g in gradients if g.layout == torch.strided]
        return (loss.detach(), mean) if bool(all_finite(largest_entries(dense))) else None

    def _check(self, loss: object) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a {type(loss).__name__}"
            if isinstance(loss, Tensor):
                detail = "without a graph" if loss.numel() == 1 else f"of shape {tuple(loss.shape)}"
                found = f"a tensor {detail}"
            raise TypeError(
                "the closure must return the loss, a tensor of one number that gradients can be "
                f"taken of; it returned {found}"
            )
        if any(parameter.grad is not None for parameter in self._model.parameters()):
            raise RuntimeError(
                "the closure must return the loss without calling backward(): step() does that"
            )

    def value(self) -> float:
        """The loss at the parameters as they are now; nothing else changes."""
        torch.clear_autocast_cache()
        with torch.no_grad(), suspended(), self._as_at_first():
            return self._mean_over_ranks(float(self._closure()))

    def _mean_over_ranks(self, own: float) -> float:
        losses = [loss for (loss,) in self._workers.gather([own])]
        self.bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        return sum(losses) / len(losses)

    @contextmanager
    def _as_at_first(self) -> Iterator[None]:
        random_state, buffers = get_random_state(self._accelerators), SavedBuffers(self._model)
        self.rewind()
        try:
            yield
        finally:
            set_random_state(random_state, self._accelerators)
            buffers.restore()

    def rewind(self) -> None:
        """Buffers and random state become what they were before the first evaluation."""
        set_random_state(self._random_state, self._accelerators)
        self._buffers.restore()
