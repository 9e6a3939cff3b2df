"""Options declared once, as dataclass fields, for the command line, TOML files and run folders."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from kfc._helpers import require_number, require_whole, shown

Owner = TypeVar("Owner")


class ConfigError(Exception):
    """An invalid option; the message names the option and says what is allowed."""


@contextmanager
def config_errors(prefix: str = "") -> Iterator[None]:
    """Raise ``ConfigError`` in place of the errors that an invalid value causes."""
    try:
        yield
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(f"{prefix}{error}") from error


def not_one_of(name: str, given: object, known: Iterable[str], otherwise: str = "") -> str:
    """Return the message for a value that is none of the known ones, with the most similar one.

    Args:
        otherwise: what else is allowed, such as "or a .toml file".
    """
    known = list(known)
    allowed = ", ".join([*known, *([otherwise] if otherwise else [])])
    plain = {"".join(filter(str.isalnum, each.lower())): each for each in known}
    wanted = "".join(filter(str.isalnum, str(given).lower()))
    longer = [each for each in plain if len(wanted) > 2 and each.startswith(wanted)]
    similar = longer or get_close_matches(wanted, plain)
    question = f"; did you mean {plain[similar[0]]!r}?" if similar else ""
    return f"{name} must be one of {allowed}; got {shown(given)}{question}"


def option(default: Any, help: str, **details: Any) -> Any:
    """Return a dataclass field that declares an ``Option`` with these attributes."""
    return field(default=default, metadata={"help": help, **details})


def section(owner: type) -> Any:
    """Return a dataclass field that holds a group of options, declared by another dataclass."""
    return field(default_factory=owner, metadata={"section": owner})


@dataclass(frozen=True)
class Option:
    """An option as its dataclass declares it.

    Attributes:
        type: the field's type; of a union, the first member.
        optional: whether ``None`` is allowed.
        help: a phrase for ``--help``, without the full stop.
        panel: the heading under which ``--help`` lists the option.
        choices: the strings allowed; empty if any string is.
        low, most: the smallest and the largest number allowed.
        positive: whether a number must be above 0.
        word: a string allowed in place of a number.
        flag: the name on the command line, if it differs from the field's.
        parse: converts the text of the command line; raises ``ValueError``.
    """

    name: str
    type: Any
    optional: bool
    default: Any
    help: str
    panel: str | None = None
    choices: tuple[str, ...] = ()
    low: float = 0
    positive: bool = False
    most: float = torch.finfo(torch.float32).max
    word: str | None = None
    flag: str | None = None
    parse: Callable[[str], Any] | None = None

    def check(self, value: Any) -> None:
        """Raise ``ConfigError`` if the value is not of the declared type and range."""
        if (value is None and self.optional) or (self.word is not None and value == self.word):
            return
        with config_errors():
            if self.choices and value not in self.choices:
                raise ValueError(not_one_of(self.name, value, self.choices))
            if self.type is int:
                require_whole(self.name, value, 1 if self.positive else int(self.low))
            elif self.type is float:
                require_number(self.name, value, low=self.low, positive=self.positive)
            elif self.type in (str, bool) and not isinstance(value, self.type):
                kind = "a string" if self.type is str else "true or false"
                raise ValueError(f"{self.name} must be {kind}, got {shown(value)}")
            if self.type in (int, float) and value > self.most:
                raise ValueError(f"{self.name} must be at most {self.most:g}, got {value}")


def options_of(owner: type) -> dict[str, Option]:
    """Return the options that a dataclass and its sections declare, by name.

    Those that the dataclass declares itself precede inherited ones.
    """
    hints, own = get_type_hints(owner), inspect.get_annotations(owner)
    declared = [each for each in fields(owner) if each.metadata]
    found: dict[str, Option] = {}
    for each in sorted(declared, key=lambda each: each.name not in own):
        if "section" in each.metadata:
            found |= options_of(each.metadata["section"])
            continue
        hint = hints[each.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        optional = NoneType in kinds
        found[each.name] = Option(each.name, kinds[0], optional, each.default, **each.metadata)
    return found


def check_options(values: Any) -> None:
    """Raise ``ConfigError`` for the first option of a dataclass instance with an invalid value."""
    given = flat(values)
    for name, declared in options_of(type(values)).items():
        declared.check(given[name])


def flat(values: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance and of its sections, by name."""
    found: dict[str, Any] = {}
    for each in fields(values):
        value = getattr(values, each.name)
        found |= flat(value) if "section" in each.metadata else {each.name: value}
    return found


def from_flat(owner: type[Owner], values: Mapping[str, Any]) -> Owner:
    """Return the dataclass instance with these fields, whichever section declares them.

    Fields without a value have their default. Names of no field are ignored.
    """
    arguments = {}
    for each in fields(owner):  # type: ignore[arg-type]
        if "section" in each.metadata:
            arguments[each.name] = from_flat(each.metadata["section"], values)
        elif each.name in values:
            arguments[each.name] = values[each.name]
    return owner(**arguments)


def number_or(word: str, text: str) -> float | str:
    """Return the number in a text, or the word if the text is this word."""
    try:
        return text if text == word else float(text)
    except ValueError:
        raise ValueError(f'must be a number or "{word}", got {text!r}') from None


def duration(text: str) -> float:
    """Return the seconds in a text such as "90", "90s", "10m" or "1.5h"."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    with suppress(ValueError):
        if 0 < float(number) < math.inf:
            return float(number) * unit
    raise ValueError(f'must be a positive duration such as "90s", "10m" or "1.5h", got {text!r}')
