"""Batches of a split, in a seeded order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kfc.checks import require_whole
from kfc.experiments.data.inputs import Inputs
from kfc.experiments.data.sets import Split

Batch = tuple[Tensor, Tensor]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class _BatchMaker(Dataset[Batch]):
    """Makes a whole batch at once from the indices of its examples."""

    split: Split
    inputs: Inputs

    def __getitem__(self, indices: Indices) -> Batch:
        images, labels = self.split.images[indices], self.split.labels[indices]
        return self.inputs(images), torch.from_numpy(np.asarray(labels))


class Batches:
    """Batches of a split in an order that follows from seed and epoch alone.

    The number of workers makes no difference to it, and that of ranks none to the whole batches.

    Args:
        batch_size: of all ranks together.
        examples: of the split, the first so many are used.
        rank: of ``ranks`` that each take their part of every batch.
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
            raise ValueError(f"examples is {self.examples}, but the split has {len(split)}")
        if batch_size > self.examples:
            raise ValueError(f"batch_size {batch_size} is more than the {self.examples} examples")
        if batch_size < ranks:
            raise ValueError(f"batch_size {batch_size} is less than an example for each of {ranks}")
        self.batch_size = batch_size
        self.seed = seed
        self.workers = workers
        self._part = part_of(batch_size, rank, ranks)
        self._ranks = ranks
        self._maker = _BatchMaker(split, inputs)

    def __len__(self) -> int:
        """Batches in an epoch; an incomplete last one is dropped."""
        return self.examples // self.batch_size

    @property
    def weight(self) -> float:
        """What to multiply this rank's mean by, so that the mean over ranks is over the batch."""
        return self._ranks * len(self._part) / self.batch_size

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Batches ``start``, ``start + 1``, ... of that epoch: float32 images, int64 labels."""
        require_whole("number", number, low=0)
        require_whole("start", start, low=0)
        if start > len(self):
            raise ValueError(f"start is {start}, but an epoch has {len(self)} batches")
        orders = self._order(number)[start:]
        if self.workers == 0:
            return (self._maker[indices] for indices in orders)
        return self._from_workers(orders, number)

    def _order(self, epoch: int) -> list[Indices]:
        order = torch.randperm(self.examples, generator=_generator(self.seed, epoch)).numpy()
        batches = order[: len(self) * self.batch_size].reshape(-1, self.batch_size)
        return list(batches[:, self._part.start : self._part.stop])

    def _from_workers(self, orders: list[Indices], epoch: int) -> Iterator[Batch]:
        loader: DataLoader[Batch] = DataLoader(
            self._maker,
            batch_size=None,
            sampler=orders,
            num_workers=self.workers,
            # Without one of its own the loader draws from the global generator.
            generator=_generator(self.seed, epoch),
        )
        # The workers end with this generator, whether it is exhausted or dropped half-way.
        yield from loader


def part_of(count: int, rank: int, ranks: int) -> range:
    """Which of so many are this rank's: parts that differ by one at most."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def _generator(seed: int, epoch: int) -> torch.Generator:
    """Seeded by a hash, so that neighbouring seeds and epochs have nothing in common."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
