"""Decode the three forms of CIFAR-10: binary records, Python pickles, and PNG sheets (npm)."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kfc.lab.data.datasets import DataError, Split, Splits
from kfc.lab.data.files import Read
from kfc.lab.data.pickles import read_pickle

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
MAX_ROWS = 10_000

PICKLE_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
BINARY_FILES = tuple(f"{name}.bin" for name in PICKLE_FILES)
SHEET_FILES = tuple(f"{name}.png" for name in PICKLE_FILES)
LABEL_FILES = ("train_lables.json", "test_lables.json")  # the package has these spellings


def decode_binary(read: Read) -> Splits:
    """Decode records of one label byte and 3072 pixel bytes, channel by channel."""
    return _join([_records(name, read(name)) for name in BINARY_FILES])


def decode_pickles(read: Read) -> Splits:
    """Decode dictionaries with ``data``, uint8 (N, 3072), and ``labels``, a list."""
    return _join([_pickled_batch(name, read(name)) for name in PICKLE_FILES])


def decode_sheets(read: Read) -> Splits:
    """Decode PNG sheets with the 1024 pixels of an image in each row, and JSON lists of labels."""
    *train, test = [_sheet(name, read(name)) for name in SHEET_FILES]
    train_labels, test_labels = (_label_list(name, read(name)) for name in LABEL_FILES)
    return Splits(Split(np.concatenate(train), train_labels), Split(test, test_labels))


def _join(batches: Sequence[Split]) -> Splits:
    *train, test = batches
    images = np.concatenate([batch.images for batch in train])
    labels = np.concatenate([batch.labels for batch in train])
    return Splits(Split(images, labels), test)


def _records(name: str, content: bytes) -> Split:
    if not content or len(content) % (1 + PIXELS):
        raise DataError(f"{name} has {len(content):,} bytes, not a multiple of {1 + PIXELS}")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return Split(records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64))


def _pickled_batch(name: str, content: bytes) -> Split:
    batch = read_pickle(name, content)
    if not isinstance(batch, dict):
        raise DataError(f"{name} does not hold a dictionary")
    data, labels = batch.get(b"data"), batch.get(b"labels")
    if not (isinstance(data, np.ndarray) and data.ndim == 2 and data.shape[1] == PIXELS):
        raise DataError(f"{name} has no 'data' with {PIXELS} bytes in each row")
    return Split(data.reshape(-1, *SHAPE), _as_labels(name, labels))


def _sheet(name: str, content: bytes) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            size, mode = image.size, image.mode
            fits = mode == "RGB" and size[0] == 1024 and size[1] <= MAX_ROWS
            pixels = np.asarray(image) if fits else None
    except Exception as error:  # pillow raises many types of exceptions on damaged images
        raise DataError(f"{name} is not a complete PNG image ({error})") from error
    if pixels is None:
        raise DataError(
            f"{name} is {mode} of size {size}, not RGB, 1024 wide and at most {MAX_ROWS} high"
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
