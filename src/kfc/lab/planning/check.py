"""Real training steps on one or more processes, to compare predictions with."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import kfc
from kfc.distributed.options import PlacementKind
from kfc.distributed.ranks import leave_group
from kfc.lab.networks import build
from kfc.lab.planning.machine import seconds_of
from kfc.schedule import longest

# So small that the loss of random labels does not diverge.
LR = 1e-4

# Let glibc keep freed memory. By default it returns large blocks to the system, and a step takes up
# to a third longer because of the page faults of new ones; how many depends on what else is in
# memory.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**36)}


class Subject(NamedTuple):
    """A network, and the batch that every rank trains it on.

    Attributes:
        network: its name, or ``"module:function"``.
        image: channels, height and width of its inputs.
        batch: examples per rank.
    """

    network: str
    image: tuple[int, int, int]
    classes: int
    batch: int

    def model(self) -> nn.Module:
        model = build(self.network, image=self.image, classes=self.classes, init=None, seed=0)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def data(self) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels."""
        images = torch.randn(self.batch, *self.image).to(memory_format=torch.channels_last)
        return images, torch.randint(self.classes, (self.batch,))


def settled() -> kfc.Periods:
    """Return the default periods of KFC at the end of a long run."""
    periods = kfc.Periods()
    return kfc.Periods(longest(periods.statistics), longest(periods.inverse))


def seconds_of_passes(subject: Subject) -> float:
    """Return the time of a step of SGD in this process."""
    model = subject.model()
    return seconds_of(_Step(model, torch.optim.SGD(model.parameters(), lr=LR), subject))


class Measured(NamedTuple):
    """The mean seconds of a step on processes of this machine.

    Attributes:
        passes: of SGD, without messages, measured before and after the steps of KFC: processes
            share the memory of the machine, whose speed may change.
        step: of KFC, after many steps.
    """

    passes: float
    step: float


def measured_step(subject: Subject, ranks: int, placement: PlacementKind, threads: int) -> Measured:
    """Train on processes of this machine.

    Args:
        threads: the threads of each process.
    """
    with tempfile.TemporaryDirectory() as folder:
        with _environment(ALLOCATOR):
            spawn(_train, (ranks, subject, placement, threads, folder), ranks)
        return Measured(*map(float, Path(folder, "seconds").read_text().split()))


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for new processes, except those that are set already."""
    new = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in new})
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def _train(
    rank: int, ranks: int, subject: Subject, placement: PlacementKind, threads: int, folder: str
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    measured = _measured(subject, ranks, placement)
    if rank == 0:
        Path(folder, "seconds").write_text(" ".join(map(str, measured)))
    leave_group()


def _measured(subject: Subject, ranks: int, placement: PlacementKind) -> Measured:
    """Return the times of this rank and the others together."""
    plain, model = subject.model(), subject.model()
    run = DistributedDataParallel(model) if ranks > 1 else model
    parallel = kfc.Parallel(placement=placement)
    optimizer = kfc.KFC(run, lr=LR, schedule=settled(), parallel=parallel)
    step, cycle = _Step(run, optimizer, subject), longest(settled().inverse)
    passes = _Step(plain, torch.optim.SGD(plain.parameters(), lr=LR), subject)
    for _ in range(cycle):
        step()
    before, own, after = (_mean_seconds(each, cycle) for each in (passes, step, passes))
    optimizer.close()
    return Measured((before + after) / 2, own)


def _mean_seconds(step: Callable[[], object], count: int) -> float:
    """Return the mean time of a step that all ranks take together."""
    step()
    dist.barrier()
    start = perf_counter()
    for _ in range(count):
        step()
    dist.barrier()
    return (perf_counter() - start) / count


class _Step:
    """Trains on one batch when called."""

    def __init__(self, run: nn.Module, optimizer: torch.optim.Optimizer, subject: Subject) -> None:
        self._run, self._optimizer = run, optimizer
        self._images, self._labels = subject.data()

    def __call__(self) -> None:
        self._optimizer.zero_grad()
        F.cross_entropy(self._run(self._images), self._labels).backward()
        self._optimizer.step()
