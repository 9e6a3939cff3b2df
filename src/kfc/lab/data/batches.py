"""Draw batches of network inputs from a split in a seeded order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kfc._helpers import require_whole
from kfc.lab.data.datasets import DataError, Split, chunks

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Inputs:
    """(pixel - mean image) / divisor; the mean image is float32 (channels, height, width)."""

    mean: NDArray[np.float32]
    divisor: float = 1.0

    @classmethod
    def centred(cls, split: Split) -> Inputs:
        """Subtract the mean training image and keep the stored scale."""
        return cls((_pixel_sums(split) / len(split)).astype(np.float32))

    @classmethod
    def normalised(cls, split: Split) -> Inputs:
        """Subtract the mean training image and divide by the standard deviation of all pixels."""
        sums, count = _pixel_sums(split), len(split)
        squares = sum(
            int(np.square(rows, dtype=np.uint16).sum(dtype=np.int64))
            for rows in chunks(split.images)
        )
        # Exact in Python integers, so the result is the same on every machine.
        spread = count * squares - sum(total * total for total in sums.ravel().tolist())
        if spread == 0:
            raise DataError("the training images are all equal, so they cannot be normalised")
        divisor = math.sqrt(spread / (count * count * sums.size))
        return cls((sums / count).astype(np.float32), divisor)

    @classmethod
    def unit(cls, split: Split) -> Inputs:
        """Divide by the largest pixel of the training images, so that pixels are 0 to 1."""
        largest = split.images.max()
        if largest == 0:
            raise DataError("the training images are all black, so they cannot be scaled")
        return cls(np.zeros(split.images.shape[1:], dtype=np.float32), float(largest))

    def __call__(self, images: NDArray[np.uint8]) -> Tensor:
        """Convert images, uint8 (n, channels, height, width), to float32 inputs."""
        inputs: NDArray[Any] = np.subtract(images, self.mean, dtype=np.float32)
        if self.divisor != 1:
            inputs /= np.float32(self.divisor)
        return torch.from_numpy(inputs)


def _pixel_sums(split: Split) -> NDArray[np.int64]:
    """Return the exact sum of each pixel over all images."""
    sums = np.zeros(split.images.shape[1:], dtype=np.int64)
    for rows in chunks(split.images):
        sums += rows.sum(axis=0, dtype=np.int64)
    return sums


class Batches:
    """Batches of a split in an order that depends on the seed and the epoch only.

    It does not depend on the number of workers or ranks.

    Args:
        batch_size: number of examples in a batch, over all ranks.
        seed: any integer.
        workers: number of DataLoader processes; 0 makes batches in this process.
        examples: number of examples to use, from the start of the split; None means all.
        rank: index of this process among the ``ranks`` that share every batch.
    """

    def __init__(
        self,
        split: Split,
        inputs: Inputs,
        batch_size: int,
        seed: int,
        *,
        workers: int = 0,
        examples: int | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.examples = len(split) if examples is None else examples
        require_whole("batch_size", batch_size)
        require_whole("seed", seed, low=None)
        require_whole("workers", workers, low=0)
        require_whole("examples", self.examples)
        if self.examples > len(split):
            raise ValueError(f"examples must be at most {len(split)}, got {self.examples}")
        if batch_size > self.examples:
            raise ValueError(
                f"batch_size must be at most the examples used ({self.examples}), got {batch_size}"
            )
        if batch_size < ranks:
            raise ValueError(
                f"batch_size must be at least the number of ranks ({ranks}), got {batch_size}"
            )
        self.batch_size = batch_size
        self.seed = seed
        self.workers = workers
        self._part = part_of(batch_size, rank, ranks)
        self._rank, self._ranks = rank, ranks
        self._split = split
        self._inputs = inputs

    def __len__(self) -> int:
        """Return the number of batches in an epoch, without an incomplete last one."""
        return self.examples // self.batch_size

    @property
    def weight(self) -> float:
        """The factor of this rank's mean loss that makes the mean over ranks that of the batch."""
        return self._ranks * len(self._part) / self.batch_size

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from batch ``start`` on: float32 images, int64 labels."""
        require_whole("number", number, low=0)
        require_whole("start", start, low=0)
        if start > len(self):
            raise ValueError(
                f"start must be at most {len(self)}, the batches of an epoch; got {start}"
            )
        order, generator = self._order(number)
        batches = order[: len(self) * self.batch_size].reshape(-1, self.batch_size)
        return self._load(list(batches[start:, self._part.start : self._part.stop]), generator)

    def sample(self, count: int) -> Iterator[Batch]:
        """Return batches that contain ``count`` examples once: the first of epoch 0.

        The batches have about the same size, at most ``batch_size``. A rank gets its part of each,
        unless that is empty.
        """
        require_whole("count", count)
        if count > self.examples:
            raise ValueError(f"count must be at most {self.examples}, got {count}")
        order, generator = self._order(0)
        batches = np.array_split(order[:count], math.ceil(count / self.batch_size))
        parts = ((batch, part_of(len(batch), self._rank, self._ranks)) for batch in batches)
        own = [batch[part.start : part.stop] for batch, part in parts if part]
        return self._load(own, generator)

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], torch.Generator]:
        """Return the indices of all examples in the order of an epoch, and its generator."""
        # A hash, so that similar seeds and epochs are unrelated.
        digest = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randperm(self.examples, generator=generator).numpy(), generator

    def _load(
        self, batches: list[NDArray[np.int64]], generator: torch.Generator
    ) -> Iterator[Batch]:
        """Return the batches of the examples with these indices."""
        loader: DataLoader[Batch] = DataLoader(
            cast("Dataset[Batch]", batches),  # the loader indexes it as it would a Dataset
            batch_size=None,
            collate_fn=self._make,
            num_workers=self.workers,
            generator=generator,  # by default, the loader would draw from the global generator
        )
        # The workers end with this iterator, whether it is exhausted or discarded early.
        return iter(loader)

    def _make(self, indices: Any) -> Batch:
        """Return the batch of the examples with these indices."""
        labels = np.asarray(self._split.labels[indices])
        return self._inputs(self._split.images[indices]), torch.from_numpy(labels)


def part_of(count: int, rank: int, ranks: int) -> range:
    """Return this rank's part of ``range(count)``; the sizes of parts differ by at most one."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)
