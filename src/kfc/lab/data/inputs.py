"""Convert pixels to the inputs of a network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kfc.lab.data.datasets import ROWS_PER_CHUNK, DataError, Split


@dataclass(frozen=True, eq=False)
class Inputs:
    """(pixel - mean image) / divisor; the mean image is float32 (channels, height, width)."""

    mean: NDArray[np.float32]
    divisor: float = 1.0

    @classmethod
    def centred(cls, split: Split) -> Inputs:
        """Subtract the mean training image and keep the stored scale."""
        sums, _ = _power_sums(split.images)
        return cls(_mean_image(sums, len(split)))

    @classmethod
    def normalised(cls, split: Split) -> Inputs:
        """Subtract the mean training image and divide by the standard deviation of all pixels."""
        sums, squares = _power_sums(split.images)
        count, pixels = len(split), sums.size
        # Exact in Python integers, so the result is the same on every machine.
        spread = count * squares - sum(total * total for total in sums.ravel().tolist())
        if spread == 0:
            raise DataError("The training images are all equal, so they cannot be normalised.")
        return cls(_mean_image(sums, count), math.sqrt(spread / (count * count * pixels)))

    @classmethod
    def unit(cls, split: Split) -> Inputs:
        """Divide by the largest pixel of the training images, so that pixels are 0 to 1."""
        largest = max(int(rows.max()) for rows in _chunks(split.images))
        if largest == 0:
            raise DataError("The training images are all black, so they cannot be scaled.")
        return cls(np.zeros(split.images.shape[1:], dtype=np.float32), float(largest))

    def __call__(self, images: NDArray[np.uint8]) -> Tensor:
        """Convert images, uint8 (n, channels, height, width), to float32 inputs."""
        inputs: NDArray[Any] = np.subtract(images, self.mean, dtype=np.float32)
        if self.divisor != 1:
            inputs /= np.float32(self.divisor)
        return torch.from_numpy(inputs)


def _chunks(images: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, len(images), ROWS_PER_CHUNK):
        yield images[start : start + ROWS_PER_CHUNK]


def _power_sums(images: NDArray[np.uint8]) -> tuple[NDArray[np.int64], int]:
    """Return the exact sum of each pixel over all images, and the exact sum of all squares."""
    sums = np.zeros(images.shape[1:], dtype=np.int64)
    squares = 0
    for rows in _chunks(images):
        sums += rows.sum(axis=0, dtype=np.int64)
        squares += int(np.square(rows, dtype=np.uint16).sum(dtype=np.int64))
    return sums, squares


def _mean_image(sums: NDArray[np.int64], count: int) -> NDArray[np.float32]:
    return (sums / count).astype(np.float32)
