"""What a backward pass says about the loss: its likelihood, and the weights of its terms."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kfc._helpers import require_keys
from kfc.fisher.fit import Fit, hardness
from kfc.fisher.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Weights
from kfc.fisher.reading import Reading, smoothed_weight

# The loss is examined in the first backward pass, and again after this many steps.
EXAMINATION_PERIOD = 1000


class LossMismatchError(ValueError):
    """The derivative of the loss does not fit the likelihood."""


class Loss:
    """The loss of one output of the model, as its backward passes show it.

    Args:
        likelihood: what the outputs parametrise; ``None``: chosen from the first backward pass.
        strict: raise an error if the loss does not fit the likelihood; otherwise warn once.
        name: the name of the output, if there are several.

    Attributes:
        likelihood: the likelihood; ``None`` until it is chosen.
        is_read: whether weights are read from the derivative; otherwise they follow the reduction.
        reason: why this likelihood was chosen.
    """

    def __init__(self, likelihood: Likelihood | None, *, strict: bool, name: str = "") -> None:
        self.likelihood = likelihood
        self.is_read = False
        self.reason = "" if likelihood is None else "given"
        self._strict = strict
        self._name = name
        self._examined_at: int | None = None
        self._warned = False
        # Weights of one value (0 or 1) as targets, so that every reading counts.
        self._is_hard = False
        # The likelihood was chosen, but another batch may lead to another choice.
        self._is_provisional = False
        # All derivatives so far were zero, or not finite.
        self._is_silent = True
        # The weight of terms that cannot be read.
        self._typical: Tensor | None = None
        # If weights are not read: their ratio to those of the reduction.
        self._scale = self._least_scale = 1.0
        self._scale_is_settled = True

    # Examination

    def needs_examination(self, step: int) -> bool:
        last = self._examined_at
        return last is None or step - last >= EXAMINATION_PERIOD

    def examine(self, outputs: Tensor, derivative: Tensor, step: int) -> None:
        """Choose the likelihood, check that it fits, and decide how weights are read.

        This waits for the device. A derivative that is zero or not finite says nothing.
        """
        size = float(derivative.abs().amax()) if derivative.numel() else 0.0
        if not 0 < size < float("inf"):
            if self.likelihood is None:
                # The step is skipped, or its curvature is zero: any likelihood will do.
                self.likelihood, self._is_provisional = _by_shape(outputs), True
                self.reason = "assumed from the shape of the outputs"
            return
        self._is_silent = False
        fit = Fit(outputs, derivative)
        if self.likelihood is None or self._is_provisional:
            self.likelihood, self.reason, advice = fit.choose()
            self._is_provisional = not fit.is_decisive(self.likelihood)
            what = "the likelihood cannot be told from the loss"
        else:
            advice = fit.mismatch(self.likelihood)
            what = f"the loss does not fit {self.likelihood}"
        self.likelihood.validate(outputs)
        if advice:
            self._report(f"{what}: {advice}")
        self._decide(fit)
        if not self._is_provisional:
            self._examined_at = step

    def assume(self, outputs: Tensor) -> None:
        """Choose the likelihood from the outputs alone, because the derivative cannot be told."""
        self._is_silent = False
        if self.likelihood is None:
            self.likelihood = _by_shape(outputs)
            self.reason = "assumed from the shape of the outputs"
            self._report(
                f"the derivative of the loss in the model's output cannot be told, so that "
                f"{self.likelihood} is assumed; pass likelihood=, and let output= only select or "
                "reshape"
            )

    def _decide(self, fit: Fit) -> None:
        assert self.likelihood is not None
        outputs, derivative = fit.outputs, fit.derivative
        reading = self.likelihood.read(outputs, derivative)
        self.is_read = self._is_hard = False
        self._scale, self._scale_is_settled = 1.0, True
        if reading is None:
            return
        typical, count = reading.typical()
        if not count:
            typical, count = _smoothed(self.likelihood, outputs, derivative)
        if count:
            self.is_read, self._typical = True, typical
            return
        # Targets of two values, or mixtures of classes.
        assumed = self.likelihood.term_weight(outputs)
        uniform = None
        if fit.has_two_classes(self.likelihood):
            self._is_hard, uniform = hardness(fit.precise(reading), assumed)
        if self._is_hard:
            self.is_read = True
            return
        least = float(reading.weights.amax())
        self._least_scale = 1.0 if uniform is None else 0.0
        self._scale = max(self._least_scale, (uniform or least) / assumed)
        self._scale_is_settled = self._scale == 1

    def _report(self, message: str) -> None:
        if self._name:
            message = f"output {self._name!r}: {message}"
        if self._strict:
            raise LossMismatchError(message)
        if not self._warned:
            self._warned = True
            warnings.warn(f"{message}. The curvature may have a wrong scale.", stacklevel=2)

    # Weights

    def weights(self, outputs: Tensor, derivative: Tensor) -> Weights:
        """Return the weights of the terms of one backward pass; does not wait for the device."""
        assert self.likelihood is not None
        reading = self.likelihood.read(outputs, derivative)
        if reading is None or not (self.is_read or self._is_silent):
            return self._scale * self.likelihood.term_weight(outputs)
        if self._is_hard or self._is_silent:
            return reading.weights
        assert self._typical is not None
        self._typical = self._next_typical(reading, outputs, derivative)
        return reading.filled(self._typical)

    def _next_typical(self, reading: Reading, outputs: Tensor, derivative: Tensor) -> Tensor:
        assert self._typical is not None
        before = self._typical.to(reading.weights)
        smoothed, certain = _smoothed(self.likelihood, outputs, derivative)
        before = torch.where(certain, smoothed.to(before), before)
        mean, count = reading.typical()
        return torch.where(count > 0, mean, before)

    def settle(self, loss_scale: float | Tensor) -> float | Tensor:
        """Return the factor of weights that removes the loss scale, once that is known."""
        if self.is_read:
            return 1 / loss_scale
        if self._scale_is_settled:
            return 1.0
        before = self._scale
        self._scale = max(self._least_scale, before / float(loss_scale))
        self._scale_is_settled = True
        return self._scale / before

    def describe(self) -> str:
        """Return the likelihood, why it was chosen, and where the weights of terms come from."""
        output = f"output {self._name!r}: " if self._name else ""
        if self.likelihood is None:
            return f"loss: {output}chosen in the first backward pass"
        source = "read from the loss" if self.is_read else "as the reduction says"
        return f"loss: {output}{self.likelihood} ({self.reason}), weights of terms {source}"

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        likelihood = self.likelihood
        chosen = None if likelihood is None else type(likelihood).__name__
        return {
            "likelihood": chosen,
            "axis": likelihood.axis if isinstance(likelihood, Categorical) else 1,
            "reason": self.reason,
            "is_read": self.is_read,
            "is_hard": self._is_hard,
            "examined_at": self._examined_at,
            "is_provisional": self._is_provisional,
            "typical": None if self._typical is None else float(self._typical),
            "scale": self._scale,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state belongs to the same likelihood."""
        require_keys("state of the loss", state, self.state_dict())
        is_open = self.likelihood is None or self._is_provisional
        own = None if is_open else type(self.likelihood).__name__
        if own is not None and state["likelihood"] not in (None, own):
            raise ValueError(
                f"the state dict was saved with the likelihood {state['likelihood']}, but this "
                f"optimizer has {own}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._is_provisional:
            self.likelihood = None
        if self.likelihood is None and state["likelihood"] is not None:
            chosen = {"Categorical": Categorical(axis=state["axis"]), "Bernoulli": Bernoulli()}
            self.likelihood = chosen.get(state["likelihood"], Gaussian())
        self.reason = state["reason"]
        self.is_read, self._is_hard = state["is_read"], state["is_hard"]
        self._examined_at = state["examined_at"]
        self._is_provisional = state["is_provisional"]
        typical = state["typical"]
        self._typical = None if typical is None else torch.tensor(typical, dtype=torch.float64)
        self._scale, self._scale_is_settled = state["scale"], True
        self._is_silent = state["examined_at"] is None


def _by_shape(outputs: Tensor) -> Likelihood:
    return Categorical() if outputs.dim() > 1 and outputs.shape[1] > 1 else Gaussian()


def _smoothed(
    likelihood: Likelihood | None, outputs: Tensor, derivative: Tensor
) -> tuple[Tensor, Tensor]:
    if not isinstance(likelihood, Categorical) or outputs.shape[likelihood.axis] < 4:
        nothing = torch.zeros((), device=outputs.device)
        return nothing, nothing.bool()
    return smoothed_weight(outputs, derivative, likelihood.axis)
