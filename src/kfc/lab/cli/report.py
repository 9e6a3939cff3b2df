"""The command `kfc report`, which writes a page about runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kfc.lab.cli.screen import as_table, clear_errors, console, require_page, say, writing
from kfc.lab.comparison.settings import SPECIFICATION, Comparison, read_specification
from kfc.lab.disk import RunError
from kfc.lab.options import ConfigError, not_one_of
from kfc.lab.report.page import write_page
from kfc.lab.report.summary import Goals, best_runs, default_goals, goal_rows, summary_rows
from kfc.lab.runs import CONFIG, Record, read_record


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or comparisons.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="Run that ratios refer to; by default the first that uses SGD."),
    ] = None,
    train_error: Annotated[
        list[float] | None,
        typer.Option(help="Goal for the training error in percent; may be repeated."),
    ] = None,
    test_error: Annotated[
        list[float] | None,
        typer.Option(help="Goal for the test error in percent; may be repeated."),
    ] = None,
) -> None:
    """Write a self-contained page with tables and curves of several runs.

    Examples:

      kfc report runs/demo -o demo.html

      kfc report runs/cifar10-cuda-convnet-kfc runs/cifar10-cuda-convnet-sgd --train-error 6
    """
    with clear_errors():
        require_page(out)
        records = with_distinct_names([records_in(path) for path in runs])
        names = [record.name for record in records]
        if baseline is not None and baseline not in names:
            raise ConfigError(not_one_of("baseline", baseline, names))
        folder = next((path for path in runs if (path / SPECIFICATION).exists()), None)
        comparison = read_specification(folder) if folder else None
        goals = Goals(train_error or (), test_error or ())
        publish(records, out, comparison, title=title, goals=goals, baseline=baseline)


def records_in(path: Path) -> list[Record]:
    """Return the record of a run's folder, or those of all runs in a comparison's folder."""
    if (path / CONFIG).exists() or not (path / SPECIFICATION).exists():
        return [read_record(path)]
    order = list(read_specification(path).methods)
    folders = [file.parent for file in path.glob(f"*/{CONFIG}")]
    found = [read_record(folder) for folder in folders if not folder.name.startswith(".")]
    own = [record for record in found if record.name in order]
    if not own:
        raise RunError(f"{path} has no runs yet")
    return sorted(
        own, key=lambda record: (order.index(record.name), record.config.method.lr or 0.0)
    )


def with_distinct_names(found: list[list[Record]]) -> list[Record]:
    """Return one list, with names that differ between the given lists.

    Runs with the same name share a curve, which is right only within a comparison.
    """
    owners: dict[str, int] = {}
    records = []
    for index, group in enumerate(found):
        for record in group:
            if owners.setdefault(record.name, index) != index:
                record = replace(record, name=f"{record.name} ({record.path})")
            records.append(record)
    return records


def publish(
    records: list[Record],
    out: Path,
    comparison: Comparison | None,
    *,
    title: str | None = None,
    goals: Goals | None = None,
    baseline: str | None = None,
) -> None:
    """Print the tables, and write the page; by default with the settings of the comparison."""
    introduction = ""
    if comparison is not None:
        title, introduction = title or comparison.title, comparison.introduction
        baseline = baseline or comparison.baseline
        goals = goals or Goals(
            comparison.train_errors, comparison.test_errors, comparison.train_losses
        )
    goals = goals or default_goals(records)
    best = best_runs(records)
    if baseline not in [record.name for record in best]:  # it may not have started yet
        baseline = None
    console.print(as_table(summary_rows(best, baseline)))
    if goals:
        console.print(as_table(goal_rows(best, goals, baseline)))
    content = {"title": title or "Runs", "introduction": introduction}
    with writing(out):
        write_page(out, records, **content, goals=goals, baseline=baseline)
    say(f"Page: {out.resolve()}")
