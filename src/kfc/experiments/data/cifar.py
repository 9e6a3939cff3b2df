"""The three forms of CIFAR-10: binary records, Python pickles, and sheets of pixels (npm)."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kfc.experiments.data.containers import Read
from kfc.experiments.data.pickles import read_pickle
from kfc.experiments.data.sets import DataError, Decoded, Split

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
MOST_ROWS = 10_000

BINARY_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
PICKLE_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
SHEET_FILES = (*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png")
LABEL_FILES = ("train_lables.json", "test_lables.json")  # spelt so in the package


def decode_binary(read: Read) -> Decoded:
    """Records of one label byte and 3072 pixel bytes, channel by channel."""
    return _join([_records(name, read(name)) for name in BINARY_FILES])


def decode_pickles(read: Read) -> Decoded:
    """Dictionaries with ``data``, uint8 (N, 3072), and ``labels``, a list."""
    return _join([_pickled_batch(name, read(name)) for name in PICKLE_FILES])


def decode_sheets(read: Read) -> Decoded:
    """PNG sheets with an image's 1024 pixels in each row; the labels in JSON lists."""
    *train, test = [_sheet(name, read(name)) for name in SHEET_FILES]
    train_labels, test_labels = (_label_list(name, read(name)) for name in LABEL_FILES)
    return Decoded(Split(np.concatenate(train), train_labels), Split(test, test_labels))


def _join(batches: list[Split]) -> Decoded:
    *train, test = batches
    images = np.concatenate([batch.images for batch in train])
    labels = np.concatenate([batch.labels for batch in train])
    return Decoded(Split(images, labels), test)


def _records(name: str, content: bytes) -> Split:
    if not content or len(content) % (1 + PIXELS):
        raise DataError(f"{name} has {len(content):,} bytes, not whole records of {1 + PIXELS}")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return Split(records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64))


def _pickled_batch(name: str, content: bytes) -> Split:
    batch = read_pickle(name, content)
    if not isinstance(batch, dict):
        raise DataError(f"{name} does not hold a dictionary")
    data, labels = batch.get(b"data"), batch.get(b"labels")
    if not (isinstance(data, np.ndarray) and data.ndim == 2 and data.shape[1] == PIXELS):
        raise DataError(f"{name} has no 'data' of {PIXELS} bytes in each row")
    return Split(data.reshape(-1, *SHAPE), _as_labels(name, labels))


def _sheet(name: str, content: bytes) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            size, mode = image.size, image.mode
            fits = mode == "RGB" and size[0] == 1024 and size[1] <= MOST_ROWS
            pixels = np.asarray(image) if fits else None
    except Exception as error:  # a damaged PNG makes pillow raise errors of many kinds
        raise DataError(f"{name} is not a whole PNG image ({error})") from error
    if pixels is None:
        raise DataError(f"{name} is {mode} of {size}, not RGB, 1024 wide, up to {MOST_ROWS} high")
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def _label_list(name: str, content: bytes) -> NDArray[np.int64]:
    try:
        return _as_labels(name, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not a list in JSON ({error})") from error


def _as_labels(name: str, labels: Any) -> NDArray[np.int64]:
    if not isinstance(labels, list) or not all(type(x) is int and 0 <= x < 10 for x in labels):
        raise DataError(f"{name} has no list of labels from 0 to 9")
    return np.array(labels, dtype=np.int64)
