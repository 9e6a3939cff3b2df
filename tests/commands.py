"""The `kfc` command in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from kfc.cli import app


def environment(**more: str) -> dict[str, str]:
    """One thread, and text that is not broken at the edge of a terminal."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1", **more}


def kfc(
    *arguments: object, cwd: Path | None = None, program: str | None = None, **more: str
) -> subprocess.CompletedProcess:
    """Run to the end, with what it printed.

    Args:
        program: Python code to run instead of the command.
        more: variables of its environment.
    """
    start = [sys.executable, *(["-m", "kfc"] if program is None else ["-c", program])]
    return subprocess.run(
        [*start, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**more),
        cwd=cwd,
        timeout=300,
    )


def start_kfc(*arguments: object) -> subprocess.Popen:
    """Start, and let it run."""
    return subprocess.Popen(
        [sys.executable, "-m", "kfc", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def kfc_here(*arguments: object) -> subprocess.CompletedProcess:
    """The command in this process, for what a process of its own would take seconds to refuse."""
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.output, "")


def assert_clear_error(done: subprocess.CompletedProcess, code: int, *words: str) -> None:
    """It ended with this code and a message that has these words, not with a traceback."""
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, output
    assert "Traceback" not in output, output
    for word in words:
        assert word in output, f"{word!r} is not in: {output}"
