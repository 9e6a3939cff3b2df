"""Command-line parameters generated from declared options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from kfc.lab.options import Option

Command = Callable[..., None]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of raw and decoded data; by default KFC_DATA_DIR, or in the user's cache.",
        file_okay=False,
        show_default=False,
    ),
]
Create = Annotated[
    bool, typer.Option("--create", help="Create the data folder if it does not exist.")
]

TrustNet = Annotated[
    bool,
    typer.Option(
        "--trust-net",
        help="Import the network that the folder names, such as mynets:small, although that runs "
        "code and --net does not name it. Only for folders whose origin you know.",
    ),
]


def with_options(parameters: Iterable[inspect.Parameter]) -> Callable[[Command], Command]:
    """Decorate a command so that typer finds these parameters besides its own, annotated ones."""
    generated = {each.name: each for each in parameters}

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        everything = generated | {
            name: each.replace(kind=each.KEYWORD_ONLY)
            for name, each in own.items()
            if name not in generated and each.kind is not each.VAR_KEYWORD
        }

        @wraps(command)
        def call(**values: Any) -> None:
            command(**values)

        # typer reads both.
        call.__signature__ = inspect.Signature(list(everything.values()))  # type: ignore[attr-defined]
        call.__annotations__ = {name: each.annotation for name, each in everything.items()}
        return call

    return decorate


def parameter(
    declared: Option, *, panel: str | None = None, defaults: Mapping[str, Any] | None = None
) -> inspect.Parameter:
    """Return the typer parameter of an option, which is ``None`` if it is not given.

    Args:
        panel: the heading in ``--help``, by default the declared one.
        defaults: the defaults to show, by owner; by default the declared one.
    """
    if defaults is None:
        plain = declared.type in (int, float, str) and declared.default is not None
        defaults = {"default": declared.default} if plain else {}
    owners: dict[str, list[str]] = {}
    for owner, value in defaults.items():
        shown = f": {value:g}" if isinstance(value, float) else f": {value}"
        owners.setdefault("" if value is None or value is False else shown, []).append(owner)
    suffix = "; ".join(", ".join(names) + shown for shown, names in owners.items())
    details = typer.Option(
        f"--{(declared.flag or declared.name).replace('_', '-')}",
        help=f"{declared.help} ({suffix})." if suffix else f"{declared.help}.",
        rich_help_panel=panel or declared.panel,
        parser=parser(declared.parse) if declared.parse else None,
        metavar=f"<{declared.parse.__name__}>" if declared.parse else None,
    )
    kind = list[str] if get_origin(declared.type) is not None else declared.type
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, details],
    )


def parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser for typer, which shows the message of a ``ValueError``."""

    @wraps(parse)
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed
