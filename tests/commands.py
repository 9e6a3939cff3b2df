"""Run the `kfc` command, or a script, in a process of its own."""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

from typer.testing import CliRunner

from kfc.lab.cli import app

# Wide output, so that lines are not wrapped, and one thread.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
# Fork processes that have already imported torch, which takes seconds.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["preloaded"])


def kfc(
    *arguments: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """Run the command to its end, and return its output."""
    return start_kfc(*arguments, cwd=cwd, **variables).completed()


def run_script(path: Path, *arguments: object) -> subprocess.CompletedProcess:
    """Run ``python PATH ARGUMENTS`` to its end, with modules already imported."""
    return Command([str(path), *map(str, arguments)], Path.cwd(), script=path).completed()


def kfc_anew(
    *arguments: object, cwd: Path | None = None, program: str | None = None, **more: str
) -> subprocess.CompletedProcess:
    """Run ``python -m kfc`` in a new interpreter.

    Args:
        program: Python code to run instead of the command.
        more: environment variables.
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
    """Start the command in the background, with these environment variables."""
    return Command(["kfc", *map(str, arguments)], cwd or Path.cwd(), variables)


class Command:
    """A running command, whose output goes to files."""

    def __init__(
        self,
        arguments: list[str],
        cwd: Path,
        variables: dict[str, str] | None = None,
        script: Path | None = None,
    ) -> None:
        self._arguments = arguments
        self._output = Path(tempfile.mkdtemp(prefix="kfc-command-"))
        # The fork server starts with the first process, and does not inherit sys.path.
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with patch.dict(os.environ, {**ENVIRONMENT, "PYTHONPATH": path}):
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
        """Wait for the end of the command, and return its output."""
        code = self.wait()
        texts = [(self._output / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(self._arguments, code, *texts)


def _run(
    arguments: list[str], cwd: Path, output: Path, variables: dict[str, str], script: Path | None
) -> None:
    """Run the command in the forked process."""
    # A shell that runs the tests in the background lets its children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    """Run the command in this process, which is fastest for errors in arguments."""
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.output, "")


def assert_clear_error(done: subprocess.CompletedProcess, code: int, *words: str) -> None:
    """Assert that the command ended with this code, and a message with these words."""
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, output
    assert "Traceback" not in output, output
    for word in words:
        assert word in output, f"{word!r} is not in: {output}"
