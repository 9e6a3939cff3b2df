"""`kfc compare` and `kfc demo`: several optimizers on one problem."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from kfc.cli.report import goals_of, publish
from kfc.cli.screen import (
    DIVERGED,
    INTERRUPTED,
    Interruption,
    clear_errors,
    evaluation_line,
    fail,
    free_path,
    parse_duration,
    progress_bars,
    say,
    state_of,
)
from kfc.experiments.comparison import (
    Comparison,
    preset_names,
    read_comparison,
    read_specification,
    replace_specification,
    with_wishes,
    write_specification,
)
from kfc.experiments.contest import Contender, Contest
from kfc.experiments.data import load
from kfc.experiments.training import Row
from kfc.report.summary import best_runs

PAGE = "report.html"


def compare(
    what: Annotated[
        str | None,
        typer.Argument(metavar="PRESET|FILE.toml", help=f"Presets: {', '.join(preset_names())}."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version: ten minutes on two cores.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The folder; it must not exist.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with a comparison, for longer if --epochs or --time says so."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Instead of the preset's.")] = None,
    time: Annotated[
        str | None, typer.Option(help='For each run, such as "10m"; instead of the preset\'s.')
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...")] = None,
    threads: Annotated[int | None, typer.Option()] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that prepare batches.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are.")] = None,
) -> None:
    """Train with several optimizers on the same data, from the same weights, in the same order.

    The runs take turns in short slices, so that whatever slows the machine slows
    all alike. Where a method has several learning rates, each is tried for a while,
    and the one with the lowest training loss goes on. Ends with a table of what it
    took to reach given errors, and a page.

    Examples:

      kfc compare figure3-cifar10 --quick

      kfc compare mine.toml --out runs/mine

      kfc compare --resume runs/mine

      kfc compare --resume runs/mine --time 20m
    """
    wishes = {
        "seed": seed,
        "epochs": epochs,
        "seconds": parse_duration(time),
        "device": device,
        "threads": threads,
        "workers": workers,
    }
    with clear_errors():
        if resume is not None:
            given = [name for name, value in wishes.items() if value is not None]
            foreign = [name for name in given if name not in ("epochs", "seconds")]
            if what is not None or quick or out is not None or foreign:
                raise typer.BadParameter(
                    "a resumed comparison keeps its settings; only the runs' length can be "
                    "changed: --epochs, --time",
                    param_hint="--resume",
                )
            resume_contest(resume, wishes, data_dir)
            return
        if what is None:
            raise typer.BadParameter(
                f"name a preset ({', '.join(preset_names())}) or a .toml file",
                param_hint="PRESET|FILE.toml",
            )
        start_contest(what, quick, wishes, out, data_dir)


def demo(
    out: Annotated[
        Path | None, typer.Option(help="The folder; by default runs/demo, or the next free.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="For each optimizer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights and the order.")] = None,
) -> None:
    """Train a small network on the embedded digits with SGD, Adam, KFC and KFAC.

    Example: kfc demo --epochs 30 --out runs/longer
    """
    with clear_errors():
        start_contest("demo", False, {"epochs": epochs, "seed": seed}, out, None)


def start_contest(
    what: str, quick: bool, wishes: Mapping[str, Any], out: Path | None, data_dir: Path | None
) -> None:
    comparison = read_comparison(what, quick=quick, wishes=wishes)
    name = Path(what).stem + ("-quick" if quick else "")
    folder = out or free_path(Path("runs") / name)
    run_contest(comparison, folder, data_dir, new=True)


def resume_contest(folder: Path, wishes: Mapping[str, Any], data_dir: Path | None) -> None:
    """From where it was interrupted; with another length of the runs also from its end."""
    comparison = read_specification(folder)
    longer = with_wishes(comparison, wishes)
    if longer != comparison:
        replace_specification(folder, longer)
    run_contest(longer, folder, data_dir, new=False)


def run_contest(comparison: Comparison, folder: Path, data_dir: Path | None, *, new: bool) -> None:
    """To the end, then tables and page; or until interrupted."""
    data = load(next(iter(comparison.candidates().values()))[0].data, data_dir)
    with progress_bars() as progress, Interruption() as interrupted:
        show = _Display(progress)
        contest = Contest(comparison, folder, data, show, interrupted)
        if new:
            contest.check()
            write_specification(folder, comparison)
        show.add(contest.contenders)
        finished = contest.run()
    if not finished:
        say(f"Interrupted. Go on: kfc compare --resume {quote(str(folder))}")
        raise typer.Exit(INTERRUPTED)
    _publish(contest)


def _publish(contest: Contest) -> None:
    comparison = contest.comparison
    records = contest.records()
    publish(
        records,
        contest.folder / PAGE,
        title=comparison.title,
        introduction=comparison.introduction,
        goals=goals_of(comparison, records),
        baseline=comparison.baseline,
    )
    ends = [record.end or {} for record in best_runs(records)]
    if all(end.get("reason") == "diverged" for end in ends):
        fail("all runs diverged", DIVERGED)


class _Display:
    """A bar for every run, and a line for every evaluation."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[Contender, TaskID] = {}
        self._evaluations: dict[Contender, Row] = {}

    def add(self, contenders: list[Contender]) -> None:
        for contender in contenders:
            end = contender.record().end if contender.path.exists() else None
            name = escape(label(contender))
            task = self._progress.add_task(name, total=1.0, state=end["reason"] if end else "")
            if end:
                self._progress.update(task, completed=contender.config.part_of_the_way(end))
            self._tasks[contender] = task

    def __call__(self, contender: Contender, row: Row) -> None:
        task = self._tasks[contender]
        if row["kind"] == "evaluation":
            self._evaluations[contender] = row
            say(f"{label(contender)} {evaluation_line(row)}")
        elif row["kind"] == "progress":
            evaluation = self._evaluations.get(contender, {})
            self._progress.update(task, state=state_of(row, evaluation))
        else:
            self._progress.update(task, state=row["reason"])
            if row["reason"] == "diverged":
                say(f"{label(contender)} diverged: {row['message']}")
        self._progress.update(task, completed=contender.config.part_of_the_way(row))


def label(contender: Contender) -> str:
    rate = contender.config.lr
    return contender.method if rate is None else f"{contender.method} (lr {rate:g})"
