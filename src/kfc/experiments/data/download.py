"""The official files, from their publishers."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from urllib.parse import urlsplit

import pooch
import requests  # type: ignore[import-untyped,unused-ignore]
from urllib3.exceptions import MaxRetryError

from kfc.experiments.data.forms import Form, Published
from kfc.experiments.data.progress import Reporter
from kfc.experiments.data.raw import file_hash
from kfc.experiments.data.sets import DataError

ATTEMPTS = 3
SECONDS_BETWEEN = 1.0
TIMEOUTS = (5, 30)  # seconds to connect; seconds without a byte


def download(form: Form, folder: Path, reporter: Reporter) -> None:
    """Put the form's published files into the folder, each only once its checksum is right.

    Files that are there already stay as they are.
    """
    for offer in form.published:
        _refuse_to_replace(offer, folder)
    # pooch announces each download itself; the reporter does that.
    pooch.get_logger().setLevel(logging.WARNING)
    for offer in form.published:
        reporter.note(f"Fetching {offer.url}")
        _fetch_with_retries(offer, folder, reporter)


def _refuse_to_replace(offer: Published, folder: Path) -> None:
    """pooch would overwrite a file of another hash, and it may be its owner's only copy."""
    path = folder / offer.file
    if not path.exists():
        return
    algorithm, published = offer.checksum.split(":")
    found = file_hash(path, algorithm)
    if found != published:
        raise DataError(
            f"{path} has {algorithm} {found}, not the published {published}; remove or rename it"
        )


def _fetch_with_retries(offer: Published, folder: Path, reporter: Reporter) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _fetch(offer, folder, reporter)
            return
        except (requests.RequestException, ValueError) as error:
            reason = _reason(offer, error)
            if attempt == ATTEMPTS or _is_hopeless(error):
                raise DataError(reason) from error
            reporter.note(f"{reason}; trying again")
            time.sleep(SECONDS_BETWEEN)


def _fetch(offer: Published, folder: Path, reporter: Reporter) -> None:
    """pooch writes to a temporary file and moves it into place when its hash is right."""
    with reporter.bar(offer.file) as bar:
        downloader = pooch.HTTPDownloader(progressbar=bar or False, timeout=TIMEOUTS)
        pooch.retrieve(
            offer.url,
            known_hash=offer.checksum,
            fname=offer.file,
            path=folder,
            downloader=downloader,
        )


def _is_hopeless(error: Exception) -> bool:
    """Whether the next attempt would only fail in the same way."""
    status = _status(error)
    return _never_connected(error) or (status is not None and 400 <= status < 500)


def _never_connected(error: Exception) -> bool:
    return bool(error.args) and isinstance(error.args[0], MaxRetryError)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(offer: Published, error: Exception) -> str:
    host = urlsplit(offer.url).netloc
    if _status(error) is not None:
        return f"{offer.url} answers with status {_status(error)}"
    if _never_connected(error):
        return f"no connection to {host}"
    if isinstance(error, requests.RequestException):
        return f"the connection to {host} broke off"
    return f"{offer.file} did not arrive with its published hash {offer.checksum}"
