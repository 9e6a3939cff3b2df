"""Decode the files of each data set to arrays.

A decoder takes the content of files by name. The tables of files have their maximum sizes in bytes.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kfc.lab.data.datasets import DataError, Split, Splits
from kfc.lab.data.files import Files
from kfc.lab.data.untrusted import load_arrays, read_pickle

# scikit-learn's 1,797 handwritten digits, which are part of its package

DIGITS_FOR_TRAINING = 1438


def digits() -> Splits:
    """Return images of 8x8 pixels from 0 to 16; other people wrote the test digits."""
    from sklearn.datasets import load_digits  # slow to import, and only this data set needs it

    data = load_digits()
    images, labels = data.images.astype(np.uint8)[:, None], data.target.astype(np.int64)
    parts = slice(DIGITS_FOR_TRAINING), slice(DIGITS_FOR_TRAINING, None)
    return Splits(*(Split(images[part], labels[part]) for part in parts))


# IDX, the format of MNIST and Fashion-MNIST

IDX_FILES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
UNSIGNED_BYTES = 0x08


def decode_idx(files: Files) -> Splits:
    """Decode two files for each split: images (N, height, width) and labels (N,)."""
    images, labels, test_images, test_labels = (
        _idx_array(name, files[name], axes=3 if "idx3" in name else 1) for name in IDX_FILES
    )
    return Splits(
        Split(images[:, None], labels.astype(np.int64)),
        Split(test_images[:, None], test_labels.astype(np.int64)),
    )


def _idx_array(name: str, content: bytes, axes: int) -> NDArray[np.uint8]:
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


# CIFAR-10: binary records, Python pickles, and PNG sheets (npm)

CIFAR_SHAPE = (3, 32, 32)
CIFAR_PIXELS = math.prod(CIFAR_SHAPE)
MAX_BATCH = 10_000
CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
BINARY_FILES = {f"{name}.bin": MAX_BATCH * (1 + CIFAR_PIXELS) for name in CIFAR_BATCHES}
PICKLE_FILES = dict.fromkeys(CIFAR_BATCHES, 32 << 20)
SHEETS = {f"{name}.png": 24 << 20 for name in CIFAR_BATCHES}
LABEL_LISTS = {"train_lables.json": 256 << 10, "test_lables.json": 256 << 10}  # as spelled there
SHEET_FILES = SHEETS | LABEL_LISTS


def decode_binary(files: Files) -> Splits:
    """Decode records of one label byte and 3072 pixel bytes, channel by channel."""
    return _join(_records(name, files[name]) for name in BINARY_FILES)


def decode_pickles(files: Files) -> Splits:
    """Decode dictionaries with ``data``, uint8 (N, 3072), and ``labels``, a list."""
    return _join(_pickled_batch(name, files[name]) for name in PICKLE_FILES)


def decode_sheets(files: Files) -> Splits:
    """Decode PNG sheets with the 1024 pixels of an image in each row, and JSON lists of labels."""
    *train, test = (_sheet(name, files[name]) for name in SHEETS)
    train_labels, test_labels = (_label_list(name, files[name]) for name in LABEL_LISTS)
    return Splits(Split(np.concatenate(train), train_labels), Split(test, test_labels))


def _join(batches: Iterable[Split]) -> Splits:
    *train, test = batches
    images = np.concatenate([batch.images for batch in train])
    labels = np.concatenate([batch.labels for batch in train])
    return Splits(Split(images, labels), test)


def _records(name: str, content: bytes) -> Split:
    size = 1 + CIFAR_PIXELS
    if not content or len(content) % size:
        raise DataError(f"{name} has {len(content):,} bytes, not a multiple of {size}")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return Split(records[:, 1:].reshape(-1, *CIFAR_SHAPE), records[:, 0].astype(np.int64))


def _pickled_batch(name: str, content: bytes) -> Split:
    batch = read_pickle(name, content)
    data = batch.get(b"data")
    if not (isinstance(data, np.ndarray) and data.ndim == 2 and data.shape[1] == CIFAR_PIXELS):
        raise DataError(f"{name} has no 'data' with {CIFAR_PIXELS} bytes in each row")
    return Split(data.reshape(-1, *CIFAR_SHAPE), _as_labels(name, batch.get(b"labels")))


def _sheet(name: str, content: bytes) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            size, mode = image.size, image.mode
            fits = mode == "RGB" and size[0] == 1024 and size[1] <= MAX_BATCH
            pixels = np.asarray(image) if fits else None
    except Exception as error:  # pillow raises many types of exceptions on damaged images
        raise DataError(f"{name} is not a complete PNG image ({error})") from error
    if pixels is None:
        raise DataError(
            f"{name} is {mode} of size {size}, not RGB, 1024 wide and at most {MAX_BATCH} high"
        )
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def _label_list(name: str, content: bytes) -> NDArray[np.int64]:
    try:
        return _as_labels(name, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not a JSON list ({error})") from error


def _as_labels(name: str, labels: Any) -> NDArray[np.int64]:
    if not isinstance(labels, list) or not all(type(x) is int and 0 <= x < 10 for x in labels):
        raise DataError(f"{name} has no list of labels from 0 to 9")
    return np.array(labels, dtype=np.int64)


# SVHN's cropped digits

# Of a file, and of its decompressed content: 226 MB in the official training set, 1.6 GB in the
# additional images.
MAX_SVHN_BYTES, MAX_EXTRA_BYTES = 256 << 20, 2 << 30
SVHN_FILES = dict.fromkeys(("train_32x32.mat", "test_32x32.mat"), MAX_SVHN_BYTES)
SVHN_EXTRA = "extra_32x32.mat"
SVHN_FILES_WITH_EXTRA = {**SVHN_FILES, SVHN_EXTRA: MAX_EXTRA_BYTES}


def decode_svhn(files: Files) -> Splits:
    """Decode MATLAB files with X, uint8 (32, 32, 3, N), and y, (N, 1) with 10 for the digit 0."""
    return Splits(*(_matlab_split(name, files[name], SVHN_FILES[name]) for name in SVHN_FILES))


def decode_svhn_with_extra(files: Files) -> Splits:
    """Decode the same, with the additional images after the training images, as in the paper."""
    plain = decode_svhn(files)
    extra = _matlab_split(SVHN_EXTRA, files[SVHN_EXTRA], MAX_EXTRA_BYTES)
    return _join([plain.train, extra, plain.test])


def _matlab_split(name: str, content: bytes, limit: int) -> Split:
    arrays = load_arrays(name, content, limit)
    if not {"X", "y"} <= arrays.keys():
        raise DataError(f"{name} has no arrays X and y")
    x, y = arrays["X"], arrays["y"]
    if x.dtype != np.uint8 or x.ndim != 4:
        raise DataError(f"{name} has X {x.dtype} {x.shape}, not uint8 (32, 32, 3, N)")
    if y.ndim != 2 or y.shape[1] != 1 or not np.isin(y, range(1, 11)).all():
        raise DataError(f"{name} has y {y.shape}, not numbers from 1 to 10 of shape (N, 1)")
    return Split(np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y[:, 0].astype(np.int64) % 10)
