"""Several optimizers on one problem: what is compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from kfc.checks import require_number
from kfc.experiments.config import LIMITS, ConfigError, RunConfig, make_config
from kfc.experiments.optimizers import is_installed
from kfc.experiments.runs import RunError, clear_disk_errors, create_folder, write_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SPECIFICATION = "comparison.json"


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        settings: of all runs, as :func:`make_config` takes them.
        methods: by name, the settings that are its own; ``lr`` may be a list to choose from.
        train_errors: in percent, the goals of the final table, as are ``test_errors`` and
            ``train_losses``.
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
    train_losses: Sequence[float] = ()
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
        if not isinstance(changes, Mapping):
            raise ConfigError(f"{name}: quick must be a table: [quick]")
        content = _merged(content, changes)
    comparison = make_comparison(content)
    methods = {name: own for name, own in comparison.methods.items() if not _is_missing(own)}
    if not methods:
        raise ConfigError(f"{name}: none of its methods is installed")
    return with_wishes(replace(comparison, methods=methods), wishes)


def with_wishes(comparison: Comparison, wishes: Mapping[str, Any]) -> Comparison:
    """With settings that go before all others; ``None`` is no wish."""
    given = {key: value for key, value in wishes.items() if value is not None}
    # Where one end is given, it is the only one.
    replaced = {*given, *(LIMITS if given.keys() & set(LIMITS) else ())}
    methods = {
        name: {key: value for key, value in own.items() if key not in replaced}
        for name, own in comparison.methods.items()
    }
    kept = {key: value for key, value in comparison.settings.items() if key not in replaced}
    settings = {**kept, **given}
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
    _check_values(comparison)
    if comparison.baseline not in (None, *comparison.methods):
        raise ConfigError(f"baseline: there is no method {comparison.baseline!r}")
    comparison.candidates()
    return comparison


def _check_values(comparison: Comparison) -> None:
    """Raise a ConfigError that names the first value of a wrong kind or out of range."""
    for name, kind in (("title", str), ("introduction", str), ("stop_at_goals", bool)):
        if not isinstance(getattr(comparison, name), kind):
            raise ConfigError(f"{name} must be a {kind.__name__}")
    try:
        for name in ("tuning_seconds", "slice_seconds"):
            require_number(name, getattr(comparison, name), positive=True)
        for name in ("train_errors", "test_errors"):
            errors = getattr(comparison, name)
            if not isinstance(errors, (list, tuple)):
                raise ConfigError(f"{name} must be a list of percentages")
            for error in errors:
                require_number(f"{name}: an error to reach", error, below=100)
        if not isinstance(comparison.train_losses, (list, tuple)):
            raise ConfigError("train_losses must be a list of losses")
        for loss in comparison.train_losses:
            require_number("train_losses: a loss to reach", loss)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _require_tables(content: Mapping[str, Any]) -> None:
    tables = [content["settings"], content["methods"]]
    if isinstance(content["methods"], Mapping):
        tables += content["methods"].values()
    if not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError("settings, methods and every method must be tables: [methods.NAME]")


def _is_missing(method: Mapping[str, Any]) -> bool:
    return not is_installed(method.get("optimizer", ""))


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merged(base[key], value) if both else value
    return merged


# In a folder


def write_specification(folder: Path, comparison: Comparison) -> None:
    """In a new folder, which must not exist, for :func:`read_specification`."""
    create_folder(folder, SPECIFICATION, asdict(comparison))


def replace_specification(folder: Path, comparison: Comparison) -> None:
    """That of a comparison which is there; all or nothing."""
    with clear_disk_errors(folder):
        write_json(folder / SPECIFICATION, asdict(comparison))


def read_specification(folder: Path) -> Comparison:
    try:
        return make_comparison(json.loads((folder / SPECIFICATION).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise RunError(f"{folder} is not the folder of a comparison: {error}") from error
