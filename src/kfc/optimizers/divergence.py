"""Signs that training has diverged: steps skipped in a row, and a loss far above its start."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kfc._helpers import require_keys, require_number, require_whole

# This many steps in a row, skipped or with a loss far above its start, are a divergence.
PATIENCE = 10
# The loss is far above its start if it is this many times the largest loss of the first steps.
FAR_ABOVE = 1000.0
FIRST_STEPS = 10
# The number of parameters in a message.
MOST_NAMES = 5


class Divergence:
    """Counts the signs of divergence, and warns once.

    The loss is its excess, the loss minus the least it could be for the targets of the batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.skipped_in_a_row = 0
        self._largest_at_start = 0.0
        self._first_steps = 0  # the number so far
        self._high_in_a_row = 0
        self._last_loss = self._loss_of_step = math.nan
        self._warned = False

    def skip(self) -> None:
        """Count a step that was skipped because values were not finite."""
        self.skipped_in_a_row += 1
        self._loss_of_step = math.nan
        self._warn()

    def see(self, loss: float) -> None:
        """Note the loss on the batch of the step in progress."""
        self._loss_of_step = loss

    def end_step(self, *, is_good: bool) -> None:
        """Count a step; its loss is ignored if it is not finite.

        Args:
            is_good: whether the step is known to be good; otherwise only the device knows.
        """
        if is_good:
            self.skipped_in_a_row = 0
        loss, self._loss_of_step = self._loss_of_step, math.nan
        if not math.isfinite(loss):
            return
        self._last_loss = loss
        if self._first_steps < FIRST_STEPS:
            self._first_steps += 1
            self._largest_at_start = max(self._largest_at_start, loss)
        is_high = self._first_steps >= FIRST_STEPS and loss > FAR_ABOVE * self._largest_at_start > 0
        self._high_in_a_row = self._high_in_a_row + 1 if is_high else 0
        self._warn()

    def reason(self) -> str | None:
        """Return why training has diverged, naming parameters; ``None`` if it has not."""
        if self.skipped_in_a_row >= PATIENCE:
            return (
                f"the last {self.skipped_in_a_row} steps were skipped; "
                f"{describe_parameters(self._model)}"
            )
        if self._high_in_a_row >= PATIENCE:
            return (
                f"the loss on the last {self._high_in_a_row} batches was more than {FAR_ABOVE:g} "
                f"times that of the first steps: {self._last_loss:.3g}, and "
                f"{self._largest_at_start:.3g} then; "
                f"{describe_parameters(self._model)}"
            )
        return None

    def _warn(self) -> None:
        if self._warned or max(self.skipped_in_a_row, self._high_in_a_row) < PATIENCE:
            return
        self._warned = True
        warnings.warn(
            f"training has diverged: {self.reason()}. Use a smaller lr, larger batches or a larger "
            "damping, and start again from a state before the divergence",
            stacklevel=2,
        )

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self._largest_at_start,
            "seen": self._first_steps,
            "high": self._high_in_a_row,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state is one that ``state_dict()`` returns."""
        counts = ("seen", "high", "skipped_in_a_row")
        require_keys("state of the divergence", state, ("start", *counts))
        require_number("the state's start of the divergence", state["start"])
        for name in counts:
            require_whole(f"the state's {name} of the divergence", state[name], low=0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._largest_at_start, self._first_steps = state["start"], state["seen"]
        self._high_in_a_row = state["high"]
        self.skipped_in_a_row = state["skipped_in_a_row"]


def bad_values(model: nn.Module) -> str:
    """Return which gradients of a model are not finite, as a clause of a sentence."""
    named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    bad = [name for name, gradient in named if not _is_finite(gradient)]
    if not bad:
        return "the statistics of layers, or the Fisher norm, are not finite"
    if len(bad) == len(named):
        return f"the gradients of all parameters are not finite: {_listed(bad)}"
    return f"the gradients of {_listed(bad)} are not finite"


def describe_parameters(model: nn.Module) -> str:
    """Return which parameters or gradients are not finite, or else the largest parameters."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel()]
    bad = [name for name, parameter in named if not _is_finite(parameter)]
    if bad:
        return f"parameters that are not finite: {_listed(bad)}"
    has_bad = any(p.grad is not None and not _is_finite(p.grad) for _, p in named)
    sizes = sorted(((float(p.detach().abs().max()), n) for n, p in named), reverse=True)
    largest = ", ".join(f"{size:.3g} in {name!r}" for size, name in sizes[:3])
    gradients = f"{bad_values(model)}; " if has_bad else ""
    return f"{gradients}the largest entries of parameters are {largest}"


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(map(repr, names[:MOST_NAMES])) + more
