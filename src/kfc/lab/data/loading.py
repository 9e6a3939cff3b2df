"""Load and check data sets by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from kfc.lab.data.cache import UnusableCacheError, cache_folder, open_cache, write_cache
from kfc.lab.data.catalogue import Entry, entry_named
from kfc.lab.data.datasets import DataError, Dataset, content_digest
from kfc.lab.data.progress import Reporter
from kfc.lab.data.raw import Raw, decode_own, find_raw, verify
from kfc.lab.data.sources import obtain

ATTEMPTS = 3


def data_folder(folder: Path | None = None) -> Path:
    """Return the folder of raw and decoded data.

    It is the argument, else KFC_DATA_DIR, else a folder in the user's cache.
    """
    named = folder or os.environ.get("KFC_DATA_DIR")
    if not named:
        return user_cache_path("kfc") / "data"
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError as error:  # the user after ~ does not exist
        raise DataError(
            f"{named} cannot be the data folder: there is no such home directory. "
            "Name another folder with --data-dir or KFC_DATA_DIR."
        ) from error


def load(name: str, folder: Path | None = None, *, progress: bool = True) -> Dataset:
    """Return the data set of that name.

    On first use it is fetched and decoded; later calls map the decoded files into memory.
    """
    return load_entry(entry_named(name), data_folder(folder), Reporter(progress))


def load_entry(entry: Entry, folder: Path, reporter: Reporter) -> Dataset:
    """Return the data set of a catalogue entry; see ``load``."""
    if entry.embedded:
        splits = entry.embedded()
        digest = verify(entry, splits)
        return Dataset(entry.name, entry.classes, splits.train, splits.test, digest)
    # Another process that finds the cache unusable may replace it while this one opens it.
    for _ in range(ATTEMPTS):
        try:
            return open_cache(entry, folder)[0]
        except UnusableCacheError as reason:
            if cache_folder(entry, folder).exists():
                reporter.note(f"Decoding {entry.name} again: its cache is unusable ({reason})")
        write_cache(entry, folder, obtain(entry, folder, reporter))
    return open_cache(entry, folder)[0]


def decoded_already(entry: Entry, folder: Path) -> Dataset | None:
    """Return the data set if it has a usable cache; nothing is fetched or decoded."""
    try:
        return open_cache(entry, folder)[0]
    except UnusableCacheError:
        return None


def whereabouts(entry: Entry, folder: Path) -> str:
    """Return what is available locally: "embedded", "decoded", "raw files" or "not here"."""
    if entry.embedded:
        return "embedded"
    if decoded_already(entry, folder):
        return "decoded"
    return "raw files" if next(find_raw(entry, folder), None) else "not here"


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    passed: bool
    text: str


def check_entry(entry: Entry, folder: Path) -> Iterator[CheckResult]:
    """Verify the hashes of all local copies of the data set; having none is a failure."""
    if entry.embedded:
        yield CheckResult(True, f"embedded: sha256 {verify(entry, entry.embedded())}")
        return
    results = [_check_raw(entry, folder, raw) for raw in find_raw(entry, folder)]
    if cache_folder(entry, folder).exists():
        results.insert(0, _check_cache(entry, folder))
    missing = CheckResult(False, f"not in {folder}; `kfc data get {entry.name}` fetches it")
    yield from [result for result in results if result] or [missing]


def _check_cache(entry: Entry, folder: Path) -> CheckResult:
    home = cache_folder(entry, folder)
    remedy = f"Remove {home}, and it will be decoded again."
    try:
        dataset, record = open_cache(entry, folder)
    except UnusableCacheError as error:
        return CheckResult(False, f"{home}: {error}. {remedy}")
    found = content_digest(dataset)
    if found != record.digest:
        return CheckResult(False, f"{home}: sha256 {found}, not {record.digest}. {remedy}")
    counts = f"{len(dataset.train):,} + {len(dataset.test):,} examples"
    origin = _describe_origin(entry, record.official)
    return CheckResult(True, f"{home}: {counts}, sha256 {found}, {origin}")


def _check_raw(entry: Entry, folder: Path, raw: Raw) -> CheckResult | None:
    try:
        content = decode_own(entry, folder, raw)
    except DataError as error:
        return CheckResult(False, str(error))
    if content is None:
        return None
    origin = _describe_origin(entry, raw.is_official)
    return CheckResult(True, f"{raw.path}: sha256 {content.digest}, {origin}")


def _describe_origin(entry: Entry, official: bool) -> str:
    if official:
        return "from the files as published"
    if entry.digest:
        return "the known content, but from other files than the published ones"
    return "not the official files, but others in the same format"
