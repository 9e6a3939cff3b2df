"""Run the tests with several versions of Python and torch, and record which of them pass.

    python tests/matrix.py 3.11:2.13.0 3.12:2.13.0

Each pair gets an environment of its own in .venv-matrix. Only CPU builds of torch are installed,
because the others bring gigabytes of CUDA. What is not available is reported, and does not stop the
others. ``tests/matrix.json`` has the last outcome of every pair.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_suffix(".json")
ENVIRONMENTS = ROOT / ".venv-matrix"
PASSED, FAILED, UNAVAILABLE = "passed", "failed", "unavailable"
SUITE = ("-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider")
INSTALLED = (
    "import platform, torch, kfc; print(platform.python_version(), torch.__version__, "
    "kfc.__version__)"
)


class UnavailableError(Exception):
    """A version that cannot be had here; the message says why."""


class Pair(NamedTuple):
    """A version of Python, such as "3.11", and one of torch, such as "2.13.0"."""

    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> "Pair":
        if not (found := re.fullmatch(r"(3\.\d+):(\d+\.\d+\.\d+)", text)):
            raise argparse.ArgumentTypeError(f"must be such as 3.11:2.13.0, got {text!r}")
        return cls(*found.groups())

    def __str__(self) -> str:
        return f"{self.python}:{self.torch}"


class Outcome(NamedTuple):
    """The result of a pair.

    Attributes:
        versions: the exact versions of Python, torch and kfc; empty if they were not installed.
        detail: the last line of pytest, or why the versions are not available.
    """

    status: str
    detail: str
    versions: str = ""


def find_python(version: str) -> Path:
    """Return an interpreter of this version, from the path or from pyenv."""
    names = [shutil.which(f"python{version}")]
    names += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for name in filter(None, names):
        asked = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
        if asked.stdout.startswith(f"Python {version}."):  # a shim of pyenv may not run
            return Path(name)
    raise UnavailableError(f"there is no python{version}")


def install(pair: Pair) -> Path:
    """Return the interpreter of an environment with kfc and this torch.

    torch comes first and by itself, because another package would ask for its newest version.
    """
    home = ENVIRONMENTS / f"{pair.python}-{pair.torch}"
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([find_python(pair.python), "-m", "venv", home], check=True)
    python = home / "bin" / "python"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    others = home / "constraints.txt"
    others.write_text("\n".join(line for line in pinned if not line.startswith("torch==")))
    wanted = f"torch=={cpu_build(pair.torch)}"
    _pip(python, wanted)
    _pip(python, wanted, "-c", str(others), "-e", f"{ROOT}[dev]")
    return python


def cpu_build(version: str) -> str:
    """Return the version of the CPU build. On Linux, one without a suffix may be built for CUDA."""
    return f"{version}+cpu" if sys.platform == "linux" else version


def _pip(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise UnavailableError((reasons or [f"pip ended with {done.returncode}"])[-1])


def run(pair: Pair, tests: Sequence[str]) -> Outcome:
    """Install a pair and run the tests with it."""
    try:
        python = install(pair)
    except UnavailableError as error:
        return Outcome(UNAVAILABLE, str(error))
    asked = subprocess.run([python, "-c", INSTALLED], capture_output=True, text=True, check=False)
    if asked.returncode:
        return Outcome(FAILED, asked.stderr.splitlines()[-1])
    done = subprocess.run(
        [python, "-m", "pytest", *SUITE, *tests], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    lines = done.stdout.splitlines() or [f"pytest ended with {done.returncode}"]
    failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    print("\n".join(failures), flush=True)
    status = FAILED if done.returncode else PASSED
    return Outcome(status, lines[-1].strip("= "), asked.stdout.strip())


def recorded() -> dict[str, dict[str, str]]:
    """Return the last outcome of every pair whose whole suite ran, by "python:torch"."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def table(outcomes: dict[Pair, Outcome]) -> str:
    """Return the outcomes as a table in Markdown."""
    rows = [("Python", "torch", "outcome", ""), ("---",) * 4]
    rows += [(*pair, outcome.status, outcome.detail) for pair, outcome in outcomes.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="+", type=Pair.parse, metavar="PYTHON:TORCH")
    parser.add_argument("--tests", nargs="*", default=[], help="run these only; not recorded")
    given = parser.parse_args()
    outcomes = {}
    for pair in given.pairs:
        outcomes[pair] = run(pair, given.tests)
        if outcomes[pair].status != UNAVAILABLE and not given.tests:
            row = {"date": date.today().isoformat(), **outcomes[pair]._asdict()}
            record = {**recorded(), str(pair): row}
            RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        print(table({pair: outcomes[pair]}).splitlines()[-1], flush=True)
    print(table(outcomes))
    return int(any(outcome.status == FAILED for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
