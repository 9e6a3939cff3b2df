"""Execution of a comparison: its runs train in turn, and the best learning rates continue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kfc.lab.comparison.settings import Comparison
from kfc.lab.components import RunComponents
from kfc.lab.config import ConfigError, RunConfig
from kfc.lab.data import Dataset
from kfc.lab.disk import RunError
from kfc.lab.halving import best_of, half
from kfc.lab.options import config_errors
from kfc.lab.runs import Record, RunFolder, read_end, read_record
from kfc.lab.training import LIMIT_REASONS, Row, Trainer

NOT_CHOSEN = "not chosen"


class ComparedRun:
    """One run of a comparison: a method with one learning rate, in a folder of its own.

    Attributes:
        note: why the run is not continued from its newest checkpoint; empty if it is.
    """

    def __init__(self, method: str, config: RunConfig, folder: Path) -> None:
        plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in method.lower())
        rate = config.method.lr
        self.method = method
        self.config = config
        self.path = folder / (plain if rate is None else f"{plain}-lr{rate:g}")
        self.label = method if rate is None else f"{method} (lr {rate:g})"
        self.note = ""

    def record(self) -> Record:
        return read_record(self.path)

    def start(self, data: Dataset, on_row: Callable[[Row], None]) -> Trainer | None:
        """Start or resume the run, unless it has ended and its limits are the same."""
        if not self.path.exists():
            return Trainer.start(self.path, self.config, data, name=self.method, on_row=on_row)
        end = read_end(self.path)
        if end and (
            end["reason"] not in LIMIT_REASONS or self.config.length.fraction_done(end) >= 1
        ):
            return None
        folder = RunFolder(self.path, self.config.length)
        mine, theirs = self.config, folder.config
        if (mine.problem, mine.method) != (theirs.problem, theirs.method):
            folder.close()
            raise RunError(f"{self.path} is not the run of this comparison: its settings differ")
        trainer = Trainer.resume(folder, data, on_row=on_row)
        self.note = folder.note
        return trainer

    def training_loss(self) -> float:
        """Return the training loss of the last evaluation; ∞ if the run diverged."""
        record = self.record()
        loss: float | None = record.evaluations[-1]["averaged_train_loss"]
        diverged = record.end is not None and record.end["reason"] == "diverged"
        return math.inf if diverged or loss is None else loss


class ComparisonRunner:
    """Runs a comparison in a folder, from the beginning or from where it was interrupted."""

    def __init__(
        self,
        comparison: Comparison,
        folder: Path,
        data: Dataset,
        on_row: Callable[[ComparedRun, Row], None],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.comparison = comparison
        self.runs = [
            ComparedRun(method, config, folder)
            for method, configs in comparison.candidates().items()
            for config in configs
        ]
        self._data = data
        self._on_row = on_row
        self._interrupted = interrupted
        self._trainers: dict[ComparedRun, Trainer] = {}  # of the runs in progress
        names = [run.path.name for run in self.runs]
        if len(set(names)) < len(names):
            raise ConfigError(f"methods and learning rates must differ: {', '.join(names)}")

    def check(self) -> None:
        """Build the components of every run once, so that errors come before there is a folder."""
        for run in self.runs:
            with config_errors(f"method {run.method}: "):
                RunComponents(run.config, self._data)

    def run(self, on_started: Callable[[], None] = lambda: None) -> bool:
        """Run all methods, unless interrupted; return whether all are complete.

        Args:
            on_started: called when all runs have been started or restored.
        """
        try:
            # Runs that exist first: if one cannot be continued, no other one is begun.
            for run in sorted(self.runs, key=lambda run: not run.path.exists()):
                if self._interrupted():
                    break
                if trainer := run.start(self._data, partial(self._on_row, run)):
                    self._trainers[run] = trainer
            self._trainers = {
                run: self._trainers[run] for run in self.runs if run in self._trainers
            }
            if not self._interrupted():
                on_started()
                self._choose_learning_rates()
            self._take_turns(until=self._has_reached_goals)
            for run, trainer in list(self._trainers.items()):
                if self._interrupted():
                    trainer.save()
                else:
                    self._finish(run, "targets")
        finally:
            for run in list(self._trainers):
                self._close(run)
        return not self._interrupted()

    def records(self) -> list[Record]:
        return [run.record() for run in self.runs if run.path.exists()]

    def _choose_learning_rates(self) -> None:
        """Try the candidates of methods with several, by successive halving.

        The better half continues until one is left, which has then trained for the tuning time;
        from one choice to the next, that time doubles.
        """
        candidates = {
            method: [run for run in self.runs if run.method == method]
            for method in self.comparison.methods
        }
        choices = math.ceil(math.log2(max(map(len, candidates.values()))))
        for choice in range(1, choices + 1):
            seconds = self.comparison.tuning_seconds / 2 ** (choices - choice)
            undecided = {
                method: left
                for method, runs in candidates.items()
                if len(left := self._still_tried(runs)) > half(len(runs), choice)
            }
            if not undecided:
                continue  # as after a resumption
            # Methods with a single candidate train as well, which counts towards their own run.
            self._take_turns(until=partial(self._was_tried, seconds=seconds))
            if self._interrupted():
                return
            for method, left in undecided.items():
                self._drop_all_but(half(len(candidates[method]), choice), left)

    def _still_tried(self, candidates: Sequence[ComparedRun]) -> list[ComparedRun]:
        """Return the candidates that were neither dropped nor diverged."""
        ends = [(run, read_end(run.path)) for run in candidates]
        return [
            run for run, end in ends if not end or end["reason"] not in (NOT_CHOSEN, "diverged")
        ]

    def _drop_all_but(self, count: int, candidates: Sequence[ComparedRun]) -> None:
        """End all candidates but those with the lowest training losses."""
        for run in candidates:
            if run in self._trainers:
                self._trainers[run].evaluate_now()
        kept = best_of([run.training_loss() for run in candidates], count)
        for index, run in enumerate(candidates):
            if index not in kept and run in self._trainers:
                self._finish(run, NOT_CHOSEN)

    def _take_turns(self, until: Callable[[ComparedRun], bool]) -> None:
        """Train all runs in slices, so that other load on the machine affects them equally."""
        while turn := [run for run in self._trainers if not until(run)]:
            for run in turn:
                slice_seconds = self.comparison.slice_seconds
                if not self._trainers[run].advance(slice_seconds, self._interrupted):
                    self._close(run)
                if self._interrupted():
                    return

    def _finish(self, run: ComparedRun, reason: str) -> None:
        self._trainers[run].finish(reason)
        self._close(run)

    def _close(self, run: ComparedRun) -> None:
        self._trainers.pop(run).close()

    def _was_tried(self, run: ComparedRun, seconds: float) -> bool:
        """Return whether a candidate has trained for so long after its first estimate."""
        trainer, estimate = self._trainers[run], run.record().estimate
        trained = trainer.seconds - (estimate["seconds"] if estimate else 0.0)
        return trainer.update > 0 and trained >= seconds

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
