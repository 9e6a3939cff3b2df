"""The forward passes since the last step: which of them count, and how to undo the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from kfc._helpers import graph_task
from kfc.fisher.losses import Losses
from kfc.statistics.generator import OwnGenerator
from kfc.statistics.observation import Observation
from kfc.statistics.replays import Replays

# The number of passes that wait for a backward pass with their graph, and without it.
MAX_WAITING, MAX_UNUSED = 4, 1024


class Before(NamedTuple):
    """What backward passes and steps may change, as it was before; see ``Knowledge``."""

    generator: Any
    losses: Any
    is_guess: bool
    examples: int | None
    loss_scale: float | Tensor


class Knowledge:
    """What backward passes tell about the loss and the next step, and the generator of targets.

    Attributes:
        losses: the losses of the model's outputs.
        generator: the generator of targets.
        is_guess: whether weights were assumed before the examples of a step were known.
        examples: the number of examples in the last step, which the next one probably has.
        loss_scale: the factor of the loss that gradients do not have; known once a step begins.
    """

    def __init__(self, losses: Losses, generator: OwnGenerator) -> None:
        self.losses, self.generator = losses, generator
        self.is_guess = False
        self.examples: int | None = None
        self.loss_scale: float | Tensor = 1.0

    def guess(self) -> None:
        """Record that weights were assumed."""
        self.is_guess = True

    def expect(self, examples: int | None, loss_scale: float | Tensor) -> None:
        """Record what the next step should have in common with this one."""
        self.examples, self.loss_scale = examples, loss_scale

    def expected(self) -> dict[str, Any]:
        """Return the arguments of ``expect()``, as numbers."""
        return {"examples": self.examples, "loss_scale": float(self.loss_scale)}

    def snapshot(self, *, draws: bool) -> Before:
        """Return the state, to be passed to ``restore()``.

        Args:
            draws: whether targets may be drawn until then.
        """
        generator = self.generator.snapshot() if draws else None
        losses = self.losses.snapshot()
        return Before(generator, losses, self.is_guess, self.examples, self.loss_scale)

    def restore(self, before: Before) -> None:
        """Return to an earlier state."""
        if before.generator is not None:
            self.generator.restore(before.generator)
        self.losses.restore(before.losses)
        self.is_guess = before.is_guess
        self.examples, self.loss_scale = before.examples, before.loss_scale


class Passes:
    """The forward passes since the last step, in their order.

    A pass counts once its backward pass has come to its end. One without a backward pass waits for
    it, and is forgotten when the step ends. One whose backward pass failed is undone.

    Args:
        knowledge: what backward passes change.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._all: list[Observation] = []
        # Before the first backward pass since the last step.
        self._first: Before | None = None

    def __contains__(self, observation: Observation) -> bool:
        return observation in self._all

    def __iter__(self) -> Iterator[Observation]:
        return iter(list(self._all))

    def complete(self) -> list[Observation]:
        """Return the passes that a backward pass followed."""
        return [each for each in self._all if each.derivatives and each.is_complete]

    def add(self, observation: Observation) -> None:
        """Add a pass, and drop some that no backward pass has used for long, as in evaluations.

        Those that no backward pass can use any more are dropped at once.
        """
        self._all = [*(each for each in self._all if not each.is_abandoned), observation]
        if len(self._all) <= MAX_WAITING:
            return
        unused = [each for each in self._all if not each.derivatives]
        for each in unused[:-MAX_UNUSED]:
            self._all.remove(each)
        for each in [each for each in unused if each.recorded][:-MAX_WAITING]:
            each.drop_graph()

    def remove(self, observation: Observation) -> None:
        self._all.remove(observation)

    def follow(self, replays: Replays, examples: int) -> None:
        """Let replays decide how statistics are gathered, unless a pass has been used already.

        Args:
            examples: the number of examples in the coming pass or in the step.
        """
        if self.complete():
            return
        were_active = replays.are_active
        replays.decide(examples)
        for each in self._all if replays.are_active != were_active else ():
            if were_active:
                each.drop_graph()  # the pass was not recorded
            else:
                each.forget_graph()

    def gradients_are_gone(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the gradients of earlier passes were dropped, by whatever means."""
        had_gradients = any(each.has_gradients for each in self.complete())
        return had_gradients and all(parameter.grad is None for parameter in parameters)

    def begin_backward(self, observation: Observation, *, draws: bool) -> None:
        """Record what was before a backward pass of an observation.

        Args:
            draws: whether it may draw targets.
        """
        before = self.begin_step(draws=draws)
        observation.begin_backward(before, graph_task())

    def begin_step(self, *, draws: bool) -> Before:
        """Record and return what was before a step, which may change the same things."""
        before = self._knowledge.snapshot(draws=draws)
        if self._first is None:
            self._first = before
        elif self._first.generator is None:
            self._first = self._first._replace(generator=before.generator)
        return before

    def undo_failed(self) -> None:
        """Undo backward passes that have not come to their end, unless they are still running."""
        current = graph_task()
        failed = [
            each
            for each in self._all
            if each.derivatives and not each.is_complete and each.task != current
        ]
        if current is not None and failed:
            assert failed[0].before is not None
            self._knowledge.restore(failed[0].before)
            for each in failed:
                each.fail()

    def undo(self, observation: Observation) -> None:
        """Undo the running backward pass of an observation, and forget the observation."""
        self._all.remove(observation)
        if observation.before is not None:
            self._knowledge.restore(observation.before)

    def undo_backward(self) -> bool:
        """Undo all backward passes since the last step; return whether there was one."""
        waiting = [each for each in self._all if not each.derivatives]
        had_any, self._all = len(waiting) < len(self._all), waiting
        if had_any:
            self._undo_all()
        return had_any

    def undo_step(self) -> None:
        """Forget all passes, and return to what was before the first backward pass."""
        self._all = []
        self._undo_all()

    def _undo_all(self) -> None:
        if self._first is not None:
            self._knowledge.restore(self._first)
        self._first = None

    def clear(self) -> None:
        """Forget all passes; what they have changed stays."""
        self._all = []
        self._first = None
