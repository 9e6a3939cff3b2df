"""The decoded content on disk: four arrays to map into memory and a record of their origin.

A cache folder appears whole or not at all: it is written under another name and then renamed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfc.experiments.data.forms import Entry
from kfc.experiments.data.raw import find_raw, is_official
from kfc.experiments.data.sets import DataError, Dataset, Decoded, Split
from kfc.experiments.data.sources import Found
from kfc.experiments.data.verification import require_structure

VERSION = 1
SECONDS_UNTIL_ABANDONED = 3600


class UnusableCacheError(DataError):
    """There is no cache, or not one that fits."""


@dataclass(frozen=True)
class Record:
    """Where cached content came from; ``files`` has sizes and times of change of the raw files."""

    name: str
    digest: str
    origin: str
    official: bool
    files: dict[str, list[int]]
    version: int = VERSION


def cache_folder(entry: Entry, folder: Path) -> Path:
    return folder / "decoded" / entry.name


def open_cache(entry: Entry, folder: Path) -> tuple[Dataset, Record]:
    """Map the cached arrays; their headers, sizes and labels are checked, the pixels are not."""
    home = cache_folder(entry, folder)
    if not home.exists():
        raise UnusableCacheError("not decoded yet")
    record = _read_record(home)
    if (record.version, record.name) != (VERSION, entry.name):
        raise UnusableCacheError("written by another version")
    if entry.digest not in (None, record.digest):
        raise UnusableCacheError(f"content {record.digest}, not {entry.digest}")
    if entry.digest is None and _raw_files_changed(entry, folder, record):
        raise UnusableCacheError("the raw files have changed")
    splits = Decoded(_map_split(entry, home, "train"), _map_split(entry, home, "test"))
    return Dataset(entry.name, entry.classes, splits.train, splits.test, record.digest), record


def write_cache(entry: Entry, folder: Path, found: Found) -> None:
    """Write the content beside the cache, make sure that it is on disk, then put it in place."""
    home = cache_folder(entry, folder)
    with _refusing_disk_errors(home):
        record = Record(
            name=entry.name,
            digest=found.digest,
            origin=str(found.raw.path),
            official=is_official(found.raw),
            files=_fingerprint(found.raw.files),
        )
        home.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(home)
        with _workplace(home) as workplace:
            _write_content(workplace, found.decoded, record)
            _put_in_place(workplace, home, lambda: _is_usable(entry, folder))


def _is_usable(entry: Entry, folder: Path) -> bool:
    try:
        open_cache(entry, folder)
    except UnusableCacheError:
        return False
    return True


def _read_record(home: Path) -> Record:
    try:
        record = Record(**json.loads((home / "record.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UnusableCacheError(f"its record is damaged ({error})") from error
    return record


def _fingerprint(files: list[Path]) -> dict[str, list[int]]:
    states = {path.name: path.stat() for path in files}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}


def _raw_files_changed(entry: Entry, folder: Path, record: Record) -> bool:
    raw = next(find_raw(entry, folder), None)
    return raw is not None and _fingerprint(raw.files) != record.files


def _map_split(entry: Entry, home: Path, title: str) -> Split:
    images = _map_array(home / f"{title}-images.npy", np.uint8)
    labels = _map_array(home / f"{title}-labels.npy", np.int64)
    split = Split(images, labels)
    try:
        require_structure(entry, title, split, getattr(entry, title))
    except DataError as error:
        raise UnusableCacheError(str(error)) from error
    return split


def _map_array(path: Path, kind: type[np.generic]) -> NDArray[Any]:
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        size = path.stat().st_size
    except Exception as error:  # a damaged header makes numpy raise errors of many kinds
        raise UnusableCacheError(f"{path.name} cannot be mapped ({error})") from error
    fits = isinstance(array, np.memmap) and array.dtype == kind and array.flags.c_contiguous
    if not fits or size != array.offset + array.nbytes:
        raise UnusableCacheError(f"{path.name} is not what was written")
    return np.asanyarray(array)


def _write_content(folder: Path, decoded: Decoded, record: Record) -> None:
    for title, split in (("train", decoded.train), ("test", decoded.test)):
        for part, array in (("images", split.images), ("labels", split.labels)):
            with (folder / f"{title}-{part}.npy").open("wb") as file:
                np.save(file, np.ascontiguousarray(array), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
    with (folder / "record.json").open("w") as text:
        json.dump(asdict(record), text, indent=2)
        text.flush()
        os.fsync(text.fileno())


def _put_in_place(workplace: Path, home: Path, is_usable: Callable[[], bool]) -> None:
    """Rename; an unusable cache steps aside. One that another process just wrote stays.

    If that is replaced at the same moment all the same, it does no harm: it has the same content,
    and whoever has mapped it keeps it.
    """
    aside = workplace.with_name(f"{workplace.name}-aside")
    while True:
        try:
            os.rename(workplace, home)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if is_usable():
            return
        with suppress(FileNotFoundError):  # another process was faster
            os.rename(home, aside)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _workplace(home: Path) -> Iterator[Path]:
    path = home.with_name(f".{home.name}-{uuid.uuid4().hex}")
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(home: Path) -> None:
    """Workplaces of processes that were killed long ago."""
    for path in home.parent.glob(f".{home.name}-*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > SECONDS_UNTIL_ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _refusing_disk_errors(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"The decoded data cannot be written to {home}: {reason}. "
            "Make room there or name another folder with --data-dir or KFC_DATA_DIR."
        ) from error
