"""The `kfc` command."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kfc
from kfc.lab.cli.compare import compare, demo
from kfc.lab.cli.data import data_app
from kfc.lab.cli.inspect import inspect
from kfc.lab.cli.plan import plan
from kfc.lab.cli.report import report
from kfc.lab.cli.screen import print_usage_error, say
from kfc.lab.cli.suite import compare_suite
from kfc.lab.cli.train import train
from kfc.lab.processes.ranks import Launch

# torchrun ends all processes as soon as one has ended, so rank 0 needs time for its message.
SECONDS_FOR_MESSAGE_OF_RANK_0 = 5


SUITE = "compare suite"


class RankZeroGroup(TyperGroup):
    """A command group that prints usage errors in our style, on rank 0 only.

    It knows a command of two words.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:2] == SUITE.split():
            return SUITE, self.get_command(ctx, SUITE), args[2:]
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except Exception as error:
            # Usage errors format their message. Newer versions of typer contain a copy of click.
            if not hasattr(error, "format_message"):
                raise
            if Launch.from_environment().rank == 0:
                print_usage_error(error)
            else:
                time.sleep(SECONDS_FOR_MESSAGE_OF_RANK_0)
            code = getattr(error, "exit_code", 1)
        sys.exit(code)


app = typer.Typer(
    cls=RankZeroGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, train, compare, report, inspect, plan):
    app.command()(command)
app.command(SUITE)(compare_suite)
app.add_typer(data_app, name="data")


def show_version(wanted: bool) -> None:
    if wanted:
        say(f"kfc {kfc.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    context: typer.Context,
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

      kfc compare suite --quick

      kfc inspect runs/cifar10-cuda-convnet-kfc

    Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 the run diverged, 130 interrupted,
    141 the output pipe was closed.
    """
    command = context.invoked_subcommand
    if Launch.from_environment().size > 1 and command != "train":
        context.fail(f"kfc {command} runs in one process; only kfc train works with torchrun")


@app.command()
def bench() -> None:
    """Show how to run the benchmark, which needs other libraries and a separate environment.

    Example: make bench
    """
    say(
        "The benchmark needs the libraries it compares with, and is part of the source tree:\n"
        "  make bench                            run all of it\n"
        "  make bench BENCH='--sections steps'   run a part; BENCH='--help' lists the options\n"
        "Results: docs/benchmarks.md"
    )
