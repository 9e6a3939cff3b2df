"""What a user sees on the standard error stream while data is fetched and decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)


class DownloadBar:
    """A progress bar with the methods that pooch calls."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    @property
    def total(self) -> float | None:
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, size: float) -> None:
        self._progress.update(self._task, total=size or None)

    def update(self, amount: float) -> None:
        self._progress.advance(self._task, amount)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """The bar ends with its context."""


@dataclass(frozen=True)
class Reporter:
    """Shows notes and bars, or nothing; bars only where somebody is looking."""

    shown: bool

    def note(self, text: str) -> None:
        if self.shown:
            console = Console(stderr=True)
            console.print(text, markup=False, highlight=False, soft_wrap=True, style="dim")

    @contextmanager
    def bar(self, title: str) -> Iterator[DownloadBar | None]:
        console = Console(stderr=True)
        if not (self.shown and console.is_terminal):
            yield None
            return
        columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console) as progress:
            yield DownloadBar(progress, progress.add_task(title, total=None))
