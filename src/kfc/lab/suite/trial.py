"""One run of the benchmark, which trains in slices and can be saved and restored between them."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kfc.lab.data import Batches, Split
from kfc.lab.suite.methods import METHODS
from kfc.lab.suite.problems import Problem, cropped_and_flipped
from kfc.lab.suite.search import Setting
from kfc.lab.suite.workloads import SUITE_TASKS, Workload

EVALUATION_BATCH = 500
Clock = Callable[[], float]
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


@dataclass
class Outcome:
    """The record of a run.

    Attributes:
        curve: (seconds of training, updates, metric) of every evaluation.
        seconds: seconds of training so far.
        first_loss, largest_loss: the first and the largest loss of a training batch.
        end: why the run has ended; empty until then. ``"target"`` if it has reached the target.
        test: the error (percent) or loss on the whole test split at the end of the run; ∞ if the
            run diverged, or was ended because others were better or faster.
    """

    curve: list[tuple[float, int, float]] = field(default_factory=list)
    seconds: float = 0.0
    updates: int = 0
    first_loss: float = math.nan
    largest_loss: float = -math.inf
    end: str = ""
    message: str = ""
    test: float = math.inf

    @property
    def time(self) -> float:
        """The seconds of training to the target; ∞ if it was not reached."""
        return self.curve[-1][0] if self.end == "target" else math.inf

    @property
    def loss_growth(self) -> float:
        """The largest loss relative to the first."""
        grown = self.largest_loss / self.first_loss if self.first_loss else math.inf
        return math.inf if self.end == "diverged" or math.isnan(grown) else grown

    def best_until(self, seconds: float) -> float:
        """Return the best value of the metric within the first ``seconds`` of training."""
        values = [value for at, _, value in self.curve if at <= seconds and math.isfinite(value)]
        return min(values, default=math.inf)

    def finish(self, end: str, message: str = "") -> None:
        """Record why the run has ended, unless it has ended before."""
        if not self.end:
            self.end, self.message = end, message

    def note_loss(self, loss: float) -> None:
        """Record the loss of an update."""
        if self.updates == 0:
            self.first_loss = loss
        self.largest_loss = max(self.largest_loss, loss)
        self.updates += 1

    def note_time(self, seconds: float) -> None:
        self.seconds += seconds

    def note_test(self, value: float) -> None:
        self.test = value


class Trial:
    """A run of one method with one setting on one workload.

    Args:
        clock: returns the time in seconds; a test may pass one that does not depend on the machine.
    """

    def __init__(
        self,
        workload: Workload,
        problem: Problem,
        method: str,
        setting: Setting,
        seed: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.workload = workload
        self.method = METHODS[method]
        self.setting = setting
        self.outcome = Outcome()
        self._problem = problem
        self._task = SUITE_TASKS[workload.task]
        self._seed = seed
        self._clock = clock
        self._model = workload.build(seed)
        torch.manual_seed(seed)
        self._optimizer: Any = self.method.make(self._model, **setting.arguments)
        self._rates = [group.get("lr") for group in self._optimizer.param_groups]
        self._batches = Batches(problem.train, problem.inputs, workload.batch_size, seed)
        self._stream: Iterator[tuple[Tensor, Tensor]] | None = None

    def advance(self, until: float, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Train until ``until`` seconds of training in all, or to the end of the run."""
        outcome, limit = self.outcome, self.workload.seconds
        period = limit / self.workload.evaluations
        while not outcome.end and outcome.seconds < until and not interrupted():
            periods = outcome.seconds // period
            self._train_once()
            over = self._is_over()
            if not outcome.end and (over or outcome.seconds // period > periods):
                self._evaluate()
            if over:
                outcome.finish(over)
            if outcome.end and outcome.end != "diverged":
                outcome.note_test(self._metric("test"))

    def _is_over(self) -> str:
        """Return why no time or no learning rate is left, or an empty string."""
        used = self.outcome.seconds / self.workload.seconds
        if used >= 1:
            return "limit"
        return "" if self.setting.factor(used) > 0 else "schedule"

    def _train_once(self) -> None:
        """Make one update, and count its time."""
        self._set_rates()
        start = self._clock()
        try:
            loss = self._update(*self._next_batch())
        except (FloatingPointError, LinAlgError) as error:
            self.outcome.finish("diverged", f"update {self.outcome.updates + 1}: {error}")
            return
        finally:
            self.outcome.note_time(self._clock() - start)
        self.outcome.note_loss(loss)
        if not math.isfinite(loss):
            self.outcome.finish("diverged", f"the loss of update {self.outcome.updates} is {loss}")

    def _update(self, images: Tensor, labels: Tensor) -> float:
        generator = self._seeded()
        if self.workload.augmented:
            images = cropped_and_flipped(images, generator)
        if images.dim() == 4:
            images = images.contiguous(memory_format=torch.channels_last)

        def loss() -> Tensor:
            return self._task.loss(self._model(images), images, labels)

        if self.method.adapts:
            return float(self._optimizer.step(loss))
        self._optimizer.zero_grad()
        value = loss()
        value.backward()
        self._optimizer.step()
        return value.item()

    def _seeded(self) -> torch.Generator:
        """Seed the random numbers of this update, so that a resumed run draws the same."""
        text = f"{self._seed} {self.outcome.updates}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        # torch.manual_seed also prepares accelerators, which takes longer than a small step.
        torch.default_generator.manual_seed(seed)
        return torch.Generator().manual_seed(seed)

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        epoch, position = divmod(self.outcome.updates, len(self._batches))
        if self._stream is None or position == 0:
            self._stream = self._batches.epoch(epoch, position)
        return next(self._stream)

    def _set_rates(self) -> None:
        factor = self.setting.factor(self.outcome.seconds / self.workload.seconds)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if rate is not None and not self.method.adapts:
                group["lr"] = factor * rate

    def _evaluate(self) -> None:
        """Add a point to the curve, and end the run if it has reached the target."""
        outcome = self.outcome
        value = self._metric(self.workload.split, self.workload.examples)
        outcome.curve.append((outcome.seconds, outcome.updates, value))
        if value <= self.workload.target:
            outcome.finish("target")
        elif not math.isfinite(value):
            outcome.finish("diverged", f"the {self.workload.metric} is {value}")

    def _metric(self, name: str, examples: int | None = None) -> float:
        """Return the loss, or the error in percent, on the first examples of a split."""
        if not self.method.averages:
            return self._metric_as_is(name, examples)
        with self._optimizer.averaged_parameters():
            return self._metric_as_is(name, examples)

    @torch.no_grad()
    def _metric_as_is(self, name: str, examples: int | None) -> float:
        split: Split = getattr(self._problem, name)
        count = len(split) if examples is None else min(len(split), examples)
        total = mistakes = 0.0
        self._model.eval()
        for start in range(0, count, EVALUATION_BATCH):
            part = slice(start, min(start + EVALUATION_BATCH, count))
            images = self._problem.inputs(split.images[part])
            labels = torch.from_numpy(split.labels[part].copy())
            outputs = self._model(images)
            total += self._task.loss(outputs, images, labels).item() * len(images)
            mistakes += self._task.mistakes(outputs, images, labels).sum().item()
        self._model.train()
        is_loss = self.workload.metric.endswith("loss")
        return total / count if is_loss else self._task.error(mistakes / count)

    # Interruption

    def state_dict(self) -> dict[str, Any]:
        """Return everything that ``load_state_dict`` of a new trial needs to continue."""
        return {
            "outcome": asdict(self.outcome),
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outcome = Outcome(**state["outcome"])
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._stream = None
