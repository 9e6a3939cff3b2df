"""Draw batches from a split in a seeded order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kfc._helpers import require_whole
from kfc.lab.data.datasets import Split
from kfc.lab.data.inputs import Inputs

Batch = tuple[Tensor, Tensor]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class _BatchMaker(Dataset[Batch]):
    """Returns a whole batch for the indices of its examples."""

    split: Split
    inputs: Inputs

    def __getitem__(self, indices: Indices) -> Batch:
        images, labels = self.split.images[indices], self.split.labels[indices]
        return self.inputs(images), torch.from_numpy(np.asarray(labels))


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
        self._ranks = ranks
        self._maker = _BatchMaker(split, inputs)

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
            # By default, the loader would draw from the global generator.
            generator=_generator(self.seed, epoch),
        )
        # The workers end with this generator, whether it is exhausted or discarded early.
        yield from loader


def part_of(count: int, rank: int, ranks: int) -> range:
    """Return this rank's part of ``range(count)``; the sizes of parts differ by at most one."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def _generator(seed: int, epoch: int) -> torch.Generator:
    """Return a generator seeded by a hash, so that similar seeds and epochs are unrelated."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
