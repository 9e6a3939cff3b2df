"""Progress messages and bars on standard error while data is fetched and decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@dataclass(frozen=True)
class Reporter:
    """Prints messages and progress bars, or nothing if not ``shown``."""

    shown: bool

    def note(self, text: str) -> None:
        if self.shown:
            console = Console(stderr=True)
            console.print(text, markup=False, highlight=False, soft_wrap=True, style="dim")

    def track(self, title: str, chunks: Iterable[bytes], size: int | None) -> Iterator[bytes]:
        """Yield the chunks of a download; on a terminal, show how much of ``size`` has arrived."""
        console = Console(stderr=True)
        if not (self.shown and console.is_terminal):
            yield from chunks
            return
        columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(title, total=size)
            for chunk in chunks:
                progress.advance(task, len(chunk))
                yield chunk
