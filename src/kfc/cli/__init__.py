"""The `kfc` command."""

from __future__ import annotations

from typing import Annotated

import typer

import kfc
from kfc.cli.compare import compare, demo
from kfc.cli.data import data_app
from kfc.cli.inspect import inspect
from kfc.cli.report import report
from kfc.cli.screen import say
from kfc.cli.train import train

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(train)
app.command()(compare)
app.command()(report)
app.command()(inspect)
app.add_typer(data_app, name="data")


def show_version(wanted: bool) -> None:
    if wanted:
        say(f"kfc {kfc.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Natural-gradient training of convolutional networks with Kronecker Factors for Convolution.

    Examples:

      kfc demo

      kfc train --data cifar10 --net cuda-convnet --lr 0.003 --epochs 5

      kfc compare figure3-cifar10 --quick

      kfc inspect runs/cifar10-cuda-convnet-kfc

    Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 the run diverged, 130 interrupted.
    """


@app.command()
def bench() -> None:
    """Where the benchmark is: it compares with other libraries, in an environment of its own.

    Example: make bench
    """
    say(
        "The benchmark needs the libraries it compares with, and lives in the source tree:\n"
        "  make bench                            all of it\n"
        "  make bench BENCH='--sections steps'   a part; BENCH='--help' for more\n"
        "Its tables: docs/benchmarks.md"
    )
