"""The `kfc` command, and other programs, in a process of their own."""

import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

from typer.testing import CliRunner

from kfc.cli import app

# Text that is not broken at the edge of a terminal, and one thread.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
# Forks processes that have imported torch and the rest already, which takes seconds.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["preloaded"])


def kfc(
    *arguments: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """Run to the end, with what it printed."""
    return start_kfc(*arguments, cwd=cwd, **variables).completed()


def run_script(path: Path, *arguments: object) -> subprocess.CompletedProcess:
    """Run ``python PATH ARGUMENTS`` to the end; what it imports may be there already."""
    return Command([str(path), *map(str, arguments)], Path.cwd(), script=path).completed()


def kfc_anew(
    *arguments: object, cwd: Path | None = None, program: str | None = None, **more: str
) -> subprocess.CompletedProcess:
    """The same from the very start: ``python -m kfc``.

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
        env={**os.environ, **ENVIRONMENT, **more},
        cwd=cwd,
        timeout=300,
    )


def start_kfc(*arguments: object, cwd: Path | None = None, **variables: str) -> "Command":
    """Start, and let it run; with variables of its environment."""
    return Command(["kfc", *map(str, arguments)], cwd or Path.cwd(), variables)


class Command:
    """A running command; what it prints goes into files."""

    def __init__(
        self,
        arguments: list[str],
        cwd: Path,
        variables: dict[str, str] | None = None,
        script: Path | None = None,
    ) -> None:
        self._arguments = arguments
        self._output = Path(tempfile.mkdtemp(prefix="kfc-command-"))
        # For the server, which starts with the first; it does not ask for our sys.path.
        with patch.dict(os.environ, {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parent)}):
            self._process = FORKS.Process(
                target=_run, args=(arguments, cwd, self._output, variables or {}, script)
            )
            self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 300) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running after {timeout} s"
        return self._process.exitcode

    def completed(self) -> subprocess.CompletedProcess:
        """Wait for its end."""
        code = self.wait()
        texts = [(self._output / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(self._arguments, code, *texts)


def _run(
    arguments: list[str], cwd: Path, output: Path, variables: dict[str, str], script: Path | None
) -> None:
    """In the forked process."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.update(variables)
    sys.argv = arguments
    if script is None:
        app()
    else:
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")


def kfc_here(*arguments: object) -> subprocess.CompletedProcess:
    """The command in this process, for what even a forked one would take too long to refuse."""
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
