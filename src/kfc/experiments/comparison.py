"""Several optimizers on one problem: what is compared, and the runs that take turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kfc.checks import require_number
from kfc.experiments.config import ConfigError, RunConfig, make_config
from kfc.experiments.data import Dataset
from kfc.experiments.runs import Record, RunError, RunFolder, read_record, write_json
from kfc.experiments.training import Row, Trainer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SPECIFICATION = "comparison.json"
# Methods that are left out where their package is not installed.
OPTIONAL_PACKAGES = {"soap": "pytorch_optimizer"}


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        settings: of all runs, as :func:`make_config` takes them.
        methods: by name, the settings that are its own; ``lr`` may be a list to choose from.
        train_errors: in percent, the goals of the final table, as are ``test_errors``.
        stop_at_goals: whether a run ends when it has reached all goals.
        tuning_seconds: how long every learning rate is tried, in seconds of training; the one with
            the lowest training loss goes on, the others end.
        slice_seconds: how long a run trains before it is the next one's turn.
        baseline: the method that ratios refer to; by default the first of SGD.
    """

    title: str
    settings: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]
    train_errors: Sequence[float] = ()
    test_errors: Sequence[float] = ()
    stop_at_goals: bool = False
    tuning_seconds: float = 60.0
    slice_seconds: float = 5.0
    baseline: str | None = None
    introduction: str = ""

    def candidates(self) -> dict[str, list[RunConfig]]:
        """The runs of every method: one for each learning rate.

        Raises:
            ConfigError: naming the method.
        """
        found: dict[str, list[RunConfig]] = {}
        for name, own in self.methods.items():
            settings = {**self.settings, **own}
            rates = settings.pop("lr", None)
            try:
                found[name] = [
                    make_config(**settings, lr=rate)
                    for rate in (rates if isinstance(rates, (list, tuple)) else [rates])
                ]
            except (ConfigError, TypeError) as error:
                raise ConfigError(f"method {name}: {error}") from error
            if not found[name]:
                raise ConfigError(f"method {name}: lr is an empty list")
        names = {config.data for configs in found.values() for config in configs}
        if len(names) > 1:
            raise ConfigError(f"all methods must have the same data, not {', '.join(names)}")
        return found


# Reading


def preset_names() -> list[str]:
    folder = files("kfc.experiments") / "presets"
    return sorted(
        item.name.removesuffix(".toml") for item in folder.iterdir() if ".toml" in item.name
    )


def read_comparison(name: str, *, quick: bool, wishes: Mapping[str, Any]) -> Comparison:
    """From a preset's name or a TOML file; without the methods whose packages are missing.

    Args:
        quick: with the changes of the file's ``[quick]`` part.
        wishes: settings that go before all others.
    """
    text = _text_of(name)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from error
    changes = content.pop("quick", None)
    if quick:
        if changes is None:
            raise ConfigError(f"{name} has no [quick] part")
        content = _merged(content, changes)
    comparison = make_comparison(content)
    given = {key: value for key, value in wishes.items() if value is not None}
    methods = {
        name: {key: value for key, value in own.items() if key not in given}
        for name, own in comparison.methods.items()
        if not _is_missing(own)
    }
    if not methods:
        raise ConfigError(f"{name}: none of its methods is installed")
    settings = {**comparison.settings, **given}
    return make_comparison({**asdict(comparison), "methods": methods, "settings": settings})


