"""Data sets by name: load, look at, check."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from kfc.experiments.data.cache import (
    UnusableCacheError,
    cache_folder,
    open_cache,
    write_cache,
)
from kfc.experiments.data.catalogue import entry_named
from kfc.experiments.data.forms import Entry
from kfc.experiments.data.progress import Reporter
from kfc.experiments.data.raw import Raw, decode_own, find_raw, is_official
from kfc.experiments.data.sets import DataError, Dataset, Decoded, content_digest
from kfc.experiments.data.sources import obtain
from kfc.experiments.data.verification import verified_digest

ATTEMPTS = 3


def data_folder(folder: Path | None = None) -> Path:
    """Where raw and decoded data lie: the argument, else KFC_DATA_DIR, else the user's cache."""
    named = folder or os.environ.get("KFC_DATA_DIR")
    if not named:
        return user_cache_path("kfc") / "data"
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError as error:  # nobody has the name after ~
        raise DataError(
            f"{named} cannot be the data folder: there is no such home. "
            "Name another folder with --data-dir or KFC_DATA_DIR."
        ) from error


def load(name: str, folder: Path | None = None, *, progress: bool = True) -> Dataset:
    """The data set of that name; fetched and decoded on first use, afterwards only mapped."""
    return load_entry(entry_named(name), data_folder(folder), Reporter(progress))


def load_entry(entry: Entry, folder: Path, reporter: Reporter) -> Dataset:
    if entry.embedded:
        return _embedded(entry, entry.embedded())
    # Another process that finds the cache unusable may replace it just as this one opens it.
    for _ in range(ATTEMPTS):
        try:
            return open_cache(entry, folder)[0]
        except UnusableCacheError as reason:
            if cache_folder(entry, folder).exists():
                reporter.note(f"The decoded {entry.name} cannot be used ({reason}); decoding anew")
        write_cache(entry, folder, obtain(entry, folder, reporter))
    return open_cache(entry, folder)[0]


def _embedded(entry: Entry, decoded: Decoded) -> Dataset:
    digest = verified_digest(entry, decoded)
    return Dataset(entry.name, entry.classes, decoded.train, decoded.test, digest)


def decoded_already(entry: Entry, folder: Path) -> Dataset | None:
    """The data set if there is a usable cache; nothing is fetched or decoded."""
    try:
        return open_cache(entry, folder)[0]
    except UnusableCacheError:
        return None


def whereabouts(entry: Entry, folder: Path) -> str:
    """What of the data set is on this machine already."""
    if entry.embedded:
        return "embedded"
    if decoded_already(entry, folder):
        return "decoded"
    return "raw files" if next(find_raw(entry, folder), None) else "not here"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    passed: bool
    text: str


def check_entry(entry: Entry, folder: Path) -> Iterator[Finding]:
    """Hash everything of the data set that is on this machine; nothing at all is a failure."""
    if entry.embedded:
        yield Finding(True, f"embedded: sha256 {_embedded(entry, entry.embedded()).digest}")
        return
    findings = [_check_raw(entry, folder, raw) for raw in find_raw(entry, folder)]
    if cache_folder(entry, folder).exists():
        findings.insert(0, _check_cache(entry, folder))
    nowhere = Finding(False, f"not in {folder}; `kfc data get {entry.name}` fetches it")
    yield from [finding for finding in findings if finding] or [nowhere]


def _check_cache(entry: Entry, folder: Path) -> Finding:
    home = cache_folder(entry, folder)
    remedy = f"Remove {home} and it will be decoded anew."
    try:
        dataset, record = open_cache(entry, folder)
    except UnusableCacheError as error:
        return Finding(False, f"{home}: {error}. {remedy}")
    found = content_digest(Decoded(dataset.train, dataset.test))
    if found != record.digest:
        return Finding(False, f"{home}: sha256 {found}, not {record.digest}. {remedy}")
    counts = f"{len(dataset.train):,} + {len(dataset.test):,} examples"
    return Finding(True, f"{home}: {counts}, sha256 {found}, {_standing(entry, record.official)}")


def _check_raw(entry: Entry, folder: Path, raw: Raw) -> Finding | None:
    try:
        content = decode_own(entry, folder, raw)
    except DataError as error:
        return Finding(False, str(error))
    if content is None:
        return None
    _, digest = content
    return Finding(True, f"{raw.path}: sha256 {digest}, {_standing(entry, is_official(raw))}")


def _standing(entry: Entry, official: bool) -> str:
    if official:
        return "from the files as published"
    if entry.digest:
        return "the known content, from other files than the published ones"
    return "not the official files, but others in their layout"
