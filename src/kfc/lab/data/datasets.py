"""Decoded data sets, and the hash of their content."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS_PER_CHUNK = 4096


class DataError(Exception):
    """Data that is missing or invalid; the message says what is wrong and what to do."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images, uint8 (N, channels, height, width), and their labels, int64 (N,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker maps the file again; numpy's own pickling would copy the content.
        return _open_split, (_reference(self.images), _reference(self.labels))


@dataclass(frozen=True, eq=False)
class Splits:
    """The training and the test split of a data set."""

    train: Split
    test: Split


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set ready for use; ``digest`` is the hash of its decoded content."""

    name: str
    classes: int
    train: Split
    test: Split
    digest: str


def content_digest(data: Splits | Dataset) -> str:
    """Return the sha256 of the types, shapes and values of both splits."""
    digest = hashlib.sha256()
    for split in (data.train, data.test):
        for array, dtype in ((split.images, "|u1"), (split.labels, "<i8")):
            digest.update(f"{dtype} {array.shape}\n".encode())
            for start in range(0, len(array), ROWS_PER_CHUNK):
                rows = array[start : start + ROWS_PER_CHUNK]
                digest.update(np.ascontiguousarray(rows, dtype=dtype).data)
    return digest.hexdigest()


def _reference(array: NDArray[Any]) -> NDArray[Any] | dict[str, Any]:
    """Return the arguments that map the same file again, or the array if it maps no whole file."""
    if not (isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap)):
        return np.asarray(array)
    assert array.filename is not None  # numpy sets it for every file
    return {
        "filename": Path(array.filename).resolve(),
        "dtype": array.dtype.str,
        "offset": array.offset,
        "shape": array.shape,
    }


def _open_split(images: Any, labels: Any) -> Split:
    return Split(_open(images), _open(labels))


def _open(reference: Any) -> Any:
    return np.memmap(mode="r", **reference) if isinstance(reference, dict) else reference
