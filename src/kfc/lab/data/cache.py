"""Store decoded data on disk as arrays to map into memory, with a record of their origin.

A cache folder is written under a temporary name and then renamed, so it is always complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfc.lab.data.catalogue import Entry
from kfc.lab.data.datasets import DataError, Dataset, Split, Splits
from kfc.lab.data.raw import Raw, check_structure, find_raw

VERSION = 1
SECONDS_UNTIL_ABANDONED = 3600


@dataclass(frozen=True)
class Record:
    """The origin of cached content; ``files`` has the size and change time of each raw file."""

    name: str
    digest: str
    origin: str
    official: bool
    files: dict[str, list[int]]
    version: int = VERSION


def cache_folder(entry: Entry, folder: Path) -> Path:
    """Return the folder of the decoded data set."""
    return folder / "decoded" / entry.name


def open_cache(entry: Entry, folder: Path) -> Dataset:
    """Map the cached arrays, after a check of their headers, sizes and labels, not of pixels.

    Raises:
        DataError: there is no cache, or it is damaged or outdated.
    """
    home = cache_folder(entry, folder)
    if not home.exists():
        raise DataError("not decoded yet")
    try:
        record = Record(**json.loads((home / "record.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"its record is damaged ({error})") from error
    if (record.version, record.name) != (VERSION, entry.name):
        raise DataError("written by another version")
    if entry.digest not in (None, record.digest):
        raise DataError(f"its content has digest {record.digest}, not {entry.digest}")
    raw = None if entry.digest else next(find_raw(entry, folder), None)
    if raw and _fingerprint(raw.files) != record.files:
        raise DataError("the raw files have changed")
    train, test = (
        Split(
            _map_array(home / f"{title}-images.npy", np.uint8),
            _map_array(home / f"{title}-labels.npy", np.int64),
        )
        for title in ("train", "test")
    )
    check_structure(entry, Splits(train, test))
    return Dataset(train, test, entry.name, entry.classes, record.digest, record.official)


def write_cache(entry: Entry, folder: Path, raw: Raw, dataset: Dataset) -> None:
    """Write the data set to disk under a temporary name, then rename it to the cache folder."""
    home = cache_folder(entry, folder)
    try:
        files = _fingerprint(raw.files)
        record = Record(entry.name, dataset.digest, str(raw.path), dataset.is_official, files)
        home.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(home)
        with tempfile.TemporaryDirectory(prefix=f".{home.name}-", dir=home.parent) as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            for title, split in (("train", dataset.train), ("test", dataset.test)):
                np.save(new / f"{title}-images.npy", np.ascontiguousarray(split.images))
                np.save(new / f"{title}-labels.npy", np.ascontiguousarray(split.labels))
            (new / "record.json").write_text(json.dumps(asdict(record), indent=2))
            for path in new.iterdir():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            _move_into_place(new, entry, folder)
    except OSError as error:
        raise DataError(
            f"the decoded data cannot be written to {home}: {error.strerror or error}; free some "
            "space, or name another folder with --data-dir or KFC_DATA_DIR"
        ) from error


def _fingerprint(files: list[Path]) -> dict[str, list[int]]:
    states = {path.name: path.stat() for path in files}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}


def _map_array(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        size = path.stat().st_size
    except Exception as error:  # numpy raises many types of exceptions on a damaged header
        raise DataError(f"{path.name} cannot be mapped ({error})") from error
    fits = isinstance(array, np.memmap) and array.dtype == dtype and array.flags.c_contiguous
    if not fits or size != array.offset + array.nbytes:
        raise DataError(f"{path.name} has changed since it was written")
    return np.asanyarray(array)


def _move_into_place(new: Path, entry: Entry, folder: Path) -> None:
    """Rename ``new`` to the cache folder, unless another process just wrote a usable one there.

    An unusable cache is moved next to ``new``, where it is deleted with the temporary folder. A
    cache that is replaced while another process maps it does no harm: the content is the same.
    """
    home = cache_folder(entry, folder)
    while True:
        try:
            os.rename(new, home)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with suppress(DataError):
            open_cache(entry, folder)
            return
        with suppress(FileNotFoundError):  # another process has moved it already
            os.rename(home, new.with_name(uuid.uuid4().hex))


def _remove_abandoned(home: Path) -> None:
    """Remove old temporary folders, which processes that were killed have left."""
    for path in home.parent.glob(f".{home.name}-*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > SECONDS_UNTIL_ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
