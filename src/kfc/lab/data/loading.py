"""Load and check data sets by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from platformdirs import user_cache_path
from rich.console import Console

from kfc.lab.data.cache import cache_folder, open_cache, write_cache
from kfc.lab.data.catalogue import CATALOGUE, Entry
from kfc.lab.data.datasets import DataError, Dataset, content_digest
from kfc.lab.data.files import create_folder
from kfc.lab.data.raw import decode_own, find_raw, verify
from kfc.lab.data.sources import note_console, obtain
from kfc.lab.options import not_one_of

ATTEMPTS = 3


def default_folder() -> Path:
    return user_cache_path("kfc") / "data"


def data_folder(folder: Path | None = None) -> Path:
    """Return the folder of raw and decoded data.

    It is the argument, else KFC_DATA_DIR, else a folder in the user's cache.
    """
    named = folder or os.environ.get("KFC_DATA_DIR")
    if not named:
        return default_folder()
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError as error:  # the user after ~ does not exist
        raise DataError(
            f"{named} cannot be the data folder: there is no such home directory; name another "
            "with --data-dir or KFC_DATA_DIR"
        ) from error


def create_data_folder(folder: Path | None) -> None:
    """Create the folder of raw and decoded data, if it does not exist."""
    create_folder(data_folder(folder))


def load(name: str, folder: Path | None = None, *, progress: bool = True) -> Dataset:
    """Return the data set of that name.

    On first use it is fetched and decoded; later calls map the decoded files into memory. A folder
    that is named, and not the default, must exist.
    """
    if name not in CATALOGUE:
        raise DataError(not_one_of("the data set", name, CATALOGUE))
    home = data_folder(folder)
    if not (CATALOGUE[name].embedded or home.is_dir() or home == default_folder()):
        raise DataError(
            f"the data folder {home} does not exist; correct --data-dir or KFC_DATA_DIR, or "
            "create the folder with --create"
        )
    return load_entry(CATALOGUE[name], home, note_console(shown=progress))


def load_entry(entry: Entry, folder: Path, notes: Console) -> Dataset:
    """Return the data set of a catalogue entry; see ``load``."""
    if entry.embedded:
        return verify(entry, entry.embedded(), is_official=True)
    # Another process that finds the cache unusable may replace it while this one opens it.
    for _ in range(ATTEMPTS):
        try:
            return open_cache(entry, folder)
        except DataError as reason:
            if cache_folder(entry, folder).exists():
                notes.print(f"Decoding {entry.name} again: its cache is unusable ({reason})")
        write_cache(entry, folder, *obtain(entry, folder, notes))
    return open_cache(entry, folder)


def decoded_already(entry: Entry, folder: Path) -> Dataset | None:
    """Return the data set if it has a usable cache; nothing is fetched or decoded."""
    try:
        return open_cache(entry, folder)
    except DataError:
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
    home = cache_folder(entry, folder)
    copies: list[tuple[Path | str, Callable[[], Dataset | None]]] = []
    if entry.embedded:
        copies.append(("embedded", partial(verify, entry, entry.embedded(), is_official=True)))
    if home.exists():
        copies.append((home, partial(_verified_cache, entry, folder)))
    for raw in find_raw(entry, folder):
        copies.append((raw.path, partial(decode_own, entry, folder, raw)))
    results = [_check(entry, path, read) for path, read in copies]
    missing = CheckResult(False, f"not in {folder}; `kfc data get {entry.name}` fetches it")
    yield from [result for result in results if result] or [missing]


def _verified_cache(entry: Entry, folder: Path) -> Dataset:
    home = cache_folder(entry, folder)
    try:
        dataset = open_cache(entry, folder)
        if (found := content_digest(dataset)) != dataset.digest:
            raise DataError(f"sha256 {found}, not {dataset.digest}")
    except DataError as error:
        raise DataError(f"{home}: {error}. Remove {home}, and it will be decoded again.") from error
    return dataset


def _check(
    entry: Entry, path: Path | str, read: Callable[[], Dataset | None]
) -> CheckResult | None:
    try:
        dataset = read()
    except DataError as error:
        return CheckResult(False, str(error))
    if dataset is None:  # the files are those of another data set
        return None
    if dataset.is_official:
        origin = "from the files as published"
    elif entry.digest:
        origin = "the known content, but from other files than the published ones"
    else:
        origin = "not the official files, but others in the same format"
    counts = f"{len(dataset.train):,} + {len(dataset.test):,} examples"
    return CheckResult(True, f"{path}: {counts}, sha256 {dataset.digest}, {origin}")
