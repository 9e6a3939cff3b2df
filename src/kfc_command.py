"""The ``kfc`` command, also ``python -m kfc``.

It is outside of the package, so that Ctrl-C ends the command quietly while the package is imported,
which takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


def main() -> None:
    """Run the command, or say how to install what it needs."""
    with _ending_at_once():
        try:
            from kfc.lab.cli import app
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in ("kfc", "torch"):
                raise
            sys.exit(
                f"Error: the kfc command needs the package {error.name}, which is not installed: "
                'pip install "kfc-torch[experiments]"'
            )
    app()


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """End the process at Ctrl-C; the modules could lose or replace an exception."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # a launcher has its own way, or ignores it
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
