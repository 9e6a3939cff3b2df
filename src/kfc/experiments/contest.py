"""A comparison's runs: they take turns, and the best learning rates go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from kfc.experiments.comparison import Comparison
from kfc.experiments.config import ConfigError, RunConfig
from kfc.experiments.data import Dataset
from kfc.experiments.networks import NetworkError
from kfc.experiments.parts import Parts
from kfc.experiments.runs import Record, RunFolder, read_record
from kfc.experiments.training import LIMIT_REASONS, Row, Trainer


class Contender:
    """One run of a comparison: in its folder, and while it goes on also in memory."""

    def __init__(self, method: str, config: RunConfig, path: Path) -> None:
        self.method = method
        self.config = config
        self.path = path
        self.trainer: Trainer | None = None

    def start(self, data: Dataset, on_row: Callable[[Row], None]) -> None:
        """Begin, or go on; a run that has ended stays as it is, unless its limits were moved."""
        if not self.path.exists():
            self.trainer = Trainer.start(
                self.path, self.config, data, name=self.method, on_row=on_row
            )
        elif not self._is_over():
            folder = RunFolder.open(self.path)
            limits = self.config.epochs, self.config.updates, self.config.seconds
            if folder.config != (config := folder.config.with_limits(*limits)):
                folder.set_config(config)
            self.trainer = Trainer.resume(folder, data, on_row=on_row)

    def _is_over(self) -> bool:
        end = self.record().end
        if end is None:
            return False
        return end["reason"] not in LIMIT_REASONS or self.config.part_of_the_way(end) >= 1

    def record(self) -> Record:
        return read_record(self.path)

    def advance(self, seconds: float, interrupted: Callable[[], bool]) -> None:
        if self.trainer is not None and not self.trainer.advance(seconds, interrupted):
            self.close()

    def finish(self, reason: str) -> None:
        if self.trainer is not None:
            self.trainer.finish(reason)
            self.close()

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None


class Contest:
    """Runs a comparison in a folder, from the beginning or from where it was interrupted.

    Args:
        on_row: called with the contender and every row of its metrics.
    """

    def __init__(
        self,
        comparison: Comparison,
        folder: Path,
        data: Dataset,
        on_row: Callable[[Contender, Row], None],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.comparison = comparison
        self.folder = folder
        self._data = data
        self._on_row = on_row
        self._interrupted = interrupted
        self.contenders = [
            Contender(method, config, folder / _folder_name(method, config))
            for method, configs in comparison.candidates().items()
            for config in configs
        ]
        names = [contender.path.name for contender in self.contenders]
        if len(set(names)) < len(names):
            raise ConfigError(f"methods and learning rates must differ: {', '.join(names)}")

    def check(self) -> None:
        """Build every run once, so that what cannot be shows before there is a folder.

        Raises:
            ConfigError, NetworkError: naming the method.
        """
        for contender in self.contenders:
            try:
                Parts(contender.config, self._data)
            except (ConfigError, NetworkError) as error:
                raise type(error)(f"method {contender.method}: {error}") from error

    def run(self) -> bool:
        """To the end, or until interrupted; whether it is the end."""
        try:
            for contender in self.contenders:
                if not self._interrupted():
                    contender.start(self._data, lambda row, c=contender: self._on_row(c, row))  # type: ignore[misc]
            self._tune()
            self._take_turns(self.contenders, until=self._has_reached_goals)
            for contender in self.contenders:
                self._leave(contender)
        finally:
            for contender in self.contenders:
                contender.close()
        return not self._interrupted()

    def records(self) -> list[Record]:
        return [contender.record() for contender in self.contenders if contender.path.exists()]

    def _tune(self) -> None:
        """Try every learning rate of methods that have several, and let the best one go on."""
        undecided = [
            running
            for method in self.comparison.methods
            if len(running := [c for c in self.contenders if c.method == method and c.trainer]) > 1
        ]
        if not undecided:
            return
        # Those with nothing to decide take their turns too: what they do now counts as well.
        self._take_turns(self.contenders, until=self._was_tried)
        if self._interrupted():
            return
        for running in undecided:
            best = min(running, key=_training_loss)
            for contender in running:
                if contender is not best:
                    contender.finish("not chosen")

    def _take_turns(
        self, contenders: Sequence[Contender], until: Callable[[Contender], bool]
    ) -> None:
        """A slice each, round after round, so that whatever slows the machine slows all alike."""
        while turn := [c for c in contenders if c.trainer is not None and not until(c)]:
            for contender in turn:
                contender.advance(self.comparison.slice_seconds, self._interrupted)
                if self._interrupted():
                    return

    def _was_tried(self, contender: Contender) -> bool:
        trainer = contender.trainer
        return trainer is None or trainer.seconds >= self.comparison.tuning_seconds

    def _has_reached_goals(self, contender: Contender) -> bool:
        goals = {
            "averaged_train_error": self.comparison.train_errors,
            "averaged_test_error": self.comparison.test_errors,
            "averaged_train_loss": self.comparison.train_losses,
        }
        if not self.comparison.stop_at_goals or not any(goals.values()):
            return False
        rows = contender.record().evaluations
        return all(
            any(is_at_most(row[measure], min(values)) for row in rows)
            for measure, values in goals.items()
            if values
        )

    def _leave(self, contender: Contender) -> None:
        """Save a run that was interrupted; end one that has nothing left to reach."""
        if contender.trainer is None:
            return
        if self._interrupted():
            contender.trainer.save()
        else:
            contender.finish("targets")


def is_at_most(value: float | None, goal: float) -> bool:
    return value is not None and value <= goal


def _training_loss(contender: Contender) -> float:
    """After an evaluation, if it goes on; a run may also have come to its end, or diverged."""
    if contender.trainer is not None:
        contender.trainer.evaluate_now()
    record = contender.record()
    loss: float | None = record.evaluations[-1]["averaged_train_loss"]
    diverged = record.end is not None and record.end["reason"] == "diverged"
    return math.inf if diverged or loss is None else loss


def _folder_name(method: str, config: RunConfig) -> str:
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in method.lower())
    return plain if config.lr is None else f"{plain}-lr{config.lr:g}"
