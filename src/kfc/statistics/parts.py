"""Parts of a step's batch, on which the model is run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kfc._helpers import tree_map
from kfc.fisher.calls import ModelCall
from kfc.fisher.likelihoods import Weights
from kfc.statistics.observation import Observation


@dataclass(frozen=True)
class Part:
    """The first examples of a forward pass.

    Attributes:
        observation: the forward pass.
        count: the number of examples in the part.
    """

    observation: Observation
    count: int

    @property
    def is_whole(self) -> bool:
        return self.count == self.observation.examples

    @property
    def call(self) -> ModelCall:
        """The call of the model with these examples only."""
        whole, examples = self.observation.call, self.observation.examples
        return whole if self.is_whole else first_examples(whole, examples, self.count)

    def weights(self, whole: Weights, rows: int, *, is_summed: bool) -> Weights:
        """Return the weights of the terms of these examples, from those of the pass.

        Args:
            rows: the rows of the output, ``count`` unless the model did not cut its batch.
            is_summed: whether weights do not depend on the number of examples.
        """
        has_rows = isinstance(whole, Tensor) and whole.dim()
        own = whole[:rows] if has_rows else whole  # type: ignore[index]
        return own if is_summed else own * self.observation.examples / rows


def first_part(observations: Sequence[Observation], count: int, fewest: int) -> list[Part]:
    """Return the passes that contain the first examples of a step, the last one cut.

    Args:
        count: the number of examples.
        fewest: the smallest number of examples in a pass, if it has so many.
    """
    parts = []
    for observation in observations:
        if count <= 0:
            break
        parts.append(Part(observation, min(observation.examples, max(count, fewest))))
        count -= observation.examples
    return parts


def first_examples(call: ModelCall, examples: int, count: int) -> ModelCall:
    """Return the call with every tensor argument of that many examples cut to the first few."""

    def cut(value: Any) -> Any:
        batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == examples
        return value[:count].detach() if batched else value

    return ModelCall(tree_map(cut, call.args), tree_map(cut, call.kwargs), call.autocast)
