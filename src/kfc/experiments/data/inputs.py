"""How pixels become inputs of a network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kfc.experiments.data.sets import ROWS_AT_ONCE, DataError, Split


@dataclass(frozen=True, eq=False)
class Inputs:
    """(pixel - mean image) / divisor; the mean image is float32 (channels, height, width)."""

    mean: NDArray[np.float32]
    divisor: float = 1.0

    @classmethod
    def centred(cls, split: Split) -> Inputs:
        """Pixels minus the mean training image, in the scale in which they are stored."""
        sums, _ = _power_sums(split.images)
        return cls(_mean_image(sums, len(split)))

    @classmethod
    def normalised(cls, split: Split) -> Inputs:
        """Centred pixels over their standard deviation, one number for all of them."""
        sums, squares = _power_sums(split.images)
        count, pixels = len(split), sums.size
        # In whole numbers of any length: exact, so the same on every machine.
        spread = count * squares - sum(total * total for total in sums.ravel().tolist())
        if spread == 0:
            raise DataError("All training images are equal; there is nothing to divide by.")
        return cls(_mean_image(sums, count), math.sqrt(spread / (count * count * pixels)))

    @classmethod
    def unit(cls, split: Split) -> Inputs:
        """Pixels from 0 to 1: over the largest one of the training images."""
        largest = max(
            int(split.images[start : start + ROWS_AT_ONCE].max())
            for start in range(0, len(split), ROWS_AT_ONCE)
        )
        if largest == 0:
            raise DataError("All training images are black; there is nothing to divide by.")
        return cls(np.zeros(split.images.shape[1:], dtype=np.float32), float(largest))

    def __call__(self, images: NDArray[np.uint8]) -> Tensor:
        """Images, uint8 (n, channels, height, width), as float32 inputs."""
        inputs: NDArray[Any] = np.subtract(images, self.mean, dtype=np.float32)
        if self.divisor != 1:
            inputs /= np.float32(self.divisor)
        return torch.from_numpy(inputs)


def _power_sums(images: NDArray[np.uint8]) -> tuple[NDArray[np.int64], int]:
    """For each pixel the sum over all images, and the sum of all squares: exact."""
    sums = np.zeros(images.shape[1:], dtype=np.int64)
    squares = 0
    for start in range(0, len(images), ROWS_AT_ONCE):
        rows = images[start : start + ROWS_AT_ONCE]
        sums += rows.sum(axis=0, dtype=np.int64)
        squares += int(np.square(rows, dtype=np.uint16).sum(dtype=np.int64))
    return sums, squares


def _mean_image(sums: NDArray[np.int64], count: int) -> NDArray[np.float32]:
    return (sums / count).astype(np.float32)
