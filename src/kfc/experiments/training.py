"""The training loop: one run, in slices, from which it can go on after any interruption.

Several ranks run it in step: what they decide by, they have agreed on before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfc.budget import now
from kfc.distributed.workers import Workers
from kfc.experiments.config import RunConfig
from kfc.experiments.costs import Costs
from kfc.experiments.data import Dataset
from kfc.experiments.diagnosis import diagnose, find_origin
from kfc.experiments.evaluation import channels_last
from kfc.experiments.optimizers import Stepper
from kfc.experiments.parts import Parts
from kfc.experiments.processes import (
    Launch,
    explained_collectives,
    failing_together,
    gather_texts,
)
from kfc.experiments.runs import ForeignFolder, RunError, RunFolder
from kfc.optimizers import KFAC
from kfc.optimizers.base import CurvatureOptimizer
from kfc.randomness import (
    accelerators_of,
    forked_random_state,
    get_random_state,
    set_random_state,
)

Row = dict[str, Any]
LIMIT_REASONS = ("epochs", "updates", "time")  # why a run ended that came to its configured end


class Trainer:
    """One run. ``advance`` takes it further; whatever kills the process, ``resume`` goes on.

    Args:
        parts: made from the folder's config.
        folder: rank 0's; the other ranks have none.
        on_row: called with every row of metrics as it is written.

    Attributes:
        update: how many were made.
        seconds: of training, without evaluations and checkpoints; the slowest rank's.
        end: why the run is over, or ``None``.
    """

    def __init__(
        self,
        parts: Parts,
        folder: RunFolder | ForeignFolder,
        on_row: Callable[[Row], None] = lambda row: None,
    ) -> None:
        self.parts = parts
        self.workers = parts.workers
        self.folder = folder
        self.update = 0
        self.seconds = 0.0
        self.end: Row | None = None
        self.last_evaluation: Row = {}
        self._on_row = on_row
        self._accelerators = accelerators_of(parts.model)
        self._random = self._seeded_random_state()
        self._working = False
        self._stream: Iterator[tuple[Tensor, Tensor]] | None = None
        self._costs = Costs(parts.optimizer)
        self._saved_at = 0.0
        self._loss = torch.zeros(())
        self._images = parts.first_images()
        self._last_log = (0, 0.0)

    # Beginning and going on

    @classmethod
    def start(
        cls,
        path: Path,
        config: RunConfig,
        data: Dataset,
        *,
        name: str,
        on_row: Callable[[Row], None] = lambda row: None,
        workers: Workers | None = None,
    ) -> Trainer:
        """A new run in a new folder."""
        workers = workers or Workers(None)
        digest = workers.share(data.digest)
        with failing_together(workers):
            _require_data(data, digest, "rank 0 has")
        parts = Parts(config, data, workers)
        with failing_together(workers):
            folder = _new_folder(path, config, data.digest, name, workers)
        trainer = cls(parts, folder, on_row)
        trainer._begin()
        return trainer

    @classmethod
    def resume(
        cls,
        folder: RunFolder | ForeignFolder,
        data: Dataset,
        *,
        on_row: Callable[[Row], None] = lambda row: None,
        workers: Workers | None = None,
    ) -> Trainer:
        """Go on from a folder's last checkpoint, or from the beginning if there is none.

        Of how many ranks the checkpoint was makes no difference to the state.
        """
        workers = workers or Workers(None)
        with failing_together(workers):
            _require_data(data, folder.data_digest, f"{folder.path} was trained on")
        trainer = cls(Parts(folder.config, data, workers), folder, on_row)
        with failing_together(workers):
            state = folder.load()
        state = workers.share(state)
        if state is None:
            trainer._begin()
        else:
            with failing_together(workers):  # one state, so that it fits on all ranks or on none
                trainer._restore(state)
        return trainer

    def _seeded_random_state(self) -> list[Tensor]:
        with forked_random_state(self._accelerators):
            torch.manual_seed(self.folder.config.seed)
            return self._own_random_state(get_random_state(self._accelerators))

    def _own_random_state(self, of_rank_0: list[Tensor]) -> list[Tensor]:
        """Another for each rank, so that no two drop out the same; it follows from rank 0's."""
        if self.workers.rank == 0:
            return of_rank_0
        digest = hashlib.sha256(f"rank {self.workers.rank}".encode())
        for state in of_rank_0:
            digest.update(state.numpy().tobytes())
        with forked_random_state(self._accelerators):
            torch.manual_seed(int.from_bytes(digest.digest()[:8], "big") >> 1)
            return get_random_state(self._accelerators)

    def _begin(self) -> None:
        with self._at_work():
            self._evaluate()
        self._end_if_not_finite(self.last_evaluation["train_loss"])

    def close(self) -> None:
        self._stream = None
        self.folder.close()

    # The way

    @property
    def epoch(self) -> float:
        return self.update / len(self.parts.batches)

    def advance(
        self, seconds: float = math.inf, interrupted: Callable[[], bool] = lambda: False
    ) -> bool:
        """Train for so many seconds, or to the end; whether there is more to do."""
        until = self.seconds + seconds
        with self._at_work():
            stop = self._agree(interrupted())
            while self.end is None and self.seconds < until and not stop:
                self.workers.at(self.update)
                try:
                    with explained_collectives(self.workers):
                        self._train_once()
                except FloatingPointError as error:  # of KFAC, which has tried what it can
                    self._end("diverged", f"{error}; {self._diagnosis()}")
                else:
                    stop = self._agree(interrupted())
                    self._look_after()
            self._wait_for_device()
        return self.end is None

    def _agree(self, interrupted: bool = False) -> bool:
        """Let all ranks have one time; whether any of them was interrupted."""
        numbers = [self._costs.training_seconds, float(interrupted)]
        self.seconds, stop = self.workers.largest(numbers, "agreement")
        return bool(stop)

    def _train_once(self) -> None:
        """One update."""
        parts, costs = self.parts, self._costs
        with costs.measured("data"):
            images, labels = self._next_batch()
        self._images = images
        if isinstance(parts.optimizer, KFAC):
            with costs.measured("forward and backward"):
                loss = parts.optimizer.step(lambda: parts.loss(images, labels))
        else:
            loss = self._descend(parts.optimizer, images, labels)
        self.update += 1
        with costs.measured("optimizer"):
            parts.averages.update(self.update)
            parts.replica.after_update(self.update)
        self._loss = loss.detach()

    def _descend(self, optimizer: Stepper, images: Tensor, labels: Tensor) -> Tensor:
        """The usual loop's body; the loss before the step."""
        costs = self._costs
        with costs.measured("optimizer"):
            optimizer.zero_grad()
        with costs.measured("forward"):
            loss = self.parts.loss(images, labels)
        with costs.measured("backward"):
            loss.backward()
        with costs.measured("optimizer"):
            optimizer.step()
        return loss

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        epoch, position = divmod(self.update, len(self.parts.batches))
        if self._stream is None or position == 0:
            self._stream = self.parts.batches.epoch(epoch, position)
        images, labels = next(self._stream)
        device = self.parts.device
        return channels_last(images.to(device)), labels.to(device)

    def _look_after(self) -> None:
        """After an update: what is due of logs, evaluations, checkpoints, and the end."""
        reason = self._reached_limit()
        logs, evaluates = self._is_due(self.folder.config.log_period), self._evaluation_is_due()
        saves = self._checkpoint_is_due()
        if not (logs or evaluates or saves or reason):
            return  # to read the loss makes the host wait, so not at every update
        self._wait_for_device()
        [loss] = self.workers.mean([self._loss.item()], "loss")
        if self._end_if_not_finite(loss):
            return
        if logs:
            self._log(loss)
        if evaluates or reason:
            self._evaluate()
            if self._end_if_not_finite(self.last_evaluation["train_loss"]):
                return
        if evaluates or reason or saves:
            self.save()
        if reason:
            self._end(reason)

    def _wait_for_device(self) -> None:
        """What it still has to do belongs to the updates so far."""
        with self._costs.measured("optimizer"):
            now(self.parts.device)
        self._agree()

    def _end_if_not_finite(self, loss: float) -> bool:
        """Before a checkpoint could keep it."""
        if math.isfinite(loss):
            return False
        self._end("diverged", self._diagnosis())
        return True

    def _is_due(self, period: int) -> bool:
        return self.update % period == 0

    def _evaluation_is_due(self) -> bool:
        period = self.folder.config.evaluation_period * len(self.parts.batches)
        return self._is_due(max(1, round(period)))

    def _checkpoint_is_due(self) -> bool:
        return self.seconds - self._saved_at >= self.folder.config.checkpoint_seconds

    def _reached_limit(self) -> str | None:
        config = self.folder.config
        reached = {
            "epochs": config.epochs is not None and self.epoch >= config.epochs,
            "updates": config.updates is not None and self.update >= config.updates,
            "time": config.seconds is not None and self.seconds >= config.seconds,
        }
        return next((reason for reason in LIMIT_REASONS if reached[reason]), None)

    def finish(self, reason: str) -> None:
        """End the run before its limits, with what it has."""
        if self.end is None:
            self.evaluate_now()
            self.save()
            self._end(reason)

    def evaluate_now(self) -> Row:
        """The row of an evaluation at this update."""
        if self.last_evaluation.get("update") != self.update:
            with self._at_work():
                self._evaluate()
        return self.last_evaluation

    # Records

    def _evaluate(self) -> None:
        """Errors of the parameters and of their averages, on both splits."""
        parts, measures = self.parts, {}
        parts.replica.take_buffers_of_rank_0(parts.averages)
        for kind, examples in (("train", parts.train), ("test", parts.test)):
            measures[f"{kind}_loss"], measures[f"{kind}_error"] = parts.evaluate(examples)
            with parts.averages.swapped_in():
                loss, error = parts.evaluate(examples)
            measures[f"averaged_{kind}_loss"], measures[f"averaged_{kind}_error"] = loss, error
        row = {
            **self._position("evaluation"),
            **measures,
            "step_seconds": self._costs.means_since_last_time(),
            "diagnostics": _diagnostics(parts.optimizer),
        }
        self.last_evaluation = row
        self._write(row)

    def _log(self, loss: float) -> None:
        update, seconds = self._last_log
        examples = (self.update - update) * self.folder.config.batch_size
        row = {
            **self._position("progress"),
            "loss": loss,
            "images_per_second": examples / max(self.seconds - seconds, 1e-9),
        }
        if isinstance(self.parts.optimizer, CurvatureOptimizer):
            row.update(self.parts.optimizer.step_diagnostics)
        self._last_log = self.update, self.seconds
        self._write(row)

    def _position(self, kind: str) -> Row:
        return {
            "kind": kind,
            "update": self.update,
            "epoch": self.epoch,
            "seconds": self.seconds,
        }

    def _end(self, reason: str, message: str = "") -> None:
        self.end = {**self._position("end"), "reason": reason, "message": message}
        self._write(self.end)

    def _write(self, row: Row) -> None:
        self.folder.write(row)
        self._on_row(row)

    def _diagnosis(self) -> str:
        """Of the rank where it began, if that is one among several."""
        loss, since = self._loss.item(), self.parts.replica.bad_since()
        origin = find_origin(self.workers.gather([loss, since]))
        diagnosis = gather_texts(self.workers, self._own_diagnosis())[origin.rank]
        return "; ".join(part for part in (origin.description, diagnosis) if part)

    def _own_diagnosis(self) -> str:
        config = self.folder.config
        return diagnose(
            self.parts.model,
            self._images,
            update=self.update,
            optimizer=config.optimizer,
            lr=config.lr,
            diagnostics=_diagnostics(self.parts.optimizer),
        )

    # Checkpoints

    def save(self) -> None:
        """Replace the folder's checkpoint by this moment."""
        self._saved_at = self.seconds
        if self._working:  # or the state kept since the last slice is the current one
            self._random = get_random_state(self._accelerators)
        self.folder.save(
            {
                "update": self.update,
                "seconds": self.seconds,
                "last_log": list(self._last_log),
                "last_evaluation": _of_numbers(self.last_evaluation),
                "model": self.parts.model.state_dict(),
                "optimizer": self.parts.optimizer.state_dict(),
                "averages": self.parts.averages.state_dict(),
                "random": self._random,
            }
        )

    def _restore(self, state: Row) -> None:
        try:
            self.parts.model.load_state_dict(state["model"])
            self.parts.optimizer.load_state_dict(state["optimizer"])
            self.parts.averages.load_state_dict(state["averages"])
            self._random = self._own_random_state(state["random"])
            self.update, self.seconds = state["update"], state["seconds"]
            self._last_log = tuple(state["last_log"])
            self.last_evaluation = state["last_evaluation"]
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise RunError(
                f"the checkpoint in {self.folder.path} is not of this run: {error}"
            ) from error
        self._saved_at = self.seconds
        self._costs.training_seconds = self.seconds
        if reason := self._reached_limit():
            self._end(reason)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """With the run's own threads and random state, whatever ran in between."""
        torch.set_num_threads(self.folder.config.threads)
        with forked_random_state(self._accelerators):
            set_random_state(self._random, self._accelerators)
            self._working = True
            try:
                yield
            finally:
                self._working = False
                self._random = get_random_state(self._accelerators)


def _require_data(data: Dataset, digest: str, whose: str) -> None:
    if data.digest != digest:
        raise RunError(
            f"{whose} other data: their {data.name} has digest {digest}, the one here {data.digest}"
        )


def _new_folder(
    path: Path, config: RunConfig, digest: str, name: str, workers: Workers
) -> RunFolder | ForeignFolder:
    if workers.rank > 0:
        return ForeignFolder(path, config, digest)
    job = Launch.from_environment().job
    return RunFolder.create(path, config, digest, name, processes=workers.size, job=job)


def _diagnostics(optimizer: Any) -> Row:
    if not isinstance(optimizer, CurvatureOptimizer):
        return {}
    timing = ("seconds", "total_seconds")
    return {key: value for key, value in optimizer.diagnostics.items() if key not in timing}


def _of_numbers(row: Row) -> Row:
    return {key: value for key, value in row.items() if isinstance(value, (int, float))}
