"""Execution of a benchmark: rounds in which runs take turns, from the beginning or resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfc.lab.data import load
from kfc.lab.disk import RunError
from kfc.lab.suite.halving import stage, winner
from kfc.lab.suite.methods import METHODS
from kfc.lab.suite.problems import Problem, make_problem
from kfc.lab.suite.scoring import LARGEST_RATIO
from kfc.lab.suite.search import DEFAULTS, settings_of
from kfc.lab.suite.store import TUNED, Entry, Record, Store
from kfc.lab.suite.trial import Clock, Outcome, Trial
from kfc.lab.suite.workloads import WORKLOADS, Workload

# A run trains for this fraction of the time limit before the next one's turn.
SLICE = 1 / 24


@dataclass(frozen=True)
class Round:
    """All runs on one workload under one ruleset with one seed, which take turns."""

    workload: Workload
    ruleset: str
    seed: int
    entries: Sequence[Entry]

    @property
    def title(self) -> str:
        return f"{self.workload.name}, {self.ruleset}, seed {self.seed}"


OnTurn = Callable[[Round, Record], None]


class Benchmark:
    """A benchmark in a folder.

    Args:
        on_turn: called with the round and the run after every slice.
        interrupted: returns whether to stop.
        clock: as ``Trial`` takes it.
    """

    def __init__(
        self,
        store: Store,
        *,
        data_dir: Path | None = None,
        on_turn: OnTurn = lambda current, record: None,
        interrupted: Callable[[], bool] = lambda: False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.store = store
        self.settings = store.settings
        self.workloads = [
            WORKLOADS[name].adjusted(self.settings.quick, self.settings.limit_factor)
            for name in self.settings.workloads
        ]
        self._data_dir = data_dir
        self._on_turn = on_turn
        self._interrupted = interrupted
        self._clock = clock
        self._spent_before = store.spent
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds of wall-clock time in all sessions."""
        return self._spent_before + time.monotonic() - self._began

    @property
    def is_out_of_time(self) -> bool:
        return self.spent >= 3600 * self.settings.hours

    def run(self) -> bool:
        """Run all rounds, unless interrupted or out of time; return whether all are complete.

        Every ruleset is complete for one seed before the next seed begins, so that a benchmark that
        runs out of time has results with fewer seeds rather than for fewer workloads.
        """
        torch.set_num_threads(self.settings.threads)
        for method in self.settings.methods:
            warm_up(method)
        return all(self._run_round(current) for current in self.rounds())

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds in order; settings of later seeds come from the trials of the first."""
        for seed in range(self.settings.seeds):
            for ruleset in self.settings.rulesets:
                for workload in self.workloads:
                    methods = self.settings.methods
                    entries = [
                        e for m in methods for e in self._entries(workload, ruleset, m, seed)
                    ]
                    yield Round(workload, ruleset, seed, entries)

    def records(self) -> list[Record]:
        """Return all runs that have ended, in the order of the rounds."""
        found = []
        for seed in range(self.settings.seeds):
            for ruleset in self.settings.rulesets:
                for workload in self.workloads:
                    for method in self.settings.methods:
                        try:
                            entries = self._entries(workload, ruleset, method, seed)
                        except UndecidedError:
                            continue
                        pairs = [(entry, self.store.finished(entry)) for entry in entries]
                        found += [Record(e, outcome) for e, outcome in pairs if outcome]
        return found

    def _entries(self, workload: Workload, ruleset: str, method: str, seed: int) -> list[Entry]:
        if ruleset != TUNED:
            return [Entry(workload.name, ruleset, method, 0, seed, DEFAULTS)]
        settings = settings_of(METHODS[method], self.settings.trials)
        first = [
            Entry(workload.name, ruleset, method, index, 0, setting)
            for index, setting in enumerate(settings)
        ]
        if seed == 0:
            return first
        outcomes = [self.store.finished(entry) for entry in first]
        known = [outcome for outcome in outcomes if outcome is not None]
        if len(known) < len(first):
            raise UndecidedError(f"{method} has not been tuned on {workload.name} yet")
        chosen = winner(known, workload.seconds)
        return [Entry(workload.name, ruleset, method, chosen, seed, settings[chosen])]

    # One round

    def _run_round(self, current: Round) -> bool:
        """Let the runs take turns until all have ended; return False if interrupted."""
        ended = {entry: self.store.finished(entry) for entry in current.entries}
        if all(ended.values()):
            return True
        trials = self._begin(current, [entry for entry, end in ended.items() if end is None])
        outcomes = {entry: end or trials[entry].outcome for entry, end in ended.items()}
        while goals := self._settle(current, trials, outcomes):
            for entry, goal in goals.items():
                if self._stopped():
                    return False
                until = outcomes[entry].seconds + SLICE * current.workload.seconds
                trials[entry].advance(min(goal, until), self._stopped)
                self._keep(current, entry, trials[entry])
        return True

    def _begin(self, current: Round, entries: Sequence[Entry]) -> dict[Entry, Trial]:
        """Start or restore runs."""
        problem = self._problem(current.workload)
        trials = {}
        for entry in entries:
            setting, seed = entry.setting, entry.seed
            trial = Trial(current.workload, problem, entry.method, setting, seed, self._clock)
            self.store.restore(entry, trial)
            trials[entry] = trial
        return trials

    def _settle(
        self, current: Round, trials: dict[Entry, Trial], outcomes: dict[Entry, Outcome]
    ) -> dict[Entry, float]:
        """End runs that can no longer affect the result; return the others and their goals."""
        goals: dict[Entry, float] = {}
        fastest = min(outcome.time for outcome in outcomes.values())
        for method in self.settings.methods:
            own = {entry: each for entry, each in outcomes.items() if entry.method == method}
            best = min(outcome.time for outcome in own.values())
            candidates, goal = stage(list(own.values()), current.workload.seconds)
            for index, (entry, outcome) in enumerate(own.items()):
                if outcome.end:
                    continue
                if index not in candidates:
                    outcome.finish("dropped", "other settings were better")
                elif outcome.seconds >= min(best, LARGEST_RATIO * fastest):
                    outcome.finish("slower", _why_slower(best))
                else:
                    goals[entry] = goal
                    continue
                self._keep(current, entry, trials[entry])
        return goals

    def _keep(self, current: Round, entry: Entry, trial: Trial) -> None:
        self.store.save(entry, trial)
        self.store.set_spent(self.spent)
        self._on_turn(current, Record(entry, trial.outcome))

    def _stopped(self) -> bool:
        return self._interrupted() or self.is_out_of_time

    def _problem(self, workload: Workload) -> Problem:
        problem = load_problem(workload.name, self._data_dir)
        if (wanted := self.settings.digests[workload.name]) != problem.digest:
            raise RunError(
                f"{self.store.folder} was begun with other data: {workload.data} has digest "
                f"{wanted} there and {problem.digest} here"
            )
        return problem


class UndecidedError(RunError):
    """The best setting of a method is not known yet."""


@cache
def load_problem(name: str, data_dir: Path | None = None) -> Problem:
    """Return the data of a workload."""
    workload = WORKLOADS[name]
    return make_problem(load(workload.data, data_dir), workload.form, workload.inputs)


def warm_up(method: str) -> None:
    """Make a step on a tiny model, so that what a library loads at its first use is not timed."""
    model = nn.Linear(4, 3)
    optimizer: Any = METHODS[method].make(model)

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1]))

    if METHODS[method].adapts:
        optimizer.step(loss)
    else:
        loss().backward()
        optimizer.step()


def _why_slower(best: float) -> str:
    if math.isfinite(best):
        return "another setting reached the target sooner"
    return f"more than {LARGEST_RATIO:g} times as long as the fastest method"
