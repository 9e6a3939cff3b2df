"""What the commands share: the console, clear errors, interruptions, progress, tables."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any

import typer
from rich.box import HEAVY_HEAD, SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kfc.distributed.workers import WorkerError
from kfc.experiments.config import ConfigError
from kfc.experiments.networks import NetworkError
from kfc.experiments.processes import EXPECTED_ERRORS, Launch, RanksFailedError

FAILED, USAGE, DIVERGED, INTERRUPTED = 1, 2, 3, 130
LONGEST_QUOTE = 160

# A terminal, or a pipe, that cannot show a letter such as ν gets a question mark.
for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")

console = Console()
errors = Console(stderr=True)


@contextmanager
def clear_errors() -> Iterator[None]:
    """What can go wrong ends in a sentence and an exit code, not in a traceback."""
    try:
        yield
    except EXPECTED_ERRORS as error:
        fail(_of_rank(Launch.from_environment().rank, error), _code(type(error)))
    except RanksFailedError as failure:
        if failure.error is not None:
            complain(_of_rank(failure.rank, failure.error))
        with suppress(WorkerError):  # one that did not wait
            failure.part()
        raise typer.Exit(_code(failure.kind)) from failure
    except WorkerError as error:
        # What is known of the cause; below it the backend's own words, which may go on for pages.
        cause, *more = str(error).splitlines()
        fail("; ".join([cause, *(shorten(line, LONGEST_QUOTE) for line in more[:1])]), FAILED)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)


def _of_rank(rank: int, error: Exception) -> str:
    return f"rank {rank}: {error}" if rank else str(error)


def _code(error: type[Exception]) -> int:
    return USAGE if issubclass(error, (ConfigError, NetworkError)) else FAILED


def say(message: str, style: str | None = None, on: Console = console) -> None:
    """Plain text, unbroken so that paths can be copied."""
    on.print(message, style=style, markup=False, emoji=False, soft_wrap=True, highlight=False)


def fail(message: str, code: int) -> None:
    complain(message)
    raise typer.Exit(code)


def complain(message: str) -> None:
    errors.print(f"[red]Error:[/red] {escape(message)}", soft_wrap=True, highlight=False)


class Interruption:
    """Ctrl-C, or SIGTERM, asks to end cleanly; a second Ctrl-C ends at once.

    Args:
        patient: a second one changes nothing. torchrun may pass on a signal more than once, and
            itself kills whoever does not end in time.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.requested = False
        self._patient = patient
        self._process = os.getpid()

    def __call__(self) -> bool:
        return self.requested

    def __enter__(self) -> Interruption:
        self._before = {
            number: signal.signal(number, self._request)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        if self._patient and self.requested:
            return  # more signals may come while the ranks part
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that prepares batches: it ends with the run
            return
        if self._patient:
            self.requested = True
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        errors.print("Ending after this update, with a checkpoint; once more to end at once.")


def progress_bars(on: Console = console, *, hidden: bool = False) -> Progress:
    """A line for each run: a bar, the time, and how it stands."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=on,
        disable=hidden,
    )


def state_of(row: dict[str, Any], evaluation: dict[str, Any]) -> str:
    """A progress row, and the last evaluation, in a few words."""
    parts = [f"loss {row['loss']:.3g}"]
    if evaluation:
        parts.append(f"error {evaluation['averaged_test_error']:.2f}%")
    parts.append(f"{row['images_per_second']:.0f} images/s")
    if row.get("fisher_norm") is not None:
        parts.append(f"ν {row['fisher_norm']:.2g}")
    return ", ".join(parts)


def evaluation_line(row: dict[str, Any]) -> str:
    """An evaluation of the averaged parameters in a line, for the log."""
    return (
        f"epoch {row['epoch']:.4g}, update {row['update']}, {row['seconds']:.1f} s: "
        f"train loss {row['averaged_train_loss']:.4g} error {row['averaged_train_error']:.2f}%, "
        f"test loss {row['averaged_test_loss']:.4g} error {row['averaged_test_error']:.2f}%"
    )


def as_table(
    rows: Sequence[tuple[str, ...]], title: str | None = None, *, compact: bool = False
) -> Table:
    """
    Args:
        compact: with rules instead of boxes, for tables of many columns.
    """
    header, *body = rows
    table = Table(title=title, title_justify="left", box=SIMPLE if compact else HEAVY_HEAD)
    if compact:
        table.pad_edge, table.collapse_padding = False, True
    for index, name in enumerate(header):
        table.add_column(escape(name), justify="left" if index == 0 else "right")
    for row in body:
        table.add_row(*map(escape, row))
    return table


def numbered(wanted: Path) -> Iterator[Path]:
    """The path, path-2, path-3, ..."""
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))


def free_path(wanted: Path) -> Path:
    """The first of them that does not exist."""
    return next(path for path in numbered(wanted) if not path.exists())


def parse_duration(text: str | None) -> float | None:
    """Seconds from "90", "90s", "10m" or "1.5h"."""
    if text is None:
        return None
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        return float(number) * unit
    except ValueError as error:
        raise typer.BadParameter(
            f'{text!r} is not a time such as "90s", "10m" or "1.5h"'
        ) from error