def _text_of(name: str) -> str:
    if name in preset_names():
        return (files("kfc.experiments") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    path = Path(name)
    if path.suffix != ".toml" and not path.is_file():
        raise ConfigError(f"no preset {name!r}; there are {', '.join(preset_names())}, or a .toml")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error


def make_comparison(content: Mapping[str, Any]) -> Comparison:
    """Check names and kinds of values, then all runs' settings."""
    known = [field.name for field in fields(Comparison)]
    unknown = [key for key in content if key not in known]
    if unknown:
        raise ConfigError(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}, quick")
    missing = [key for key in ("title", "settings", "methods") if not content.get(key)]
    if missing:
        raise ConfigError(f"a comparison needs {', '.join(missing)}")
    _require_tables(content)
    comparison = Comparison(**content)
    try:
        for name in ("tuning_seconds", "slice_seconds"):
            require_number(name, getattr(comparison, name), positive=True)
        for goal in (*comparison.train_errors, *comparison.test_errors):
            require_number("an error to reach", goal, below=100)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    if comparison.baseline not in (None, *comparison.methods):
        raise ConfigError(f"baseline: there is no method {comparison.baseline!r}")
    comparison.candidates()
    return comparison


def _require_tables(content: Mapping[str, Any]) -> None:
    tables = [content["settings"], content["methods"]]
    if isinstance(content["methods"], Mapping):
        tables += content["methods"].values()
    if not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError("settings, methods and every method must be tables: [methods.NAME]")


def _is_missing(method: Mapping[str, Any]) -> bool:
    package = OPTIONAL_PACKAGES.get(method.get("optimizer", ""))
    return package is not None and find_spec(package) is None


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merged(base[key], value) if both else value
    return merged


# Running


class Contender:
    """One run of a comparison: in its folder, and while it goes on also in memory."""

    def __init__(self, method: str, config: RunConfig, path: Path) -> None:
        self.method = method
        self.config = config
        self.path = path
        self.trainer: Trainer | None = None

    def start(self, data: Dataset, on_row: Callable[[Row], None]) -> None:
        """Begin, or go on; a run that has ended stays as it is."""
        if not self.path.exists():
            self.trainer = Trainer.start(
                self.path, self.config, data, name=self.method, on_row=on_row
            )
        elif self.record().end is None:
            self.trainer = Trainer.resume(RunFolder.open(self.path), data, on_row=on_row)

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
        trying = [contender for running in undecided for contender in running]
        self._take_turns(trying, until=self._was_tried)
        if self._interrupted():
            return
        for running in undecided:
            alive = [contender for contender in running if contender.trainer is not None]
            best = min(alive, key=_training_loss, default=None)
            for contender in alive:
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
        goals = {"train": self.comparison.train_errors, "test": self.comparison.test_errors}
        if not self.comparison.stop_at_goals or not any(goals.values()):
            return False
        rows = contender.record().evaluations
        return all(
            any(is_at_most(row[f"averaged_{kind}_error"], min(errors)) for row in rows)
            for kind, errors in goals.items()
            if errors
        )

    def _leave(self, contender: Contender) -> None:
        """Save a run that was interrupted; end one that has nothing left to reach."""
        if contender.trainer is None:
            return
        if self._interrupted():
            contender.trainer.save()
        else:
            contender.finish("targets")


def is_at_most(error: float | None, goal: float) -> bool:
    return error is not None and error <= goal


def _training_loss(contender: Contender) -> float:
    assert contender.trainer is not None
    loss = float(contender.trainer.evaluate_now()["averaged_train_loss"])
    return loss if loss == loss else float("inf")


def _folder_name(method: str, config: RunConfig) -> str:
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in method.lower())
    return f"{plain}-lr{config.lr:g}"


def write_specification(folder: Path, comparison: Comparison) -> None:
    """In a new folder, which must not exist, for :func:`read_specification`."""
    if folder.exists():
        raise RunError(
            f"{folder} exists already and is never overwritten: choose another --out, remove it, "
            f"or go on with it by --resume {folder}"
        )
    try:
        folder.mkdir(parents=True)
        write_json(folder / SPECIFICATION, asdict(comparison))
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from error


def read_specification(folder: Path) -> Comparison:
    try:
        return make_comparison(json.loads((folder / SPECIFICATION).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise RunError(f"{folder} is not the folder of a comparison: {error}") from error
