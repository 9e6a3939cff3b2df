"""The losses of all outputs of a model, whose sum is minimised."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from kfc._helpers import require_keys, require_number
from kfc.fisher.heads import LikelihoodChoice, Output, named, select_outputs, usual_output
from kfc.fisher.likelihoods import Likelihood, resolve_likelihood, validate_outputs
from kfc.fisher.loss import Loss, Terms


class Losses:
    """The loss of every output of a model, by name; the Fisher matrix of a sum is the sum.

    Args:
        choice: the likelihood, or a dict with that of each output; ``"auto"``: from the loss.
        output: selects the tensor of outputs, or a dict of them, from what the model returns.
        strict: raise an error if the loss does not fit the likelihood, instead of a warning.
        quiet: do neither, because the scale of the curvature is not needed.
    """

    def __init__(
        self,
        choice: LikelihoodChoice,
        output: Output | None,
        *,
        strict: bool,
        quiet: bool = False,
    ) -> None:
        self.output = output
        self.by_name: dict[str, Loss] = {}
        for name, each in named(choice).items():
            likelihood = None if each == "auto" else resolve_likelihood(each, "auto")
            self.by_name[name] = Loss(likelihood, strict=strict, quiet=quiet, name=name)
        # The ratio of the weights that were read to those of the reduction.
        self._ratio: Tensor | float = 1.0
        reductions = {likelihood.reduction for likelihood in self.likelihoods.values()}
        if len(reductions) > 1:
            raise ValueError(
                f"the likelihoods of all outputs must have the same reduction, got "
                f"{sorted(reductions)}"
            )

    def select(self, result: Any) -> dict[str, Tensor]:
        """Return the outputs by name, from what the model returned."""
        if self.output is None and not isinstance(result, Tensor) and list(self.by_name) == [""]:
            self.output = usual_output(result)  # for good: passes without gradients tell less
        outputs = select_outputs(result, self.output, list(self.by_name))
        for name, loss in self.by_name.items():
            validate_outputs(outputs[name], loss.likelihood or "the optimizer")
            if loss.likelihood is not None:
                loss.likelihood.check_shape(outputs[name])
        return outputs

    def note_layers(self, layers: Mapping[str, Collection[str]]) -> None:
        """Record which layers compute the outputs, by the name of the output."""
        for name, found in layers.items():
            self.by_name[name].note_layers(found)

    def independent_layers(self) -> set[str] | None:
        """Return the layers that compute outputs whose Fisher matrix is diagonal.

        ``None`` if the layers or the likelihood of an output are unknown yet.
        """
        found: set[str] = set()
        for loss in self.by_name.values():
            own = loss.independent_layers
            if own is None:
                return None
            found |= own
        return found

    @property
    def likelihoods(self) -> dict[str, Likelihood]:
        """The likelihoods, by the name of the output."""
        found = {name: loss.likelihood for name, loss in self.by_name.items()}
        return {name: likelihood for name, likelihood in found.items() if likelihood is not None}

    @property
    def is_summed(self) -> bool:
        """Whether the weights of terms do not depend on the number of examples in the step.

        True if weights may be read from the loss. This does not depend on data, so all ranks agree.
        """
        readable = any(loss.is_readable for loss in self.by_name.values())
        return readable or any(each.reduction == "sum" for each in self.likelihoods.values())

    def growth(self, part: float, whole: float) -> float:
        """Return the ratio of the loss's curvature on ``whole`` examples to that on ``part``."""
        return whole / part if self.is_summed else 1.0

    def terms(
        self,
        name: str,
        outputs: Tensor,
        derivative: Tensor | None,
        examples: int,
        loss_scale: Tensor | float,
    ) -> Terms:
        """Return the terms of an output in one backward pass.

        If weights of this output cannot be read but those of another can, they have the same ratio
        to those of the reduction, because factors of the whole loss affect all of them.

        Args:
            derivative: the derivative of the loss in the output; ``None`` if unknown.
            examples: the number of examples in the step.
            loss_scale: the loss scale that weights contain.
        """
        loss = self.by_name[name]
        assert loss.likelihood is not None
        if not self.is_summed:
            return Terms(loss.likelihood.term_weight(outputs))
        assumed = loss.likelihood.term_weight(outputs, examples) * loss_scale
        if not loss.is_readable:
            return Terms(assumed * self._ratio)
        found = loss.terms(outputs, derivative, assumed)
        weights = found.weights
        if len(self.by_name) > 1 and loss.is_read and isinstance(weights, Tensor):
            terms = len(outputs) * loss.likelihood.terms_per_example(outputs)
            total = weights.sum() if weights.dim() else weights * terms
            # The reduction of a part of the step's examples gives that part of the weight.
            ratio = total / (assumed * terms)
            self._ratio = torch.where(torch.isfinite(ratio), ratio, self._ratio)
        return found

    def describe(self) -> str:
        """Return one line per output: its likelihood, why, and where its weights come from."""
        return "\n".join(loss.describe() for loss in self.by_name.values())

    def snapshot(self) -> tuple[Any, ...]:
        """Return what is known, to be passed to ``restore()``."""
        return self._ratio, [loss.snapshot() for loss in self.by_name.values()]

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Return to what was known earlier."""
        self._ratio, losses = snapshot
        for loss, before in zip(self.by_name.values(), losses, strict=True):
            loss.restore(before)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        outputs = {name: loss.state_dict() for name, loss in self.by_name.items()}
        return {"ratio": float(self._ratio), "outputs": outputs}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the state belongs to outputs with the same names."""
        require_keys("state of the losses", state, ("ratio", "outputs"))
        require_number("the state's ratio of the losses", state["ratio"])
        require_keys("state of the losses", state["outputs"], self.by_name)
        if unknown := [name for name in state["outputs"] if name not in self.by_name]:
            raise ValueError(f"the state of the losses has unknown outputs {unknown}")
        for name, loss in self.by_name.items():
            loss.check_state(state["outputs"][name])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ratio = state["ratio"]
        for name, loss in self.by_name.items():
            loss.load_state_dict(state["outputs"][name])
