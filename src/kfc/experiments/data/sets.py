"""What a data set is once it is decoded, and the hash of its content."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS_AT_ONCE = 4096


class DataError(Exception):
    """Data that is not here or not what it should be; says what was wrong and what to do."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images, uint8 (N, channels, height, width), and their labels, int64 (N,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker maps the same file again; numpy alone would send all of the content.
        return _restored_split, (_portable(self.images), _portable(self.labels))


@dataclass(frozen=True, eq=False)
class Decoded:
    """Both splits of a data set."""

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


def content_digest(decoded: Decoded) -> str:
    """sha256 of the types, shapes and values of both splits, whatever files they came from."""
    digest = hashlib.sha256()
    for split in (decoded.train, decoded.test):
        for array, kind in ((split.images, "|u1"), (split.labels, "<i8")):
            digest.update(f"{kind} {array.shape}\n".encode())
            for start in range(0, len(array), ROWS_AT_ONCE):
                rows = array[start : start + ROWS_AT_ONCE]
                digest.update(np.ascontiguousarray(rows, dtype=kind).data)
    return digest.hexdigest()


Portable = tuple[Callable[..., NDArray[Any]], tuple[Any, ...]]


def _portable(array: NDArray[Any]) -> Portable:
    """How another process gets this array: the file if it maps all of one, else the content."""
    if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
        assert array.filename is not None  # only anonymous maps have none, and numpy makes none
        path = Path(array.filename).resolve()
        return _map_file, (path, array.dtype.str, array.offset, array.shape)
    return np.asarray, (np.asarray(array),)


def _map_file(path: Path, kind: str, offset: int, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.memmap(path, dtype=kind, mode="r", offset=offset, shape=shape)


def _restored_split(images: Portable, labels: Portable) -> Split:
    (make_images, image_arguments), (make_labels, label_arguments) = images, labels
    return Split(make_images(*image_arguments), make_labels(*label_arguments))
