"""The objective: a closure that can be evaluated again, and the penalty of weight decay."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import all_finite, at_least_float32, finite_scalars
from kfc.distributed.reducer import Reducer
from kfc.fisher.calls import (
    SavedBuffers,
    accelerators_of,
    get_random_state,
    set_random_state,
    suspended,
)


class Objective:
    """The loss on one batch, with fixed randomness.

    With several ranks, the mean of their losses, as in DistributedDataParallel.

    Args:
        closure: runs the model on the batch and returns the loss, without its backward pass.
        argument: how the user passes the closure to ``step()``.

    Attributes:
        bad_ranks: the ranks whose loss was not finite in the last evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        closure: Callable[[], Tensor],
        reducer: Reducer,
        argument: str = "",
    ) -> None:
        if not callable(closure):
            raise TypeError(
                "step() needs a closure that runs the model and returns the loss: "
                f"optimizer.step({argument}lambda: F.cross_entropy(model(images), labels)), got "
                f"{argument}{closure!r}"
            )
        self._model = model
        self._closure = closure
        self._reducer = reducer
        self.bad_ranks: list[int] = []
        self._accelerators = accelerators_of(model)
        self._random_state = get_random_state(self._accelerators)
        self._buffers = SavedBuffers(model)

    def differentiate(self) -> tuple[Tensor, float] | None:
        """Return the loss and its mean over ranks after its backward; ``None`` if not finite."""
        self._model.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()  # it holds casts of parameters that have changed
        with torch.enable_grad():
            loss = self._closure()
            self._check(loss)
            # All ranks run the backward pass or none, because they average gradients in it.
            mean = self._mean_over_ranks(loss.item())
            if not math.isfinite(mean):
                return None
            loss.backward()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        dense = [g for g in gradients if g.layout == torch.strided]
        return (loss.detach(), mean) if bool(all_finite(finite_scalars(dense))) else None

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
        """Return the loss at the current parameters; nothing else changes."""
        torch.clear_autocast_cache()
        with torch.no_grad(), suspended(), self._initial_conditions():
            loss = self._closure()
            if isinstance(loss, Tensor) and loss.numel() != 1:
                raise TypeError(f"the loss must be one number, got shape {tuple(loss.shape)}")
            return self._mean_over_ranks(float(loss))

    def _mean_over_ranks(self, own: float) -> float:
        losses = [loss for (loss,) in self._reducer.gather([own])]
        self.bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        return sum(losses) / len(losses)

    @contextmanager
    def _initial_conditions(self) -> Iterator[None]:
        random_state, buffers = get_random_state(self._accelerators), SavedBuffers(self._model)
        self.rewind()
        try:
            yield
        finally:
            set_random_state(random_state, self._accelerators)
            buffers.restore()

    def rewind(self) -> None:
        """Return buffers and random state to what they were before the first evaluation."""
        set_random_state(self._random_state, self._accelerators)
        self._buffers.restore()


def decay_penalty(groups: Sequence[Mapping[str, Any]]) -> float:
    """Return ½ Σ weight decay · θ² over the parameters of param groups."""
    total = 0.0
    for group in groups:
        if group["weight_decay"]:
            squares = [at_least_float32(p).square().sum() for p in group["params"]]
            sums = torch.stack([square.cpu() for square in squares]).sum().item()
            total += 0.5 * float(group["weight_decay"]) * sums
    return total
