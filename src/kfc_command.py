"""The ``kfc`` command, also ``python -m kfc``.

It is outside of the package, so that Ctrl-C ends the command quietly while the package is imported,
which takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command, or say how to install what it needs."""
    _end_at_once()
    try:
        from kfc.lab.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("kfc", "torch"):
            raise
        sys.exit(
            f"Error: the kfc command needs the package {error.name}, which is not installed: "
            'pip install "kfc-torch[experiments]"'
        )
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    finally:
        _end_at_once()


def _end_at_once() -> None:
    """Let Ctrl-C end the process, while modules are imported and when the command has ended.

    An exception could be lost, replaced or printed there. A launcher that handles or ignores Ctrl-C
    keeps doing so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


# `python -m kfc` imports the package before its __main__. Until then, sys.argv begins with "-m" and
# lacks the name of the module.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "kfc":
    _end_at_once()
