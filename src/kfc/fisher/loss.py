"""What a backward pass says about the loss: its likelihood, and the weights of its terms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfc._helpers import (
    grad_scalers,
    is_asynchronous,
    require_choice,
    require_keys,
    require_number,
    require_whole,
)
from kfc.fisher.fit import Fit, two_class_mode
from kfc.fisher.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Weights
from kfc.fisher.reading import Reading, read_classes, smoothed_weight

# The loss is examined in the first backward pass, and again after this many steps.
EXAMINATION_PERIOD = 1000
UNTIL_DERIVATIVE = "assumed until the loss has a derivative"
AUTOMATIC = ("Categorical", "Bernoulli", "Gaussian")
# torch has no tensors of more dimensions.
MOST_DIMENSIONS = 64
MODES = ("silent", "terms", "elements", "largest", "assumed")


class LossMismatchError(ValueError):
    """The derivative of the loss does not fit the likelihood."""


class Terms(NamedTuple):
    """What is known about the terms of one backward pass.

    Attributes:
        weights: c.
        excess: the loss minus the least it could be, if it was found together with the weights.
    """

    weights: Weights
    excess: Tensor | None = None


class Loss:
    """The loss of one output of the model, as its backward passes show it.

    Weights of terms contain the loss scale, if the loss was multiplied by one.

    Args:
        likelihood: what the outputs parametrise; ``None``: chosen from the first backward pass.
        strict: raise an error if the loss does not fit the likelihood; otherwise warn once.
        quiet: neither raise nor warn, because the scale of the curvature is not needed.
        name: the name of the output, if there are several.

    Attributes:
        likelihood: the likelihood; ``None`` until it is chosen.
        reason: why this likelihood was chosen.
        mode: how weights are found. ``"silent"``: no usable derivative has arrived yet.
            ``"terms"``: they are certain, at least for some terms. ``"elements"``: every reading
            counts, because targets are 0 or 1. ``"largest"``: all are the largest reading.
            ``"assumed"``: as given by the reduction.
        layers: the names of the layers that compute the output; ``None`` if unknown.
    """

    def __init__(
        self, likelihood: Likelihood | None, *, strict: bool, quiet: bool = False, name: str = ""
    ) -> None:
        self.likelihood = likelihood
        self.reason = "" if likelihood is None else "given"
        self.mode = "silent"
        self.layers: set[str] | None = None
        self._fits = True
        self._quiet = quiet
        self._is_automatic = likelihood is None
        self._strict = strict
        self._name = name
        self._examined_at: int | None = None
        self._warned = False
        # The weight of terms that cannot be read, relative to that of the reduction.
        self._typical: Tensor | float = 1.0
        # Whether no target was one class when the loss was examined, as with label smoothing.
        self._is_smoothed = True

    @property
    def is_readable(self) -> bool:
        """Whether the likelihood can read weights; if it is not chosen yet, it may."""
        return self.likelihood is None or type(self.likelihood).read is not Likelihood.read

    @property
    def is_read(self) -> bool:
        """Whether weights are read from the loss."""
        return self.mode in ("terms", "elements", "largest")

    @property
    def tells_excess(self) -> bool:
        """Whether the excess of the loss follows from its derivative."""
        return self.likelihood is not None and self._fits

    @property
    def independent_layers(self) -> set[str] | None:
        """The layers that compute the output if its Fisher matrix is diagonal, else an empty set.

        ``None`` while the layers or the likelihood are unknown.
        """
        if self.likelihood is None or self.layers is None or self.reason == UNTIL_DERIVATIVE:
            return None
        return self.layers if self.likelihood.is_elementwise else set()

    def note_layers(self, layers: Collection[str]) -> None:
        """Add layers that compute the output."""
        self.layers = {*(self.layers or ()), *layers}

    # Examination

    def needs_examination(self, step: int) -> bool:
        if self._examined_at is None:
            return True
        # Whether targets are 0 or 1, or mixtures, may change from batch to batch.
        is_clear = self.mode == "terms" or not self.is_readable
        period = EXAMINATION_PERIOD if is_clear else EXAMINATION_PERIOD // 10
        return step - self._examined_at >= max(1, period)

    def examine(self, outputs: Tensor, derivative: Tensor, step: int) -> None:
        """Choose the likelihood, check that it fits, and decide how weights are read.

        This waits for the device. A derivative that is zero or not finite is ignored.
        """
        size = float(derivative.abs().amax()) if derivative.numel() else 0.0
        if not 0 < size < float("inf"):
            if self.likelihood is None:
                self.likelihood = _by_shape(outputs)
                self.reason = UNTIL_DERIVATIVE
            return
        fit = Fit(outputs, derivative)
        if self.likelihood is None or (self._is_automatic and self._examined_at is None):
            self.likelihood, self.reason, advice = fit.choose()
            self._fits = True  # an earlier report was about an earlier choice
            what = "the likelihood cannot be determined from the loss"
        else:
            advice = fit.mismatch(self.likelihood)
            what = f"the loss does not fit {self.likelihood}"
        self.likelihood.validate(outputs)
        if advice:
            self._report(f"{what}: {advice}")
        self._decide(fit)
        if fit.is_decisive(self.likelihood):
            self._examined_at = step

    def assume(self, outputs: Tensor) -> None:
        """Choose the likelihood from the outputs alone, because the derivative is unknown."""
        if self.likelihood is None:
            self.likelihood = _by_shape(outputs)
            self.reason = "assumed from the shape of the outputs"
        self._report(
            f"the derivative of the loss with respect to the output is unknown, so "
            f"{self.likelihood} with its own reduction is assumed; make output= return every "
            "tensor that the loss uses, unchanged or reshaped"
        )

    def _decide(self, fit: Fit) -> None:
        assert self.likelihood is not None
        reading = self.likelihood.read(fit.outputs, fit.derivative)
        if reading is None:
            self.mode = "assumed"
            return
        _, count = reading.typical()
        self._is_smoothed = not count
        if count or self._smoothed(fit.outputs, fit.derivative)[1]:
            self.mode = "terms"
        elif self.mode == "terms":
            pass  # a batch of mixtures does not discard what earlier batches established
        elif fit.has_two_classes(self.likelihood):
            assumed = self.likelihood.term_weight(fit.outputs)
            agree = fit.agree(reading)
            self.mode = two_class_mode(fit.precise(reading), assumed, fit.tie, agree=agree)
        else:
            self.mode = "assumed"
            self._check_size(fit, float(reading.weights.amax()))

    def _check_size(self, fit: Fit, least: float) -> None:
        """Report weights that cannot be read, but are larger than the reduction says."""
        assert self.likelihood is not None
        assumed = self.likelihood.term_weight(fit.outputs)
        is_scaled = any(scaler.is_enabled() for scaler in grad_scalers())
        if least > (1.01 + fit.tie) * assumed and not is_scaled:
            self._report(
                f"the loss is larger than {self.likelihood} says: the weight of a term is at least "
                f"{least:.3g}, not {assumed:.3g}, which its reduction says. It cannot be read, "
                'because targets are mixtures of classes; pass kfc.Categorical("sum"), or weight='
            )

    def _report(self, message: str) -> None:
        self._fits = False
        if self._quiet:
            return
        if self._name:
            message = f"output {self._name!r}: {message}"
        if self._strict:
            raise LossMismatchError(message)
        if not self._warned:
            self._warned = True
            warnings.warn(f"{message}. The curvature may have a wrong scale.", stacklevel=2)

    # Weights

    def terms(self, outputs: Tensor, derivative: Tensor | None, assumed: Tensor | float) -> Terms:
        """Return the terms of one backward pass; does not wait for an accelerator.

        Args:
            derivative: the derivative of the loss; ``None`` if unknown.
            assumed: the weight of a term, as given by the reduction and the loss scale.
        """
        # A subclass may read weights, or define the excess, in another way.
        is_plain = self.mode == "terms" and type(self.likelihood) is Categorical
        if is_plain and derivative is not None and not is_asynchronous(outputs.device):
            assert isinstance(self.likelihood, Categorical)
            classes = read_classes(outputs, derivative, self.likelihood.axis)
            if classes is not None:
                typical = classes.weights.mean().item() / float(assumed)
                self._typical = typical if math.isfinite(typical) else self._typical
                return Terms(*classes)
        return Terms(self._weights(outputs, derivative, assumed))

    def _weights(
        self, outputs: Tensor, derivative: Tensor | None, assumed: Tensor | float
    ) -> Weights:
        assert self.likelihood is not None
        reading = None if derivative is None else self.likelihood.read(outputs, derivative)
        if reading is None or derivative is None:
            return assumed
        if self.mode in ("silent", "elements"):
            return reading.weights
        largest = reading.weights.amax()
        if self.mode == "largest":
            return largest
        self._typical = self._next_typical(reading, outputs, derivative, assumed)
        typical = self._typical * torch.as_tensor(assumed).to(largest)
        if self.mode == "assumed":
            # No target allows a weight below the largest reading.
            typical = torch.maximum(largest, typical)
        return reading.filled(typical)

    def _next_typical(
        self, reading: Reading, outputs: Tensor, derivative: Tensor, assumed: Tensor | float
    ) -> Tensor:
        before = torch.as_tensor(self._typical).to(reading.weights)
        assumed = torch.as_tensor(assumed).to(before)
        if self._is_smoothed:
            smoothed, certain = self._smoothed(outputs, derivative)
            before = torch.where(certain, smoothed.to(before) / assumed, before)
        mean, count = reading.typical()
        latest = mean / assumed
        return torch.where((count > 0) & torch.isfinite(latest), latest, before)

    def _smoothed(self, outputs: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.likelihood, Categorical):
            return smoothed_weight(outputs, derivative, self.likelihood.axis)
        if isinstance(self.likelihood, Bernoulli):  # two classes with logits 0 and z
            logits = torch.stack([torch.zeros_like(outputs), outputs])
            return smoothed_weight(logits, torch.stack([-derivative, derivative]), 0)
        nothing = torch.zeros((), device=outputs.device)
        return nothing, nothing.bool()

    def describe(self) -> str:
        """Return the likelihood, why it was chosen, and where the weights of terms come from."""
        output = f"output {self._name!r}: " if self._name else ""
        if self.likelihood is None:
            return f"loss: {output}chosen in the first backward pass"
        source = "read from the loss" if self.is_read else "as given by the reduction"
        return f"loss: {output}{self.likelihood} ({self.reason}), weights of terms {source}"

    def snapshot(self) -> tuple[Any, ...]:
        """Return what is known of the loss, to be passed to ``restore()``."""
        known = self.likelihood, self.reason, self.mode, self._fits
        return *known, self._examined_at, self._typical, self._is_smoothed

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Return to what was known earlier."""
        self.likelihood, self.reason, self.mode, self._fits, *rest = snapshot
        self._examined_at, self._typical, self._is_smoothed = rest

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        likelihood = self.likelihood
        return {
            "likelihood": None if likelihood is None else type(likelihood).__name__,
            "axis": likelihood.axis if isinstance(likelihood, Categorical) else 1,
            "reason": self.reason,
            "mode": self.mode,
            "fits": self._fits,
            "examined_at": self._examined_at,
            "typical": float(self._typical),
            "smoothed": self._is_smoothed,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state belongs to the same likelihood."""
        own = self.state_dict()
        require_keys("state of the loss", state, own)
        what = f"output {self._name!r}: " if self._name else ""
        what = f"the state of the loss: {what}"
        require_choice(f"{what}mode", state["mode"], MODES)
        known = (None, *AUTOMATIC) if self._is_automatic else (None, own["likelihood"], *AUTOMATIC)
        require_choice(f"{what}likelihood", state["likelihood"], known)
        require_whole(f"{what}axis", state["axis"], low=None)
        if not 0 < abs(state["axis"]) <= MOST_DIMENSIONS:
            raise ValueError(f"{what}axis must be a dimension of the outputs, got {state['axis']}")
        if state["examined_at"] is not None:
            require_whole(f"{what}examined_at", state["examined_at"])
        require_number(f"{what}typical", state["typical"])
        for name, kind in (("reason", str), ("fits", bool), ("smoothed", bool)):
            if not isinstance(state[name], kind):
                raise ValueError(f"{what}{name} must be a {kind.__name__}, got {state[name]!r}")
        is_known = state["mode"] != "silent" or state["examined_at"] is not None
        if is_known and self._is_automatic and state["likelihood"] is None:
            raise ValueError(f"{what}likelihood must not be None: the loss was examined")
        for name in ("likelihood", "axis"):
            differs = own["likelihood"] is not None and state[name] != own[name]
            if differs and state["likelihood"] is not None and not self._is_automatic:
                raise ValueError(
                    f"the state dict was saved with the {name} {state[name]!r} of the loss, but "
                    f"this optimizer has {own[name]!r}"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._is_automatic:
            chosen = {
                "Categorical": Categorical(axis=state["axis"]),
                "Bernoulli": Bernoulli(),
                "Gaussian": Gaussian(),
            }
            self.likelihood = chosen.get(state["likelihood"] or "")
        self.reason, self.mode, self._fits = state["reason"], state["mode"], state["fits"]
        self._examined_at, self._typical = state["examined_at"], state["typical"]
        self._is_smoothed = state["smoothed"]


def _by_shape(outputs: Tensor) -> Likelihood:
    return Categorical() if outputs.dim() > 1 and outputs.shape[1] > 1 else Gaussian()
