"""Decoded data sets, and the hash of their content."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
class Dataset(Splits):
    """A data set ready for use.

    Attributes:
        digest: the hash of its decoded content.
        is_official: whether it was decoded from the files as published.
    """

    name: str
    classes: int
    digest: str
    is_official: bool


def chunks(array: NDArray[Any], rows: int = 4096) -> Iterator[NDArray[Any]]:
    """Yield the rows of an array in chunks whose copies need little memory."""
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def content_digest(data: Splits) -> str:
    """Return the sha256 of the types, shapes and values of both splits."""
    digest = hashlib.sha256()
    for split in (data.train, data.test):
        for array, dtype in ((split.images, "|u1"), (split.labels, "<i8")):
            digest.update(f"{dtype} {array.shape}\n".encode())
            for rows in chunks(array):
                digest.update(np.ascontiguousarray(rows, dtype=dtype).data)
    return digest.hexdigest()


def _reference(array: NDArray[Any]) -> NDArray[Any] | tuple[Any, ...]:
    """Return the arguments that map the same file again, or the array if it maps no whole file."""
    if not (isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap)):
        return np.asarray(array)
    assert array.filename is not None  # numpy sets it for every file
    return Path(array.filename).resolve(), array.dtype.str, "r", array.offset, array.shape


def _open_split(images: Any, labels: Any) -> Split:
    return Split(_open(images), _open(labels))


def _open(reference: Any) -> Any:
    return np.memmap(*reference) if isinstance(reference, tuple) else reference
