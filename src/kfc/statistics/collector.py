"""The statistics of a step, collected from its forward and backward passes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from kfc._helpers import all_finite, keeps_graph, will_reach
from kfc.curvature.model import ModelCurvature
from kfc.curvature.statistics import BatchStatistics, Moment
from kfc.distributed.reducer import Reducer
from kfc.fisher.calls import ModelCall, without_autocast
from kfc.fisher.likelihoods import Weights
from kfc.fisher.losses import Losses
from kfc.schedule import now
from kfc.statistics.backward import RecordedPass
from kfc.statistics.buffers import BufferGuard
from kfc.statistics.clock import Clock
from kfc.statistics.draws import Draws
from kfc.statistics.observation import Observation, count_examples, share_of_dropped
from kfc.statistics.outputs import on_derivative
from kfc.statistics.passes import Knowledge, Passes
from kfc.statistics.replays import Replays
from kfc.statistics.terms import StepTerms

Moments = dict[str, tuple[Moment, ...]]
Gathered = tuple[Moments, float]


class Collector:
    """Collects statistics from the forward passes between two steps.

    ``ModelHooks`` report to it. If statistics are due and need derivatives, the user's backward
    pass begins with one to the pre-activations, with targets drawn from the model.

    Args:
        losses: the losses of the model's outputs.
        seed: the seed of the targets.

    Attributes:
        buffers: the model's buffers before the first forward pass since the last step.
        records_random_state: whether passes will be run again from their initial random state.
        known: what backward passes have told about the loss.
        clock: measures the time of gathering statistics.
        terms: the terms of the loss in the passes of the step in progress.
        draws, replays: how statistics are gathered from whole passes, and from parts of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        curvature: ModelCurvature,
        losses: Losses,
        seed: int,
        reducer: Reducer,
    ) -> None:
        self.model = model
        self.losses = losses
        exact = curvature.options.fisher == "exact"
        self.draws = Draws(model, losses, reducer, exact=exact, seed=seed)
        self.buffers = BufferGuard(model)
        self.known = Knowledge(losses, self.draws.generator)
        self._passes = Passes(self.known)
        self.terms = StepTerms(losses)
        self._reached: set[Node] = set()
        self._is_gathering = self.records_random_state = False
        self.clock = Clock()
        self._curvature = curvature
        self._fisher = curvature.options.fisher
        needs_derivatives = curvature.options.needs_derivatives
        self._draws_targets = needs_derivatives and self._fisher != "empirical"
        self._reducer = reducer
        self._step = 1
        self._due = True
        self._estimating = False
        self._has_loss = True
        self.replays = Replays(curvature, losses, self.draws, reducer)
        self._batch = BatchStatistics()

    # What the collector should do

    def begin_step(self, step: int, *, due: bool, clock_device: torch.device | None) -> None:
        """Forget the last step, and prepare for the forward passes of the next.

        Args:
            due: whether the step gathers statistics of every layer.
            clock_device: the device to wait for when reading the clock.
        """
        self.drop()
        self._step, self._due = step, due
        self.clock.begin_step(clock_device)

    def drop(self) -> None:
        """Forget what was collected since the last step."""
        self._reducer.drop()
        self._batch = BatchStatistics()
        self._passes.clear()
        self.terms.begin(0, 1.0)
        self.buffers.forget()
        self.clock.reset()
        self.replays.end_step()

    def drop_backward(self) -> None:
        """Undo the backward passes since the last step, because their gradients were dropped."""
        if self._passes.undo_backward():
            self._reducer.drop_sent()
            self._batch = BatchStatistics()

    def undo(self) -> None:
        """Undo everything since the last step, but not what forward passes do to the model."""
        self._passes.undo_step()
        self.drop()

    @contextmanager
    def estimation(self, *, has_loss: bool) -> Iterator[None]:
        """Gather statistics from every forward pass, to replace all that is known.

        Args:
            has_loss: whether the derivative of a loss will arrive for each pass.
        """
        due = self._due
        self.drop()
        before = self.known.snapshot(draws=True)
        self._due = self._estimating = True
        self._has_loss = has_loss
        try:
            yield
        except BaseException:
            self.known.restore(before)
            raise
        finally:
            self.drop()
            self._due, self._estimating, self._has_loss = due, False, True

    @contextmanager
    def recording_random_state(self) -> Iterator[None]:
        """Record the random state at the start of every pass, to repeat it exactly."""
        self.records_random_state = True
        try:
            yield
        finally:
            self.records_random_state = False

    # Forward passes

    def new_pass(self, size: int) -> RecordedPass | None:
        """Return a recorder for the coming forward pass, if it should give statistics.

        Args:
            size: the first size of its first tensor argument, usually the number of examples.
        """
        wanted = self._wanted()
        if self.clock.started is None:
            self.clock.start()
            self._reducer.begin_step(self._step)
        if not self._estimating:
            if self._passes.gradients_are_gone(self.model.parameters()):
                self.drop_backward()
            if wanted:
                self._passes.follow(self.replays, max(size, self.known.examples or 0))
            # DistributedDataParallel changes buffers between passes; checkpointing, in backward.
            is_unused = self._reducer.owns_buffers and not self.observations
            self.buffers.before_pass(may_wait=self._due, is_unused=is_unused)
        if not wanted or self.replays.are_active:
            return None
        layers, fresh = self._curvature.layers, self._estimating
        return RecordedPass(
            wanted,
            lambda name: layers[name].statistics(fresh=fresh),
            during_backward=self._fisher == "empirical",
            clock_device=self.clock.device,
        )

    def _wanted(self) -> list[str]:
        if self._due:
            return self._curvature.trained_layers()
        # A layer that runs for the first time, or was unfrozen, cannot wait for the next due step.
        return self._curvature.layers_without_statistics()

    def end_pass(
        self,
        call: ModelCall,
        output: Any,
        recorded: RecordedPass | None,
        elements: Mapping[str, int],
    ) -> None:
        """Process a forward pass in training mode; its statistics wait for its backward pass.

        Args:
            elements: the number of elements of the outputs of layers, if a part will be replayed.
        """
        outputs = self.losses.select(output)
        if recorded is not None and not recorded.calls:
            recorded = None
        observation = Observation(call, outputs, recorded, elements)
        self._passes.add(observation)
        if recorded is not None:
            self.losses.note_layers(observation.output_layers)
            recorded.end_forward(observation.examples, outputs.values())
            self._reducer.check_model(self.model)
        if not self._has_loss:
            for name in observation.edges:
                self._add_derivative(observation, name, None)
            self._add_moments(observation, *self._end_gathering(observation))
            return
        me = weakref.ref(self)
        for name, selected in outputs.items():
            if selected.requires_grad:
                act = observation.new_arrival(me, name)
                on_derivative(output, selected, self.losses.output, name, act)
            self._reducer.watch(selected)

    # Backward passes

    def on_derivative(self, observation: Observation, name: str, derivative: Tensor | None) -> None:
        """Gather statistics in the user's backward pass, when it begins.

        Args:
            derivative: the derivative of the loss in the output; ``None`` if unknown.
        """
        if self._is_gathering or observation not in self._passes:
            return
        # Gradients in the inputs, for instance, are not those of a training step.
        model = self.model
        reached = "unknown" if self._estimating else will_reach(model.parameters(), self._reached)
        if reached == "nothing":
            observation.ignore_backward()
            return
        self._passes.undo_failed()
        if reached == "gradients":
            if self._passes.gradients_are_gone(model.parameters()):
                self.drop_backward()
            observation.note_gradients()
        draws = observation.recorded is not None or self.replays.are_active
        self._passes.begin_backward(observation, draws=draws)
        try:
            self._add_derivative(observation, name, derivative)
        except BaseException:
            self._passes.undo(observation)
            raise
        gathered = None
        if self._fisher != "empirical" and len(observation.derivatives) == len(observation.edges):
            # If another backward pass may follow, finish() adds what they gather.
            gathered = None if keeps_graph() else self._end_gathering(observation)
        self._reducer.once_gathered(partial(self._complete, observation, gathered))

    def _complete(self, observation: Observation, gathered: Gathered | None) -> None:
        """Count a pass whose backward pass did not fail."""
        observation.complete()
        if gathered is not None and observation in self._passes:
            self._add_moments(observation, *gathered)
            if self._due and not self._estimating:
                self._prepare_exchange()
                with self.clock.timed("backward"):
                    self._reducer.send_(self._batch, self._wanted())

    def _add_derivative(
        self, observation: Observation, name: str, derivative: Tensor | None
    ) -> None:
        outputs, loss = observation.outputs[name], self.losses.by_name[name]
        if derivative is None and self._has_loss:
            loss.assume(outputs)
        if derivative is not None and loss.needs_examination(self._step):
            loss.examine(outputs, derivative, self._step)
        likelihood, recorded = loss.likelihood, observation.recorded
        is_first = name not in observation.derivatives
        observation.add_derivative(name, derivative)
        is_used = self._draws_targets and (is_first or loss.is_read)  # as in weights_by_pass
        if recorded is None or likelihood is None or not is_used:
            return
        examples, scale = observation.examples, self.known.loss_scale
        if self._estimating:
            scale = 1.0
        elif self.known.examples is not None:
            examples = self.known.examples
        elif not loss.is_read:
            self.known.guess()
        weights = self.losses.terms(name, outputs, derivative, examples, scale).weights
        with self.clock.timed("backward"), self._gathering():
            # On the scale of one example until the total is known. Before the backward pass, which
            # may carry derivatives to ranks with other batch sizes.
            scale = math.sqrt(self._growth(observation.examples, 1))
            edge = observation.edges[name]
            self.draws.backward(recorded, edge, likelihood, outputs, weights, scale)

    def _end_gathering(self, observation: Observation) -> Gathered:
        """Return the statistics of a pass and the factor of squared derivatives."""
        recorded, scale = observation.recorded, 1.0
        if recorded is None:
            return {}, scale
        is_empirical = self._fisher == "empirical"
        self.clock.add("backward" if is_empirical else "forward", recorded.seconds)
        device = next(iter(observation.outputs.values())).device
        with self.clock.timed("backward"), torch.no_grad(), without_autocast(device):
            if is_empirical:
                recorded.end_draw()
                self.terms.begin(count_examples(self.observations), self.known.loss_scale)
                scale = self.terms.empirical_scale(observation)
            moments = recorded.moments()
        observation.forget_graph()
        return moments, scale

    def _add_moments(self, observation: Observation, moments: Moments, scale: float) -> None:
        """Add the statistics of a pass to those of the step."""
        if any(moments.values()):
            with torch.no_grad():
                self._batch.add(moments, observation.examples, scale)
        if self._estimating:
            self._passes.remove(observation)

    def end_estimate(self) -> None:
        """End a pass of an estimate, also if the loss does not use all outputs."""
        for each in self._passes:
            self._add_moments(each, *self._end_gathering(each))

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Ignore the hooks on outputs, which our own backward passes fire too."""
        self._is_gathering = True
        try:
            yield
        finally:
            self._is_gathering = False

    # The step

    @property
    def observations(self) -> list[Observation]:
        """The forward passes since the last step that a backward pass followed."""
        return self._passes.complete()

    def weights(self, observation: Observation) -> dict[str, Weights]:
        """Return the weights of the terms of every output, without the loss scale.

        Those of several backward passes are added.
        """
        scale = self.known.loss_scale if self.losses.is_summed else 1.0
        return {
            name: sum(self.weights_by_pass(observation, name)) / scale
            for name in observation.derivatives
        }

    def weights_by_pass(self, observation: Observation, name: str) -> list[Weights]:
        """Return the weights of an output, with the loss scale, for each backward pass."""
        return [terms.weights for terms in self.terms.of(observation, name)]

    def finish(self, loss_scale: float | Tensor = 1.0) -> BatchStatistics:
        """Return the statistics of the step, on the scale of the loss on the whole batch.

        With several ranks that is the mean of their losses, as in DistributedDataParallel.

        Args:
            loss_scale: the factor of the user's loss that its gradients do not have any more.
        """
        self._prepare_exchange()
        self._passes.undo_failed()
        self._passes.begin_step(draws=self.replays.are_active)
        examples = count_examples(self.observations)
        self.known.expect(examples or None, loss_scale)
        self.terms.begin(examples, loss_scale)
        for observation in self.observations:
            self._add_moments(observation, *self._end_gathering(observation))
        batch, start = self._batch, now(self.clock.device)
        if self.replays.are_active:
            self._replay()
        names = self._wanted() if self._reducer.size > 1 else ()
        self._reducer.receive_(batch, names, due=self._due, fresh=self._estimating)
        if batch.moments:
            self.clock.add("optimizer", now(self.clock.device) - start)
        if batch.examples:
            scale = self._growth(1, batch.examples / self._reducer.size)
            share = share_of_dropped(self.observations)
            batch.scale(scale * share / float(loss_scale) if self.losses.is_summed else scale)
        return batch

    def _prepare_exchange(self) -> None:
        self._reducer.prepare(self._step, len(self.observations), training=self.model.training)

    def _replay(self) -> None:
        """Gather statistics from a part of the step's examples, with passes of their own."""
        with self._gathering():
            passes, weights = self.observations, self.weights_by_pass
            self.replays.gather(passes, self._batch, weights, due=self._due)
        self._batch.stand_for(count_examples(self.observations))

    def _growth(self, part: float, whole: float) -> float:
        # Passes of an estimate are steps of their own, of which the mean over examples is taken.
        return 1.0 if self._estimating else self.losses.growth(part, whole)

    def is_finite(self) -> bool:
        """Return whether what was collected so far is finite; waits for the device."""
        return bool(all_finite(self._batch.traces()))
