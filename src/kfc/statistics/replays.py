"""Statistics of a part of the batch, from passes of their own."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from kfc.curvature.model import ModelCurvature
from kfc.curvature.statistics import BatchStatistics
from kfc.distributed.reducer import Reducer
from kfc.fisher.likelihoods import Weights
from kfc.fisher.losses import Losses
from kfc.layers import MatrixLayer
from kfc.statistics.backward import RecordedPass
from kfc.statistics.draws import Draws
from kfc.statistics.observation import Observation, count_examples
from kfc.statistics.parts import Part, first_part

# Given a forward pass and the name of an output, the weights of its terms by backward pass.
WeightsByPass = Callable[[Observation, str], list[Weights]]
# The smallest number of examples in a part; and of rows, relative to the width of a factor.
FEWEST_EXAMPLES = 32
ROWS_PER_WIDTH = 1 / 16


class Replays:
    """Runs the model again on the first examples of a step, to gather its statistics.

    A step does this after the user's backward pass, which has freed its activations.

    Attributes:
        are_active: whether the statistics of the step come from replays.
    """

    def __init__(
        self, curvature: ModelCurvature, losses: Losses, draws: Draws, reducer: Reducer
    ) -> None:
        self._curvature, self._losses, self._draws = curvature, losses, draws
        options = curvature.options
        self._fraction = options.fraction
        self._are_possible = options.needs_derivatives and options.fisher == "sampled"
        self._reducer = reducer
        self._can_cut = True
        self.are_active = False

    def end_step(self) -> None:
        self.are_active = False

    def decide(self, examples: int) -> None:
        """Decide whether to replay a part of a step, or go backward from all its outputs.

        Args:
            examples: the number of examples in the step. It may differ between ranks, which must
                all do the same, and does not count there.
        """
        self.are_active = self._are_worthwhile(examples)

    def _are_worthwhile(self, examples: int) -> bool:
        part = max(FEWEST_EXAMPLES, self._fraction * examples)
        is_cheaper = self._can_cut and 2 * part <= examples
        possible = self._are_possible and self._fraction < 1
        return possible and (is_cheaper or self._reducer.size > 1)

    def examples_used(self, examples: int, elements: Mapping[str, int]) -> int:
        """Return the number of examples that the statistics of a step are gathered from.

        It is large enough to have enough rows for every layer's activation factor.

        Args:
            examples: the number of examples in the step.
            elements: the number of elements of every layer's outputs in the step.
        """
        if not (self._can_cut and self._are_worthwhile(examples)):
            return examples
        fewest = float(FEWEST_EXAMPLES)
        for name, count in elements.items():
            layer = self._curvature.layers[name].layer
            if count and isinstance(layer, MatrixLayer) and not layer.one_hot:
                width, outputs = layer.factor_sizes()
                rows = count / (outputs * layer.groups * examples)
                fewest = max(fewest, ROWS_PER_WIDTH * width / rows)
        return min(examples, max(math.ceil(fewest), math.ceil(self._fraction * examples)))

    def gather(
        self,
        observations: Sequence[Observation],
        batch: BatchStatistics,
        weights: WeightsByPass,
        *,
        due: bool,
    ) -> None:
        """Add the statistics of the first examples of a step to those of a batch.

        Args:
            weights: returns the weights of an output of a forward pass for each backward pass.
            due: whether all layers are wanted, or only those that have a gradient for the first
                time.
        """
        wanted = self._curvature.trained_layers() if due else self._missing(batch)
        if not wanted:
            return
        elements: Counter[str] = Counter()
        for each in observations:
            elements.update(each.elements)
        count = self.examples_used(count_examples(observations), elements)
        parts = first_part(observations, count, FEWEST_EXAMPLES)
        for part in parts:
            self._gather_part(part, batch, wanted, weights)
        # A layer that runs for the first time may run for other examples or in other passes only.
        missing = self._missing(batch)
        # All ranks run the last pass again, or none: their examples may depend on each other.
        done = len(parts) - 1 if self._reducer.size > 1 else sum(part.is_whole for part in parts)
        for each in observations[done:] if missing else ():
            self._gather_part(Part(each, each.examples), batch, missing, weights)

    def _missing(self, batch: BatchStatistics) -> list[str]:
        """Return the layers with a gradient on any rank for which no rank has statistics yet."""
        lacking = self._curvature.layers_without_statistics()
        if not lacking:
            return []
        # 0: without a gradient; 1: with a gradient only; 2: with statistics
        own = [2.0 if n in batch.moments else float(self._has_gradient(n)) for n in lacking]
        largest = zip(lacking, self._reducer.largest(own), strict=True)
        return [name for name, flag in largest if flag == 1]

    def _has_gradient(self, name: str) -> bool:
        """Return whether a gradient of a layer is not zero; the host waits for the device."""
        parameters = self._curvature.layers[name].layer.trained().values()
        return any(p.grad is not None and bool(p.grad.any()) for p in parameters)

    def _gather_part(
        self,
        part: Part,
        batch: BatchStatistics,
        wanted: Collection[str],
        weights: WeightsByPass,
    ) -> None:
        try:
            recorded = self._replayed(part, wanted, weights)
        except Exception as error:
            if part.is_whole or not self._fails_again(part, wanted, weights):
                raise
            self._can_cut = False
            warnings.warn(
                f"running the model on the first {part.count} of {part.observation.examples} "
                f"examples failed: {error}. Every tensor argument of that length was cut. "
                "Statistics are gathered from whole batches from now on",
                stacklevel=2,
            )
            part = Part(part.observation, part.observation.examples)
            recorded = self._replayed(part, wanted, weights)
        with torch.no_grad():
            batch.add(recorded.moments(), part.count)

    def _fails_again(self, part: Part, wanted: Collection[str], weights: WeightsByPass) -> bool:
        """Return whether a replay fails a second time; otherwise the part is not the reason."""
        try:
            self._replayed(part, wanted, weights)
        except Exception:
            return True
        return False

    def _replayed(
        self,
        part: Part,
        wanted: Collection[str],
        weights: WeightsByPass,
    ) -> RecordedPass:
        layers, losses = self._curvature.layers, self._losses
        recorded = RecordedPass(
            wanted,
            lambda name: layers[name].statistics(fresh=False),
            during_backward=False,
            clock_device=None,
        )
        by_output = {
            name: part.weights(
                sum(weights(part.observation, name)), part.count, is_summed=losses.is_summed
            )
            for name in part.observation.derivatives
        }
        # On the scale of one example, until those of all passes are known
        scale = math.sqrt(losses.growth(part.count, 1))
        self._draws.replay(part.call, recorded, part.count, by_output, scale)
        return recorded
