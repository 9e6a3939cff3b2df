"""The `kfc` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kfc
from kfc.experiments.demo import CONTENDERS, run_demo
from kfc.experiments.training import Evaluation
from kfc.report.page import write_page
from kfc.report.table import summary_rows

app = typer.Typer(
    help="Natural-gradient training of convolutional networks (KFC).",
    no_args_is_help=True,
    add_completion=True,
)
console = Console()


def show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"kfc {kfc.__version__}", highlight=False)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Natural-gradient training with Kronecker Factors for Convolution."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("runs/demo.html"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs for each optimizer.")] = 15,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of examples.")] = 0,
) -> None:
    """Train a small network on the embedded digits with SGD and with KFC, side by side.

    Example: kfc demo --epochs 30 --out demo.html
    """
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a folder; name a file for the page", param_hint="--out")
    columns = (
        TextColumn("{task.description:<4}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=epochs, state="") for name in CONTENDERS}

        def on_epoch(name: str, e: Evaluation) -> None:
            state = f"train loss {e.train_loss:.1e}, test error {e.test_error:.2f}%"
            progress.update(tasks[name], completed=e.epoch, state=state)

        runs = run_demo(epochs, seed, on_epoch)
    introduction = (
        f"A small convolutional network on 1,797 handwritten digits, {epochs} epochs with each "
        "optimizer, from the same weights and in the same order of examples."
    )
    console.print(_as_table(summary_rows(runs)))
    try:
        write_page(out, "KFC against SGD on handwritten digits", introduction, runs)
    except OSError as error:
        console.print(f"[red]The page could not be written to {out}: {error.strerror}[/red]")
        raise typer.Exit(code=1) from error
    console.print(f"Curves: {out.resolve()}", soft_wrap=True, highlight=False)


def _as_table(rows: list[tuple[str, ...]]) -> Table:
    header, *body = rows
    table = Table()
    for index, title in enumerate(header):
        table.add_column(title, justify="left" if index == 0 else "right")
    for row in body:
        table.add_row(*row)
    return table
