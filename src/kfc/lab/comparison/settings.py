"""The definition of a comparison: presets, TOML files and the folder of a comparison."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from kfc._helpers import require_number, shown
from kfc.lab.config import LIMITS, ConfigError, RunConfig, make_config
from kfc.lab.disk import RunError, clear_disk_errors, create_folder, read_checked, write_checked
from kfc.lab.optimizers import is_installed
from kfc.lab.options import check_options, config_errors, not_one_of, option

SPECIFICATION = "comparison.json"
PRESETS = files("kfc.lab") / "presets"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several methods that are trained on the same problem.

    Attributes:
        settings: options of all runs, as ``make_config`` takes them.
        methods: by name, the options of one method; ``lr`` may be a list of candidates.
        train_errors, test_errors, train_losses: goals of the final table; errors in percent.
    """

    title: str = option(MISSING, "Title of the page")
    settings: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]
    train_errors: Sequence[float] = ()
    test_errors: Sequence[float] = ()
    train_losses: Sequence[float] = ()
    stop_at_goals: bool = option(False, "Whether a run ends when it has reached all goals")
    tuning_seconds: float = option(
        60.0,
        "Training time of the last two candidate learning rates, without their first estimates "
        "of the factors; before, the half with the lowest training losses continues, and again, "
        "whenever the time has doubled",
        positive=True,
    )
    slice_seconds: float = option(
        5.0, "Training time of a run before the next one's turn", positive=True
    )
    baseline: str | None = option(
        None, "Method that ratios refer to; by default the first that uses SGD"
    )
    introduction: str = option("", "Text at the beginning of the output and of the page")

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for the first invalid value."""
        tables = [self.settings, self.methods]
        if isinstance(self.methods, Mapping):
            tables += self.methods.values()
        if not all(isinstance(table, Mapping) for table in tables):
            raise ConfigError("settings, methods and every method must be tables: [methods.NAME]")
        check_options(self)
        goals = {"train_errors": 100.0, "test_errors": 100.0, "train_losses": math.inf}
        for name, below in goals.items():
            values = getattr(self, name)
            if not isinstance(values, (list, tuple)):
                raise ConfigError(f"{name} must be a list of numbers, got {shown(values)}")
            for value in values:
                with config_errors():
                    require_number(f"every goal in {name}", value, below=below)
        if self.baseline not in (None, *self.methods):
            raise ConfigError(not_one_of("baseline", self.baseline, self.methods))
        self.candidates()

    def candidates(self) -> dict[str, list[RunConfig]]:
        """Return the runs of every method, one for each learning rate."""
        found: dict[str, list[RunConfig]] = {}
        for name, own in self.methods.items():
            settings = {**self.settings, **own}
            rates = settings.pop("lr", None)
            rates = rates if isinstance(rates, (list, tuple)) else [rates]
            with config_errors(f"method {name}: "):
                if not rates:
                    raise ConfigError("lr is an empty list")
                found[name] = [make_config(**settings, lr=rate) for rate in rates]
        names = {config.problem.data for configs in found.values() for config in configs}
        if len(names) > 1:
            raise ConfigError(f"all methods must have the same data, not {', '.join(names)}")
        return found


def make_comparison(content: Mapping[str, Any]) -> Comparison:
    """Return a comparison from the contents of a file."""
    known = [each.name for each in fields(Comparison)]
    if unknown := [key for key in content if key not in known]:
        raise ConfigError(not_one_of("every key", unknown[0], [*known, "quick"]))
    if missing := [key for key in ("title", "settings", "methods") if not content.get(key)]:
        raise ConfigError(f"a comparison needs {', '.join(missing)}")
    return Comparison(**content)


# Presets and TOML files


def preset_names() -> list[str]:
    names = [Path(item.name) for item in PRESETS.iterdir()]
    return sorted(name.stem for name in names if name.suffix == ".toml")


def read_comparison(name: str, *, quick: bool, overrides: Mapping[str, Any]) -> Comparison:
    """Read a preset or a TOML file, without the methods whose packages are not installed.

    Args:
        quick: whether to apply the changes in the file's ``[quick]`` table.
        overrides: options that replace those of the file; ``None`` keeps the file's.
    """
    try:
        return _read_toml(name, quick=quick, overrides=overrides)
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deeply to be a comparison") from error


def _read_toml(name: str, *, quick: bool, overrides: Mapping[str, Any]) -> Comparison:
    try:
        content = tomllib.loads(_text_of(name))
    except ValueError as error:  # also of whole numbers with thousands of digits
        raise ConfigError(f"{name} is not valid TOML: {error}") from error
    changes = content.pop("quick", None)
    if quick:
        if changes is None:
            raise ConfigError(f"{name} has no [quick] table")
        if not isinstance(changes, Mapping):
            raise ConfigError(f"{name}: quick must be a table: [quick]")
        content = _merged(content, changes)
    comparison = make_comparison(content)
    methods = {
        method: own
        for method, own in comparison.methods.items()
        if is_installed(own.get("optimizer", ""))
    }
    if not methods:
        raise ConfigError(f"{name}: none of its methods is installed")
    return with_overrides(replace(comparison, methods=methods), overrides)


def with_overrides(comparison: Comparison, overrides: Mapping[str, Any]) -> Comparison:
    """Return the comparison with options that replace those of all methods, unless ``None``."""
    given = {key: value for key, value in overrides.items() if value is not None}
    # A limit replaces all others.
    replaced = {*given, *(LIMITS if given.keys() & set(LIMITS) else ())}

    def kept(options: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key not in replaced}

    return replace(
        comparison,
        settings={**kept(comparison.settings), **given},
        methods={name: kept(own) for name, own in comparison.methods.items()},
    )


def _text_of(name: str) -> str:
    if name in preset_names():
        return (PRESETS / f"{name}.toml").read_text(encoding="utf-8")
    path = Path(name)
    if name == "suite":
        raise ConfigError("options of the suite follow its name: kfc compare suite --quick")
    if path.suffix != ".toml" and not path.is_file():
        raise ConfigError(not_one_of("the preset", name, preset_names(), "or a .toml file"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merged(base[key], value) if both else value
    return merged


# The folder of a comparison


def write_specification(folder: Path, comparison: Comparison) -> None:
    """Create the folder of a comparison, for ``read_specification``."""
    create_folder(folder, SPECIFICATION, asdict(comparison))


def replace_specification(folder: Path, comparison: Comparison) -> None:
    """Replace the definition in the folder of a comparison."""
    with clear_disk_errors(folder):
        write_checked(folder / SPECIFICATION, asdict(comparison))


def read_specification(folder: Path) -> Comparison:
    file = folder / SPECIFICATION
    if not file.is_file():
        raise RunError(f"{folder} is not the folder of a comparison: it has no {SPECIFICATION}")
    content = read_checked(file)
    try:
        return make_comparison(content)
    except Exception as error:  # values of any type may have been written by hand
        raise RunError(f"{file} is damaged, or from another version: {error}") from error
