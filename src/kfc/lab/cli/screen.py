"""Console output, error messages, interruptions and progress bars of the commands."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any, Literal

import typer
from rich.box import HEAVY_HEAD, SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from kfc.distributed.ranks import CollectiveError
from kfc.lab.comparison.settings import SPECIFICATION
from kfc.lab.config import ConfigError, RunConfig
from kfc.lab.networks import NetworkError
from kfc.lab.processes.ranks import EXPECTED_ERRORS, Launch, RanksFailedError
from kfc.lab.runs import CONFIG
from kfc.lab.suite.store import SETTINGS

FAILED, USAGE, DIVERGED, INTERRUPTED = 1, 2, 3, 130
OUTPUT_CLOSED = 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else FAILED
LONGEST_QUOTE = 160
# Each of these makes a folder one that is ours.
OWN_FILES = (CONFIG, SPECIFICATION, SETTINGS)

# A terminal or pipe that cannot encode a character such as ν gets a question mark.
for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


class PipedConsole(Console):
    """A console that stays silent after the reader of its output has gone, as `head -1` does.

    Attributes:
        is_closed: whether the reader has gone.
    """

    is_closed = False

    def on_broken_pipe(self) -> None:
        self.is_closed = True
        with suppress(OSError, ValueError):
            # Nothing is flushed into the pipe at the end of the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


console = PipedConsole()
errors = PipedConsole(stderr=True)


# Messages


def printable(text: str) -> str:
    """Escape characters that could change what a terminal shows, but not the ends of lines."""
    return "".join(
        each if each == "\n" or each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )


def shown(text: str) -> str:
    """Return text as rich shows it: nothing in it is markup or controls the terminal."""
    return escape(printable(text))


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn expected errors into a message and an exit code instead of a traceback."""
    try:
        yield
    except BrokenPipeError as error:
        console.on_broken_pipe()
        raise typer.Exit(OUTPUT_CLOSED) from error
    except EXPECTED_ERRORS as error:
        fail(str(error), _code(type(error)), Launch.from_environment().rank)
    except RanksFailedError as failure:
        if failure.error is not None:
            print_error(str(failure.error), failure.rank)
        with suppress(CollectiveError):  # raised if another rank has already ended
            failure.part()
        raise typer.Exit(_code(failure.kind)) from failure
    except CollectiveError as error:
        # The first line states the cause; the backend's own message may be pages long.
        cause, *more = str(error).splitlines()
        fail("; ".join([cause, *(shorten(line, LONGEST_QUOTE) for line in more[:1])]), FAILED)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)


def _code(error: type[Exception]) -> int:
    return USAGE if issubclass(error, (ConfigError, NetworkError)) else FAILED


def say(message: str, style: str | None = None, on: Console = console) -> None:
    """Print plain text without line breaks, so that paths can be copied."""
    on.print(
        printable(message), style=style, markup=False, emoji=False, soft_wrap=True, highlight=False
    )


def fail(message: str, code: int, rank: int = 0) -> None:
    """Print an error message and exit."""
    print_error(message, rank)
    raise typer.Exit(code)


def print_error(message: str, rank: int = 0) -> None:
    """Print an error message, with the rank unless it is 0."""
    place = f"rank {rank}: " if rank else ""
    errors.print(f"[red]Error:[/red] {place}{shown(message)}", soft_wrap=True, highlight=False)


def print_warning(message: str) -> None:
    errors.print(f"[yellow]Warning:[/yellow] {shown(message)}", soft_wrap=True, highlight=False)


def print_usage_error(error: Any) -> None:
    """Print a usage error of typer in the style of all other errors."""
    if error.__class__.__name__ == "NoArgsIsHelpError":  # the help is printed already
        return
    text = error.format_message()
    if found := re.fullmatch(r"Invalid value(?: for (.+?))?: (.*)", text, re.DOTALL):
        hint, message = (found[1] or "").replace("'", ""), found[2]
        between = " " if message.startswith(("must", "has")) else ": "
        text = message if not hint or " must be one of " in message else f"{hint}{between}{message}"
    elif error.ctx is not None:
        text = f"{text.rstrip('.')} (see {error.ctx.command_path} --help)"
    print_error(text[:1].lower() + text[1:])


@contextmanager
def writing(page: Path) -> Iterator[None]:
    """Exit with a message if the page cannot be written."""
    try:
        yield
    except OSError as error:
        fail(f"the page could not be written to {page}: {error.strerror}", FAILED)


# Interruptions


