"""The statistics of a step, collected from its forward passes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfc._helpers import all_finite
from kfc.curvature.model import ModelCurvature
from kfc.curvature.statistics import BatchStatistics
from kfc.distributed.reducer import Reducer
from kfc.fisher.calls import ModelCall, without_autocast
from kfc.fisher.likelihoods import Likelihood
from kfc.fisher.products import Output, select_output
from kfc.layers import mixes_examples
from kfc.layers.synchronised import mixes_ranks
from kfc.schedule import now
from kfc.statistics.backward import RecordedPass
from kfc.statistics.generator import OwnGenerator

# The exact Fisher matrix takes one backward pass per column.
MAX_EXACT_COLUMNS = 1024


class Observation(NamedTuple):
    """One forward pass in training mode, and the number of its examples."""

    call: ModelCall
    examples: int


class Collector:
    """Collects statistics from the forward passes between two steps.

    :class:`~kfc.statistics.hooks.ModelHooks` report to it. If statistics are due, every forward
    pass is followed by a backward pass to the pre-activations, with targets drawn from the model.

    Args:
        output: selects the tensor of outputs from what the model returns.
        seed: the seed of the targets.

    Attributes:
        observations: the forward passes since the last step.
        records_random_state: whether passes will be run again from their initial random state.
        started: when the first forward pass since the last step began.
        spent: the seconds of gathering statistics since the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        curvature: ModelCurvature,
        likelihood: Likelihood,
        output: Output | None,
        seed: int,
        reducer: Reducer,
    ) -> None:
        self.model = model
        self.likelihood = likelihood
        self.output = output
        self.generator = OwnGenerator(seed)
        self.observations: list[Observation] = []
        self.records_random_state = False
        self.started: float | None = None
        self.spent = 0.0
        self._curvature = curvature
        self._fisher = curvature.options.fisher
        self._reducer = reducer
        self._step = 1
        self._due = True
        self._estimating = False
        self._clock_device: torch.device | None = None
        self._batch = BatchStatistics()
        # Empirical Fisher: passes whose derivatives arrive in the user's backward.
        self._open: list[tuple[RecordedPass, Tensor]] = []

    # What the collector should do

    def begin_step(self, step: int, *, due: bool, clock_device: torch.device | None) -> None:
        """Forget the last step, and prepare for the forward passes of the next.

        Args:
            due: whether the step gathers statistics of every layer.
            clock_device: the device to wait for when reading the clock.
        """
        self.drop()
        self._step, self._due, self._clock_device = step, due, clock_device

    def drop(self) -> None:
        """Forget what was collected since the last step."""
        self._reducer.drop()
        self._batch = BatchStatistics()
        self._open.clear()
        self.observations.clear()
        self.spent, self.started = 0.0, None

    @contextmanager
    def estimation(self) -> Iterator[None]:
        """Gather statistics from every forward pass, to replace all that is known."""
        due = self._due
        self.drop()
        self._due = self._estimating = True
        try:
            yield
        finally:
            self.drop()
            self._due, self._estimating = due, False

    @contextmanager
    def recording_random_state(self) -> Iterator[None]:
        """Record the random state at the start of every pass, to repeat it exactly."""
        self.records_random_state = True
        try:
            yield
        finally:
            self.records_random_state = False

    # Forward passes

    def new_pass(self) -> RecordedPass | None:
        """Return a recorder for the coming forward pass, if it should give statistics."""
        if self.started is None:
            self.started = now(self._clock_device)
            self._reducer.begin_step(self._step)
        wanted = self._wanted()
        if not wanted:
            return None
        layers, fresh = self._curvature.layers, self._estimating
        return RecordedPass(
            wanted,
            lambda name: layers[name].statistics(fresh=fresh),
            during_backward=self._fisher == "empirical",
            clock_device=self._clock_device,
        )

    def _wanted(self) -> list[str]:
        if self._due:
            return self._curvature.trained_layers()
        # A layer that runs for the first time, or was thawed, cannot wait for the next due step.
        return self._curvature.layers_without_statistics()

    def end_pass(self, call: ModelCall, output: Any, recorded: RecordedPass | None) -> None:
        """Process a forward pass in training mode."""
        selected = select_output(output, self.output)
        self.likelihood.validate(selected)
        self.observations.append(Observation(call, selected.shape[0]))
        if recorded is not None:
            if recorded.calls and selected.requires_grad:
                self._gather(selected, recorded)
            if self._due and not self._estimating and self._fisher != "empirical":
                start = now(self._clock_device)
                self._reducer.send_(self._batch, self._wanted())
                self.spent += now(self._clock_device) - start
        self._reducer.watch(selected)

    def _gather(self, selected: Tensor, recorded: RecordedPass) -> None:
        self._reducer.check_model(self.model)
        examples = selected.shape[0]
        # A layer may also run on rows that do not belong to one example each.
        mixes_rows = any(call.shape[0] % examples for _, call in recorded.calls)
        recorded.end_forward(examples)
        if self._fisher == "empirical":
            self._open.append((recorded, selected.detach()))
            return
        start = now(self._clock_device)
        with torch.no_grad(), without_autocast(selected.device):
            together = not (mixes_examples(self.model) or mixes_rows)
            # On the scale of one example until the total is known. Before the backward pass, which
            # may carry derivatives to ranks with other batch sizes.
            scale = math.sqrt(self.likelihood.growth(examples, 1))
            for derivative in self._output_derivatives(selected.detach(), together):
                recorded.backward(selected, scale * derivative)
            self._batch.add(recorded.moments(), examples)
        self.spent += recorded.seconds + now(self._clock_device) - start

    def _output_derivatives(self, outputs: Tensor, together: bool) -> Iterator[Tensor]:
        """Yield the draws, or the exact columns, of the derivative in the outputs.

        Args:
            together: whether one column can serve all examples, because no layer mixes them.
        """
        if self._fisher == "sampled":
            generator = self._reducer.generator(self.generator, outputs.device)
            yield self.likelihood.sample_derivative(outputs, generator)
            return
        own = self.likelihood.columns_per_example(outputs) * (1 if together else len(outputs))
        joint = mixes_ranks(self.model)
        turns = self._reducer.turns(own, joint=joint)
        columns = sum(count for _, count in turns)
        if columns > MAX_EXACT_COLUMNS:
            where = "" if together else " behind batch normalisation or rows that examples share"
            where += self._reducer.among_ranks if joint else ""
            raise ValueError(
                f'fisher="exact" takes one backward pass for each of the {columns} columns of an '
                f"output of shape {tuple(outputs.shape)}{where}, more than {MAX_EXACT_COLUMNS}; "
                'use fisher="sampled"'
            )
        for is_own, count in turns:
            if is_own:
                yield from self._exact_columns(outputs, together)
            else:
                yield from (torch.zeros_like(outputs) for _ in range(count))

    def _exact_columns(self, outputs: Tensor, together: bool) -> Iterator[Tensor]:
        for column in self.likelihood.derivative_columns(outputs):
            if together:
                yield column
                continue
            for example in range(len(outputs)):
                alone = torch.zeros_like(column)
                alone[example] = column[example]
                yield alone

    # The step

    def finish(self, loss_scale: float | Tensor = 1.0) -> BatchStatistics:
        """Return the statistics of the step, on the scale of the loss on the whole batch.

        With several ranks that is the mean of their losses, as in DistributedDataParallel.

        Args:
            loss_scale: the factor of the user's loss; only the empirical Fisher depends on it.
        """
        self._close_open_passes(loss_scale)
        start = now(self._clock_device)
        batch = self._batch
        self._reducer.receive_(batch, self._wanted(), due=self._due, fresh=self._estimating)
        if batch.moments:
            self.spent += now(self._clock_device) - start
        if batch.examples:
            batch.scale(self.likelihood.growth(1, batch.examples / self._reducer.size))
        return batch

    def _close_open_passes(self, loss_scale: float | Tensor) -> None:
        """Add passes whose derivatives arrived in the user's backward (empirical Fisher).

        The user's derivatives are w times those of the log-likelihood; sqrt(w N) is needed.
        """
        for recorded, _ in self._open:
            recorded.end_draw()
            self.spent += recorded.seconds
        gathered = [(recorded, out, recorded.moments()) for recorded, out in self._open]
        finished = [item for item in gathered if any(item[2].values())]
        examples = sum(recorded.examples for recorded, *_ in finished)
        for recorded, outputs, moments in finished:
            weight = self.likelihood.term_weight(outputs, examples) * float(loss_scale) ** 2
            scale = examples / weight * self.likelihood.growth(examples, 1)
            self._batch.add(moments, recorded.examples, scale)
        self._open.clear()

    def is_finite(self) -> bool:
        """Return whether what was collected so far is finite; waits for the device."""
        return bool(all_finite(self._batch.traces()))
