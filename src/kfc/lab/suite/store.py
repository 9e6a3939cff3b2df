"""The folder of a benchmark: its settings, the time spent, and the state or record of every run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kfc.lab.checkpoints import read_sealed, sealed
from kfc.lab.disk import (
    RunError,
    clear_disk_errors,
    create_folder,
    read_checked,
    write_atomically,
    write_checked,
)
from kfc.lab.suite.search import Setting
from kfc.lab.suite.trial import Outcome, Trial

SETTINGS, SPENT, RUNS = "suite.json", "spent.json", "runs"
UNTUNED, TUNED = "untuned", "tuned"
RULESETS = (UNTUNED, TUNED)


@dataclass(frozen=True)
class BenchmarkSettings:
    """What a benchmark consists of.

    Attributes:
        workloads, methods: names.
        seeds: the number of seeds of the final runs; the result is their median.
        trials: the number of settings that the tuned ruleset tries for each method.
        hours: the most wall-clock time in all, over all sessions.
        quick: whether workloads have the targets and limits of `--quick`.
        threads: of each run.
        limit_factor: the factor of all time limits, for a machine of another speed.
        digests: the hash of each workload's data.
        environment: versions and machine.
    """

    workloads: tuple[str, ...]
    methods: tuple[str, ...]
    rulesets: tuple[str, ...]
    seeds: int
    trials: int
    hours: float
    quick: bool
    threads: int
    limit_factor: float
    digests: Mapping[str, str]
    environment: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Entry:
    """The identity of a run."""

    workload: str
    ruleset: str
    method: str
    trial: int
    seed: int
    setting: Setting

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.ruleset}-{self.method}-{self.trial}-seed{self.seed}"


@dataclass(frozen=True)
class Record:
    """A run and its outcome."""

    entry: Entry
    outcome: Outcome


class Store:
    """Reads and writes the folder of a benchmark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = _read_settings(folder)

    @classmethod
    def create(cls, folder: Path, settings: BenchmarkSettings) -> Store:
        create_folder(folder, SETTINGS, asdict(settings))
        return cls(folder)

    def replace_settings(self, settings: BenchmarkSettings) -> None:
        with clear_disk_errors(self.folder):
            write_checked(self.folder / SETTINGS, asdict(settings))
        self.settings = settings

    @property
    def spent(self) -> float:
        """Seconds of wall-clock time over all sessions."""
        try:
            file = self.folder / SPENT
            return float(read_checked(file)["seconds"]) if file.exists() else 0.0
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.folder / SPENT} is damaged: {error}") from error

    def set_spent(self, seconds: float) -> None:
        with clear_disk_errors(self.folder):
            write_checked(self.folder / SPENT, {"seconds": seconds})

    # Runs

    def finished(self, entry: Entry) -> Outcome | None:
        """Return the outcome of a run that has ended."""
        path = self._path(entry, "json")
        if not path.exists():
            return None
        try:
            return _outcome(read_checked(path)["outcome"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is damaged: {error}") from error

    def save(self, entry: Entry, trial: Trial) -> None:
        """Write the state of a run in progress, or the record of one that has ended."""
        with clear_disk_errors(self.folder):
            state = self._path(entry, "pt")
            state.parent.mkdir(exist_ok=True)
            if not trial.outcome.end:
                write_atomically(state, sealed(trial.state_dict()))
                return
            record = asdict(Record(entry, trial.outcome))
            write_checked(self._path(entry, "json"), finite(record))
            state.unlink(missing_ok=True)

    def restore(self, entry: Entry, trial: Trial) -> None:
        """Continue from the last state of the run, if there is one."""
        path = self._path(entry, "pt")
        if not path.exists():
            return
        state = read_sealed(path)
        try:
            trial.load_state_dict(state)
        except Exception as error:
            raise RunError(f"{path} is of another version: {error}") from error

    def _path(self, entry: Entry, kind: str) -> Path:
        return self.folder / RUNS / f"{entry.name}.{kind}"


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, in nested dicts and lists."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _outcome(values: dict[str, Any]) -> Outcome:
    known: dict[str, Any] = {k: math.inf if v is None else v for k, v in values.items()}
    curve = [
        (seconds, updates, math.inf if value is None else value)
        for seconds, updates, value in values["curve"]
    ]
    return Outcome(**{**known, "curve": curve})


def _read_settings(folder: Path) -> BenchmarkSettings:
    try:
        values = read_checked(folder / SETTINGS)
        if set(values) != {each.name for each in fields(BenchmarkSettings)}:
            raise ValueError("its settings are not those of this version of kfc")
        for name in ("workloads", "methods", "rulesets"):
            values[name] = tuple(values[name])
        return BenchmarkSettings(**values)
    except (RunError, ValueError, TypeError) as error:
        raise RunError(f"{folder} is not the folder of a suite: {error}") from error
