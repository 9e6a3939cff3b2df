"""SVHN's cropped digits: MATLAB files with X, uint8 (32, 32, 3, N), and y, (N, 1)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfc.experiments.data.containers import Read
from kfc.experiments.data.matlab import read_arrays
from kfc.experiments.data.sets import DataError, Decoded, Split

FILES = ("train_32x32.mat", "test_32x32.mat")
LARGEST = 256 << 20  # bytes of a file, and of what it unpacks to; the official train set has 226 MB


def decode(read: Read) -> Decoded:
    train, test = (_split(name, read(name)) for name in FILES)
    return Decoded(train, test)


def _split(name: str, content: bytes) -> Split:
    arrays = read_arrays(name, content, LARGEST)
    if not {"X", "y"} <= arrays.keys():
        raise DataError(f"{name} has no arrays X and y")
    return Split(_images(name, arrays["X"]), _labels(name, arrays["y"]))


def _images(name: str, values: NDArray[Any]) -> NDArray[np.uint8]:
    if values.dtype != np.uint8 or values.ndim != 4:
        raise DataError(f"{name} has X {values.dtype} {values.shape}, not uint8 (32, 32, 3, N)")
    return np.ascontiguousarray(values.transpose(3, 2, 0, 1))


def _labels(name: str, values: NDArray[Any]) -> NDArray[np.int64]:
    """1 to 9 for these digits and 10 for the digit 0."""
    if values.ndim != 2 or values.shape[1] != 1 or not np.isin(values, range(1, 11)).all():
        raise DataError(f"{name} has y {values.shape} other than the numbers 1 to 10, (N, 1)")
    return values[:, 0].astype(np.int64) % 10
