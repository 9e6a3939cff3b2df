"""The command `kfc data`, which lists, downloads and verifies data sets."""

from __future__ import annotations

from typing import Annotated

import typer

from kfc.lab.cli.options import Create, DataDir
from kfc.lab.cli.screen import as_table, clear_errors, console, say
from kfc.lab.data.catalogue import CATALOGUE, NAMES
from kfc.lab.data.loading import (
    check_entry,
    create_data_folder,
    data_folder,
    decoded_already,
    load,
    whereabouts,
)
from kfc.lab.options import not_one_of

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@data_app.callback()
def data() -> None:
    """List, download and verify data sets.

    Examples:

      kfc data list

      kfc data get cifar10
    """


def known_name(name: str) -> str:
    if name not in NAMES:
        raise typer.BadParameter(not_one_of("the data set", name, NAMES))
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


@data_app.command("list")
def list_sets(data_dir: DataDir = None) -> None:
    """List the data sets, and what is on this machine.

    Example: kfc data list --data-dir ~/data
    """
    with clear_errors():
        folder = data_folder(data_dir)
        rows = [("name", "train+test", "shape", "decoded", "here", "sources")]
        for entry in CATALOGUE.values():
            here = decoded_already(entry, folder)
            train, test = (len(here.train), len(here.test)) if here else (entry.train, entry.test)
            shape, size = "x".join(map(str, entry.shape)), entry.example_bytes * (train + test)
            counts, megabytes = f"{train:,}+{test:,}", f"{size / 1e6:,.1f} MB"
            place, sources = whereabouts(entry, folder), ", ".join(entry.sources)
            rows.append((entry.name, counts, shape, megabytes, place, sources))
        console.print(as_table(rows, compact=True, justify="left"), highlight=False)
        say(f"{folder}{'' if folder.is_dir() else ' (does not exist yet)'}")


@data_app.command()
def get(name: Name, data_dir: DataDir = None, create: Create = False) -> None:
    """Download a data set if necessary, verify it, and decode it for training.

    It is looked for in the data folder, then at its publisher, npm and Debian.

    Example: kfc data get cifar10
    """
    with clear_errors():
        if create:
            create_data_folder(data_dir)
        dataset = load(name, data_dir)
    counts = f"{len(dataset.train):,} training and {len(dataset.test):,} test examples"
    say(f"{name}: {counts}, sha256 {dataset.digest}")


@data_app.command()
def check(name: Name, data_dir: DataDir = None) -> None:
    """Verify all files of a data set on this machine; exit with code 1 if one is wrong.

    Example: kfc data check cifar10
    """
    with clear_errors():
        results = list(check_entry(CATALOGUE[name], data_folder(data_dir)))
    for result in results:
        mark, style = ("ok", "green") if result.passed else ("wrong", "red")
        say(f"{mark}  {name}: {result.text}", style=style)
    if not all(result.passed for result in results):
        raise typer.Exit(code=1)


@data_app.command()
def path(data_dir: DataDir = None) -> None:
    """Print the data folder.

    Example: ls "$(kfc data path)"
    """
    with clear_errors():
        typer.echo(data_folder(data_dir))
