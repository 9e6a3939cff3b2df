"""Execution of a comparison: its runs train in turn, and the best learning rates continue."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from kfc.lab.comparison.settings import Comparison
from kfc.lab.components import RunComponents
from kfc.lab.config import ConfigError, RunConfig
from kfc.lab.data import Dataset
from kfc.lab.networks import NetworkError
from kfc.lab.runs import Record, RunFolder, read_record
from kfc.lab.training import LIMIT_REASONS, Row, Trainer


class ComparedRun:
    """One run of a comparison.

    Attributes:
        trainer: ``None`` while the run is not in progress.
    """

    def __init__(self, method: str, config: RunConfig, folder: Path) -> None:
        plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in method.lower())
        rate = "" if config.lr is None else f"-lr{config.lr:g}"
        self.method = method
        self.config = config
        self.path = folder / f"{plain}{rate}"
        self.trainer: Trainer | None = None

    @property
    def label(self) -> str:
        rate = self.config.lr
        return self.method if rate is None else f"{self.method} (lr {rate:g})"

    def start(self, data: Dataset, on_row: Callable[[ComparedRun, Row], None]) -> None:
        """Start or resume the run, unless it has ended and its limits are the same."""

        def show(row: Row) -> None:
            on_row(self, row)

        if not self.path.exists():
            self.trainer = Trainer.start(
                self.path, self.config, data, name=self.method, on_row=show
            )
        elif not self._has_ended():
            folder = RunFolder.open(self.path)
            limits = self.config.epochs, self.config.updates, self.config.seconds
            if folder.config != (config := folder.config.with_limits(*limits)):
                folder.set_config(config)
            self.trainer = Trainer.resume(folder, data, on_row=show)

    def _has_ended(self) -> bool:
        end = self.record().end
        if end is None:
            return False
        return end["reason"] not in LIMIT_REASONS or self.config.fraction_done(end) >= 1

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

    def training_loss(self) -> float:
        """Return the last training loss, after an evaluation if the run is in progress."""
        if self.trainer is not None:
            self.trainer.evaluate_now()
        record = self.record()
        loss: float | None = record.evaluations[-1]["averaged_train_loss"]
        diverged = record.end is not None and record.end["reason"] == "diverged"
        return math.inf if diverged or loss is None else loss


class ComparisonRunner:
    """Runs a comparison in a folder, from the beginning or from where it was interrupted.

    Args:
        on_row: called with the run and every row of its metrics.
    """

    def __init__(
        self,
        comparison: Comparison,
        folder: Path,
        data: Dataset,
        on_row: Callable[[ComparedRun, Row], None],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.comparison = comparison
        self.folder = folder
        self._data = data
        self._on_row = on_row
        self._interrupted = interrupted
        self.runs = [
            ComparedRun(method, config, folder)
            for method, configs in comparison.candidates().items()
            for config in configs
        ]
        names = [run.path.name for run in self.runs]
        if len(set(names)) < len(names):
            raise ConfigError(f"methods and learning rates must differ: {', '.join(names)}")

    def check(self) -> None:
        """Build the components of every run once, before there is a folder.

        Raises:
            ConfigError, NetworkError: naming the method.
        """
        for run in self.runs:
            try:
                RunComponents(run.config, self._data)
            except (ConfigError, NetworkError) as error:
                raise type(error)(f"method {run.method}: {error}") from error

    def run(self) -> bool:
        """Run to the end or until interrupted; return whether it is the end."""
        try:
            for run in self.runs:
                if not self._interrupted():
                    run.start(self._data, self._on_row)
            self._choose_learning_rates()
            self._take_turns(until=self._has_reached_goals)
            for run in self.runs:
                if not self._interrupted():
                    run.finish("targets")
                elif run.trainer is not None:
                    run.trainer.save()
        finally:
            for run in self.runs:
                run.close()
        return not self._interrupted()

    def records(self) -> list[Record]:
        return [run.record() for run in self.runs if run.path.exists()]

    def _choose_learning_rates(self) -> None:
        """Try all candidates of methods with several, and end all but the best of each."""
        undecided = [
            running
            for method in self.comparison.methods
            if len(running := [r for r in self.runs if r.method == method and r.trainer]) > 1
        ]
        if not undecided:
            return
        # Methods with a single candidate train as well, which counts towards their own run.
        self._take_turns(until=self._was_tried)
        if self._interrupted():
            return
        for running in undecided:
            best = min(running, key=ComparedRun.training_loss)
            for run in running:
                if run is not best:
                    run.finish("not chosen")

    def _take_turns(self, until: Callable[[ComparedRun], bool]) -> None:
        """Train all runs in slices, so that other load on the machine affects them equally."""
        while turn := [run for run in self.runs if run.trainer is not None and not until(run)]:
            for run in turn:
                run.advance(self.comparison.slice_seconds, self._interrupted)
                if self._interrupted():
                    return

    def _was_tried(self, run: ComparedRun) -> bool:
        return run.trainer is None or run.trainer.seconds >= self.comparison.tuning_seconds

    def _has_reached_goals(self, run: ComparedRun) -> bool:
        goals = {
            "averaged_train_error": self.comparison.train_errors,
            "averaged_test_error": self.comparison.test_errors,
            "averaged_train_loss": self.comparison.train_losses,
        }
        if not self.comparison.stop_at_goals or not any(goals.values()):
            return False
        rows = run.record().evaluations
        return all(
            any(row[measure] is not None and row[measure] <= min(values) for row in rows)
            for measure, values in goals.items()
            if values
        )
