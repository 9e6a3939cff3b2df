"""The terms of the loss in the passes of a step."""

from itertools import chain

from torch import Tensor

from kfc.fisher.loss import Terms
from kfc.fisher.losses import Losses
from kfc.statistics.columns import scale_of_squares
from kfc.statistics.observation import Observation


class StepTerms:
    """Reads the terms of every pass of a step once, although several parts of a step need them."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._examples = 0
        self._loss_scale: float | Tensor = 1.0
        self._known: dict[tuple[Observation, str], list[Terms]] = {}

    def begin(self, examples: int, loss_scale: float | Tensor) -> None:
        """Forget what is known, and begin with another number of examples or loss scale."""
        self._examples, self._loss_scale = examples, loss_scale
        self._known.clear()

    def of(self, observation: Observation, name: str) -> list[Terms]:
        """Return the terms of an output, with the loss scale, for each backward pass."""
        key = observation, name
        if key not in self._known:
            derivatives = observation.derivatives[name]
            if not self._losses.by_name[name].is_read:
                derivatives = derivatives[:1]  # they have one curvature, as far as is known
            outputs, scale = observation.outputs[name], self._loss_scale
            self._known[key] = [
                self._losses.terms(name, outputs, derivative, self._examples, scale)
                for derivative in derivatives
            ]
        return self._known[key]

    def empirical_scale(self, observation: Observation) -> float:
        """Return the factor of squared derivatives of the user's own backward pass.

        They are c times those of the log-likelihood; sqrt(c N) is needed. If the weights differ,
        the scale is right for derivatives of one size.
        """
        terms = chain(*(self.of(observation, name) for name in observation.derivatives))
        scale = scale_of_squares(each.weights for each in terms)
        if self._losses.is_summed:
            return scale  # the weights contain the loss scale
        return scale * self._examples**2 / observation.examples / float(self._loss_scale) ** 2