@contextmanager
def interruptions(*, patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the end was requested.

    Ctrl-C and SIGTERM request it, and so does a reader of the output that has gone.

    Args:
        patient: ignore further signals, instead of ending at once at the second Ctrl-C. torchrun
            may send a signal more than once, and kills processes that do not end in time.
    """
    process, requested = os.getpid(), False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if os.getpid() != process:  # a DataLoader worker, which ends with the run
            return
        if requested and not patient:
            raise KeyboardInterrupt
        requested = True
        if not patient:
            errors.print(
                "Saving a checkpoint after this update; press Ctrl-C again to end at once."
            )

    before = {each: signal.signal(each, request) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested or console.is_closed
    finally:
        if not (patient and requested):  # further signals may arrive while the ranks end
            for number, handler in before.items():
                signal.signal(number, handler)


# Progress and tables


def progress_bars(on: Console = console, *, hidden: bool = False) -> Progress:
    """Return a display with a line for each task: a bar, the time, and a state."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}", table_column=Column(no_wrap=False)),
        console=on,
        disable=hidden,
    )


class RunDisplay:
    """Shows the rows of a run's metrics as a progress bar and a log of evaluations.

    Every number is shown with the parameters, the split and the update that it belongs to.

    Args:
        prefix: text before every line of the log.
    """

    def __init__(self, progress: Progress, label: str, config: RunConfig, prefix: str = "") -> None:
        self._progress, self._config, self._prefix = progress, config, prefix
        self._label = shown(label)
        self._task: TaskID | None = None
        self._estimate: TaskID | None = None
        self._test_error = ""  # of the last evaluation after an update

    def __call__(self, row: dict[str, Any]) -> None:
        # Not before the first row, so that errors of the settings come before any progress bar.
        if self._task is None:
            self._task = self._progress.add_task(self._label, total=1.0, state="")
        if row["kind"] == "estimating":
            self._show_estimate(row["done"], row["examples"])
            return
        if self._estimate is not None:
            self._progress.remove_task(self._estimate)
            self._estimate = None
        if row["kind"] == "estimate":
            size = f"{row['examples']} examples, {row['seconds']:.1f} s"
            say(f"{self._prefix}first estimate of the factors: {size}")
        elif row["kind"] == "evaluation":
            say(f"{self._prefix}{evaluation_text(row)}")
            if row["update"]:
                error, update = row["averaged_test_error"], row["update"]
                self._test_error = f", test error {error:.2f}% (averaged, update {update})"
        elif row["kind"] == "end":
            self._progress.update(self._task, state=row["reason"])
        else:
            norm = row.get("fisher_norm")
            state = f"update {row['update']}: batch loss {row['loss']:.3g} (raw)"
            state += "" if norm is None else f", ν {norm:.2g}"
            state += f", {row['images_per_second']:.0f} images/s{self._test_error}"
            self._progress.update(self._task, state=state)
        self._progress.update(self._task, completed=self._config.length.fraction_done(row))

    def _show_estimate(self, done: int, examples: int) -> None:
        """Show the first estimate of the factors as a bar of its own."""
        if self._estimate is None:
            self._estimate = self._progress.add_task(
                f"{self._label}, first estimate", total=examples, state=""
            )
        state = f"{done} of {examples} examples"
        self._progress.update(self._estimate, completed=done, state=state)


def evaluation_text(row: Mapping[str, Any]) -> str:
    """Return an evaluation in one line, of the averaged and of the raw parameters."""
    texts = {
        kind: ", ".join(
            f"{split} loss {row[f'{key}{split}_loss']:.4g} error {row[f'{key}{split}_error']:.2f}%"
            for split in ("train", "test")
        )
        for kind, key in (("averaged", "averaged_"), ("raw", ""))
    }
    place = f"epoch {row['epoch']:.4g}, update {row['update']}, {row['seconds']:.1f} s"
    if row["update"] == 0:
        return f"{place}: initial parameters: {texts['raw']}"
    return f"{place}: " + "; ".join(f"{kind} parameters: {text}" for kind, text in texts.items())


def as_table(
    rows: Sequence[tuple[str, ...]],
    title: str | None = None,
    *,
    compact: bool = False,
    justify: Literal["left", "right"] = "right",
) -> Table:
    """Return a table for the console; the first row is the header.

    Args:
        compact: use rules instead of boxes, for tables with many columns.
        justify: the alignment of all columns but the first.
    """
    header, *body = rows
    table = Table(title=title, title_justify="left", box=SIMPLE if compact else HEAVY_HEAD)
    if compact:
        table.pad_edge, table.collapse_padding = False, True
    for index, name in enumerate(header):
        table.add_column(shown(name), justify="left" if index == 0 else justify)
    for row in body:
        table.add_row(*map(shown, row))
    return table


# Paths


def require_page(out: Path) -> None:
    """Fail if a page cannot have this name, or would replace a file of a run."""
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a folder; name a file", param_hint="--out")
    own = [name for name in OWN_FILES if (out.parent / name).exists()]
    if own and out.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(
            f"{out} is in a folder with {own[0]}, as runs have it, and could replace a file of a "
            "run; name the page .html",
            param_hint="--out",
        )


def numbered(wanted: Path) -> Iterator[Path]:
    """Yield path, path-2, path-3, ..."""
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))


def free_path(wanted: Path) -> Path:
    """Return the first of the numbered paths that does not exist."""
    return next(path for path in numbered(wanted) if not path.exists())
