"""The first estimate of the factors, from many training examples, with which Algorithm 1 begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from kfc.lab.components import RunComponents
from kfc.optimizers.base import CurvatureOptimizer
from kfc.schedule import now

Batch = tuple[Tensor, Tensor]


class EstimateInterruptedError(Exception):
    """The first estimate was interrupted; the optimizer is as it was before."""


class FirstEstimate:
    """Sets the factors of a run's optimizer from training examples, before the first update.

    Each rank runs the network on its part of every batch, with the loss of the run.

    Attributes:
        images: the last batch of this rank, for a diagnosis.
    """

    def __init__(self, components: RunComponents) -> None:
        self.images = components.first_image
        self._components = components
        self._is_complete = False

    def is_due(self) -> bool:
        """Return whether an estimate is wanted and the optimizer has no factors yet."""
        components, optimizer = self._components, self._components.optimizer
        if not components.estimated_examples or not isinstance(optimizer, CurvatureOptimizer):
            return False
        return optimizer.engine.curvature.is_empty()

    def make(
        self, progress: Callable[[int], None], interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        """Estimate the factors, completely or not at all.

        Args:
            progress: called after each batch with the number of examples done, over all ranks.
            interrupted: returns whether the end was requested; any rank's request ends all.

        Raises:
            EstimateInterruptedError: the end was requested before the estimate was complete.
            FloatingPointError: a batch gave statistics that are not finite.
        """
        components, optimizer = self._components, self._components.optimizer
        assert isinstance(optimizer, CurvatureOptimizer)
        before = optimizer.state_dict()
        self._is_complete = False
        try:
            optimizer.estimate_factors(self._batches(progress, interrupted), self._loss)
        except FloatingPointError:
            optimizer.load_state_dict(before)
            raise
        if components.ranks.any(not self._is_complete, "interruptions"):
            optimizer.load_state_dict(before)
            raise EstimateInterruptedError
        now(components.device)

    def _batches(
        self, progress: Callable[[int], None], interrupted: Callable[[], bool]
    ) -> Iterator[Batch]:
        """Yield this rank's batches, up to an interruption."""
        components, total, done = self._components, self._components.estimated_examples, 0
        for batch in components.batches.sample(total):
            # Not before the first batch, because an estimate without batches is an error.
            if done and interrupted():
                return
            images, labels = components.on_device(*batch)
            self.images = images
            yield images, labels
            done += len(images)
            progress(min(total, done * components.ranks.size))
        self._is_complete = True

    def _loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._components.task.loss(outputs, *batch)
