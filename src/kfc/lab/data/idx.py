"""Decode IDX, the file format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import math
import struct

import numpy as np
from numpy.typing import NDArray

from kfc.lab.data.datasets import DataError, Split, Splits
from kfc.lab.data.files import Read

UNSIGNED_BYTES = 0x08
TRAINING_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST_FILES = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
FILES = TRAINING_FILES + TEST_FILES


def decode(read: Read) -> Splits:
    """Decode two files for each split: images (N, height, width) and labels (N,)."""
    train, test = (_split(read, *names) for names in (TRAINING_FILES, TEST_FILES))
    return Splits(train, test)


def _split(read: Read, images: str, labels: str) -> Split:
    pixels = _parse(images, read(images), axes=3)
    return Split(pixels[:, None], _parse(labels, read(labels), axes=1).astype(np.int64))


def _parse(name: str, content: bytes, axes: int) -> NDArray[np.uint8]:
    """Parse two zero bytes, the type, the number of axes, the shape (big-endian) and the values."""
    header = 4 + 4 * axes
    if len(content) < header or content[:4] != bytes((0, 0, UNSIGNED_BYTES, axes)):
        raise DataError(f"{name} is not an IDX file of bytes with {axes} axes")
    shape = struct.unpack(f">{axes}I", content[4:header])
    if 0 in shape:  # numpy cannot reshape to (0, 2^32 - 1, 2^32 - 1)
        raise DataError(f"{name} has the shape {shape}, which is empty")
    if len(content) - header != math.prod(shape):
        raise DataError(f"{name} has the shape {shape} but {len(content) - header:,} bytes")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
