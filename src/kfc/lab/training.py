"""The training loop of one run, which can be interrupted and resumed at any update.

Several ranks run the loop in step: every decision rests on values that they have agreed on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfc.distributed.ranks import Ranks
from kfc.lab.components import RunComponents
from kfc.lab.config import RunConfig
from kfc.lab.costs import Costs
from kfc.lab.data import Dataset
from kfc.lab.diagnosis import DivergenceWatch, diagnose, diagnostics_of, find_origin
from kfc.lab.first_estimate import EstimateInterruptedError, FirstEstimate
from kfc.lab.processes.ranks import Launch, explained_collectives, failing_together, gather_objects
from kfc.lab.runs import AnyFolder, RemoteFolder, RunFolder, matching_checkpoint, require_data
from kfc.optimizers import KFAC
from kfc.optimizers.base import CurvatureOptimizer
from kfc.schedule import now

Row = dict[str, Any]
OnRow = Callable[[Row], None]
LIMIT_REASONS = ("epochs", "updates", "time")  # the reasons of an end that was configured


class Trainer:
    """Trains one run; ``advance`` continues it, ``resume`` restores it from its folder.

    Args:
        on_row: called with every row of metrics when it is written, and during the first estimate
            of the factors with rows of the kind "estimating", which are not written.

    Attributes:
        update: the number of updates so far.
        seconds: training time without evaluations and checkpoints, of the slowest rank.
        end: the row that says why the run has ended; ``None`` until then.
    """

    def __init__(
        self, components: RunComponents, folder: AnyFolder, on_row: OnRow | None = None
    ) -> None:
        self.components = components
        self.ranks = components.ranks
        self.folder = folder
        self.update = 0
        self.seconds = 0.0
        self.end: Row | None = None
        self.last_evaluation: Row = {}
        self._on_row = on_row
        self._stream: Iterator[tuple[Tensor, Tensor]] | None = None
        self._costs = Costs(components.optimizer)
        self._saved_at = 0.0
        self._loss = torch.zeros(())
        self._images = components.first_image
        self._first_estimate = FirstEstimate(components)
        self._last_log = (0, 0.0)
        self._watch = DivergenceWatch(components.optimizer)

    @classmethod
    def start(
        cls,
        path: Path,
        config: RunConfig,
        data: Dataset,
        *,
        name: str,
        on_row: OnRow | None = None,
        ranks: Ranks | None = None,
    ) -> Trainer:
        """Start a run in a new folder."""
        ranks = ranks or Ranks(None)
        digest = ranks.share(data.digest)
        with failing_together(ranks):
            require_data(data, digest, "rank 0 has")
        components = RunComponents(config, data, ranks)
        folder: AnyFolder = RemoteFolder(path, config, digest)
        with failing_together(ranks):
            if ranks.rank == 0:
                job = Launch.from_environment().job
                folder = RunFolder.create(path, config, digest, name, processes=ranks.size, job=job)
        trainer = cls(components, folder, on_row)
        trainer._begin()
        return trainer

    @classmethod
    def resume(
        cls,
        folder: AnyFolder,
        data: Dataset,
        *,
        restart: bool = False,
        on_row: OnRow | None = None,
        ranks: Ranks | None = None,
    ) -> Trainer:
        """Continue from a folder's newest good checkpoint, or begin if it has none yet.

        The number of ranks may differ from that of the process that saved the checkpoint. The
        folder is unchanged until the run is restored.

        Args:
            restart: begin again, and discard the checkpoints and metrics.
        """
        ranks = ranks or Ranks(None)
        with failing_together(ranks):
            require_data(data, folder.data_digest, f"{folder.path} was trained on")
        trainer = cls(RunComponents(folder.config, data, ranks), folder, on_row)
        state = None
        with failing_together(ranks):
            if restart:
                folder.restart()
            else:
                state = folder.load()
        state = ranks.share(state)
        if state is None:
            trainer._begin()
        else:
            with failing_together(ranks):
                trainer._restore(state)
        return trainer

    def _begin(self) -> None:
        loss = self.evaluate_now()["train_loss"]
        self._watch.begin(loss)
        if not self._end_if_diverged(self._watch.sign_in_loss(loss)):
            self.save()

    def close(self) -> None:
        self._stream = None
        self.folder.close()

    # Training

    @property
    def epoch(self) -> float:
        return self.update / len(self.components.batches)

    def advance(
        self, seconds: float = math.inf, interrupted: Callable[[], bool] = lambda: False
    ) -> bool:
        """Train for some seconds, or to the end of the run; return whether it can continue."""
        torch.set_num_threads(self.folder.config.machine.threads)
        until = self.seconds + seconds
        stop = self._agree(interrupted()) or not self._estimate_factors(interrupted)
        while self.end is None and self.seconds < until and not stop:
            self.ranks.at(self.update + 1)
            try:
                with explained_collectives(self.ranks):
                    self._train_once()
            except FloatingPointError as error:  # KFAC found no finite step
                self._end_if_diverged("training stopped", str(error))
            else:
                stop = self._agree(interrupted())
                self._do_what_is_due()
        self._wait_for_device()
        return self.end is None

    def _agree(self, interrupted: bool = False) -> bool:
        """Set the same training time on all ranks; return whether any was interrupted."""
        numbers = [self._costs.training_seconds, float(interrupted)]
        self.seconds, stop = self.ranks.largest(numbers, "times and interruptions")
        return bool(stop)

    def _estimate_factors(self, interrupted: Callable[[], bool]) -> bool:
        """Make the first estimate of the factors if it is due; return whether it was completed.

        A run that is resumed without a complete estimate makes it again.
        """
        if self.update or self.end is not None or not self._first_estimate.is_due():
            return True
        examples = self.components.estimated_examples

        def show(done: int) -> None:
            if self._on_row is not None:
                self._on_row(self._row("estimating", done=done, examples=examples))

        self._seed_generators()
        try:
            with self._costs.first_estimate(), explained_collectives(self.ranks):
                self._first_estimate.make(show, interrupted)
        except EstimateInterruptedError:
            return False
        except FloatingPointError as error:
            self._images = self._first_estimate.images
            message = f"the factors cannot be estimated: {error}"
            self._end_if_diverged("training stopped", message)
            return True
        self._agree()
        self._last_log = self.update, self.seconds
        self._write("estimate", examples=examples)
        return True

    def _train_once(self) -> None:
        """Make one update."""
        components, optimizer = self.components, self.components.optimizer
        measured = self._costs.measured
        with measured("data"):
            images, labels = self._next_batch()
        self._images = images
        self._seed_generators()
        if isinstance(optimizer, KFAC):
            with measured("forward and backward"):
                loss = optimizer.step(lambda: components.loss(images, labels))
        else:
            with measured("optimizer"):
                optimizer.zero_grad()
            with measured("forward"):
                loss = components.loss(images, labels)
            with measured("backward"):
                loss.backward()
            with measured("optimizer"):
                optimizer.step()
        self.update += 1
        with measured("optimizer"):
            components.averages.update(self.update)
            components.replica.after_update(self.update)
        self._loss = loss.detach()

    def _seed_generators(self) -> None:
        """Seed torch's global generators, from which dropout draws, for this update and rank.

        A resumed run draws the same numbers, whatever else the process has drawn.
        """
        text = f"{self.folder.config.machine.seed} {self.update} {self.ranks.rank}"
        digest = hashlib.sha256(text.encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        epoch, position = divmod(self.update, len(self.components.batches))
        if self._stream is None or position == 0:
            self._stream = self.components.batches.epoch(epoch, position)
        return self.components.on_device(*next(self._stream))

    def _do_what_is_due(self) -> None:
        """After an update: log, evaluate, save a checkpoint or end the run, where due."""
        config = self.folder.config
        reason = self._reached_limit()
        period = max(1, round(config.records.evaluation_period * len(self.components.batches)))
        logs = self.update % config.records.log_period == 0
        evaluates = self.update % period == 0 or reason is not None
        saves = evaluates or self.seconds - self._saved_at >= config.records.checkpoint_seconds
        # Several ranks count skipped steps themselves. Counting makes the host wait for a GPU.
        watches = self.ranks.size == 1 and (logs or self.components.device.type == "cpu")
        if watches and self._end_if_diverged(self._watch.sign_in_steps(self.update)):
            return
        if not (logs or saves):
            return  # reading the loss makes the host wait for the device
        self._wait_for_device()
        [loss] = self.ranks.mean([self._loss.item()], "loss")
        if self._end_if_diverged(self._watch.sign_in_loss(loss)):
            return
        if logs:
            self._log(loss)
        if evaluates:
            loss = self.evaluate_now()["train_loss"]
            if self._end_if_diverged(self._watch.sign_in_loss(loss)):
                return
        if saves:
            self.save()
        if reason:
            self._end(reason)

    def _wait_for_device(self) -> None:
        """Wait for the updates so far, so that their time is counted."""
        with self._costs.measured("optimizer"):
            now(self.components.device)
        self._agree()

    def _end_if_diverged(self, sign: str, error: str = "") -> bool:
        """End the run if there is a sign of divergence, before a checkpoint keeps its parameters.

        Args:
            error: a message that precedes the diagnosis.
        """
        if sign:
            self._end("diverged", "; ".join(filter(None, [error, self._diagnosis(sign)])))
        return bool(sign)

    def _reached_limit(self) -> str | None:
        """Return the reason why the run is complete, if it is."""
        length = self.folder.config.length
        limits = (length.epochs, length.updates, length.seconds)
        values = (self.epoch, self.update, self.seconds)
        for reason, value, limit in zip(LIMIT_REASONS, values, limits, strict=True):
            if limit is not None and value >= limit:
                return reason
        return None

    def finish(self, reason: str) -> None:
        """Evaluate, save and end the run before its limits."""
        if self.end is None:
            self.evaluate_now()
            self.save()
            self._end(reason)

    # Metrics

    def evaluate_now(self) -> Row:
        """Return the evaluation of the parameters and their averages at this update."""
        if self.last_evaluation.get("update") == self.update:
            return self.last_evaluation
        torch.set_num_threads(self.folder.config.machine.threads)
        self._seed_generators()
        components = self.components
        measures: dict[str, float] = {}
        components.replica.take_buffers_of_rank_0(components.averages)
        for split in ("train", "test"):
            loss, error = components.evaluate(split)
            measures |= {f"{split}_loss": loss, f"{split}_error": error}
            with components.averages.swapped_in():
                loss, error = components.evaluate(split)
            measures |= {f"averaged_{split}_loss": loss, f"averaged_{split}_error": error}
        self.last_evaluation = self._write(
            "evaluation",
            **measures,
            processor_seconds=self._costs.processor_seconds,
            step_seconds=self._costs.means_since_last_time(),
            diagnostics=diagnostics_of(components.optimizer, components.model),
        )
        return self.last_evaluation

    def _log(self, loss: float) -> None:
        update, seconds = self._last_log
        examples = (self.update - update) * self.folder.config.problem.batch_size
        optimizer = self.components.optimizer
        curvature = optimizer.step_diagnostics if isinstance(optimizer, CurvatureOptimizer) else {}
        self._last_log = self.update, self.seconds
        self._write(
            "progress",
            loss=loss,
            images_per_second=examples / max(self.seconds - seconds, 1e-9),
            **curvature,
        )

    def _end(self, reason: str, message: str = "") -> None:
        self.end = self._write("end", reason=reason, message=message)

    def _row(self, kind: str, **values: Any) -> Row:
        position = {"update": self.update, "epoch": self.epoch, "seconds": self.seconds}
        return {"kind": kind, **position, **values}

    def _write(self, kind: str, **values: Any) -> Row:
        """Write a row of metrics, and return it."""
        row = self._row(kind, **values)
        self.folder.write(row)
        if self._on_row is not None:
            self._on_row(row)
        return row

    def _diagnosis(self, sign: str) -> str:
        """Return the diagnosis of the rank on which the run began to diverge."""
        model, config = self.components.model, self.folder.config
        measured = diagnostics_of(self.components.optimizer, model)
        own = diagnose(sign, model, self._images, self.update, config, measured)
        bad_since = self.components.replica.bad_since()
        rank, origin = find_origin(self.ranks.gather([self._loss.item(), bad_since]))
        diagnosis = gather_objects(self.ranks, own, "texts")[rank]
        return f"{origin}; {diagnosis}" if origin else diagnosis

    # Checkpoints

    def save(self) -> None:
        """Replace the folder's checkpoint."""
        self._saved_at = self.seconds
        numbers = {k: v for k, v in self.last_evaluation.items() if isinstance(v, (int, float))}
        self.folder.save(
            {
                "update": self.update,
                "seconds": self.seconds,
                "processor_seconds": self._costs.processor_seconds,
                "last_log": list(self._last_log),
                "last_evaluation": numbers,
                "first_loss": self._watch.first_loss,
                "model": self.components.model.state_dict(),
                "optimizer": self.components.optimizer.state_dict(),
                "averages": self.components.averages.state_dict(),
            }
        )

    def _restore(self, state: Row) -> None:
        with matching_checkpoint(self.folder.path):
            self.components.model.load_state_dict(state["model"])
            self.components.optimizer.load_state_dict(state["optimizer"])
            self.components.averages.load_state_dict(state["averages"])
            self.update, self.seconds = state["update"], state["seconds"]
            self._last_log = tuple(state["last_log"])
            self.last_evaluation = state["last_evaluation"]
            self._watch.begin(state["first_loss"], self.update)
        self._saved_at = self.seconds
        self._costs.resume_at(self.seconds, state["processor_seconds"])
        if reason := self._reached_limit():
            self._end(reason)
