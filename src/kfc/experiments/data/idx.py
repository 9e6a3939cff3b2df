"""IDX, the form of MNIST and Fashion-MNIST."""

from __future__ import annotations

import math
import struct

import numpy as np
from numpy.typing import NDArray

from kfc.experiments.data.containers import Read
from kfc.experiments.data.sets import DataError, Decoded, Split

UNSIGNED_BYTES = 0x08

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def decode(read: Read) -> Decoded:
    """Two files for each split: images (N, height, width) and labels (N,)."""
    arrays = [
        _parse(name, read(name), axes) for name, axes in zip(FILES, (3, 1, 3, 1), strict=True)
    ]
    train_images, train_labels, test_images, test_labels = arrays
    return Decoded(_split(train_images, train_labels), _split(test_images, test_labels))


def _split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
    return Split(images[:, None], labels.astype(np.int64))


def _parse(name: str, content: bytes, axes: int) -> NDArray[np.uint8]:
    """Two zero bytes, the type, the number of axes, their lengths (big-endian), the values."""
    header = 4 + 4 * axes
    if len(content) < header or content[:4] != bytes((0, 0, UNSIGNED_BYTES, axes)):
        raise DataError(f"{name} is not an IDX file of bytes with {axes} axes")
    shape = struct.unpack(f">{axes}I", content[4:header])
    if 0 in shape:  # numpy cannot shape nothing into (0, 2^32 - 1, 2^32 - 1)
        raise DataError(f"{name} announces {shape}, which holds nothing")
    if len(content) - header != math.prod(shape):
        raise DataError(f"{name} announces {shape} but has {len(content) - header:,} bytes")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
