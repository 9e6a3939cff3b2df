"""The processes that `torchrun` starts to train one network together.

Without it there is one process alone, and torch.distributed stays as it is.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from kfc.distributed.errors import is_of_collective
from kfc.distributed.workers import WorkerError, Workers
from kfc.experiments.config import ConfigError
from kfc.experiments.data import DataError
from kfc.experiments.meeting import meet
from kfc.experiments.networks import NetworkError
from kfc.experiments.runs import RunError

# What a user, a disk or another program can be the cause of. The order is the same on all ranks.
EXPECTED_ERRORS: tuple[type[Exception], ...] = (
    *(ConfigError, NetworkError, DataError, RunError, OSError),
)


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process, in the variables that torchrun sets.

    Attributes:
        local_rank: among the processes of this machine, ``local_size`` of them.
        job: what stays the same when torchrun starts its processes again; ``None`` without it.
        restarted: it has started them again already.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str | None
    restarted: bool

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Launch:
        if "RANK" not in variables or "WORLD_SIZE" not in variables:
            return cls(0, 1, 0, 1, None, restarted=False)
        rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        return cls(
            rank,
            size,
            int(variables.get("LOCAL_RANK", rank)),
            int(variables.get("LOCAL_WORLD_SIZE", size)),
            _job(variables),
            restarted=variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
        )

    def command(self) -> str:
        """What starts as many processes again."""
        if self.job is None:
            return "kfc"
        machines = (
            f"--nnodes={self.size // self.local_size} " if self.local_size < self.size else ""
        )
        return f"torchrun {machines}--nproc-per-node={self.local_size} -m kfc"


def _job(variables: Mapping[str, str]) -> str | None:
    """torchrun's name for a job; where it has none, the process that started this one."""
    name = variables.get("TORCHELASTIC_RUN_ID")
    return f"{socket.gethostname()}-{os.getppid()}" if name == "none" else name


@contextmanager
def joined(launch: Launch, timeout: float) -> Iterator[Workers]:
    """The ranks as a process group, until all of them are done with it.

    Args:
        timeout: for how many seconds a rank may keep the others waiting.

    Raises:
        WorkerError: they do not find each other.
    """
    if launch.size == 1:
        yield Workers(None)
        return
    # A resumed run's device is known to rank 0 alone, so the group is made for both.
    both = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if both else "gloo",
            store=meet(launch.rank, launch.size, timeout),
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise WorkerError(
            f"rank {launch.rank} of {launch.size} found no way to the others: {error}"
        ) from error
    workers = Workers(dist.group.WORLD)
    try:
        yield workers
    except BaseException as error:
        # As the interpreter does with errors that nobody handles: the other ranks are told of it.
        sys.last_value = error
        raise
    # After an error the processes end without this: the others might not answer any more.
    workers.any(False)
    dist.destroy_process_group()


@contextmanager
def explained_collectives(workers: Workers) -> Iterator[None]:
    """Let errors of collectives that torch starts, not ``workers``, say which rank is the cause."""
    try:
        yield
    except RuntimeError as error:
        alone = workers.size == 1
        if alone or isinstance(error, WorkerError) or not is_of_collective(error):
            raise
        with workers.explained():
            raise


class RanksFailedError(Exception):
    """An error that is expected to happen, of which all ranks know.

    Attributes:
        rank: the first that has failed.
        kind: of its error.
        error: there, the error itself; ``None`` on the other ranks.
    """

    def __init__(
        self, workers: Workers, rank: int, kind: type[Exception], error: Exception | None
    ) -> None:
        super().__init__(f"rank {rank} of {workers.size}: {error or 'it says why itself'}")
        self.rank = rank
        self.kind = kind
        self.error = error
        self._workers = workers

    def part(self) -> None:
        """Wait until all ranks are here: when the first has ended, torchrun ends the others."""
        self._workers.any(False)


@contextmanager
def failing_together(workers: Workers) -> Iterator[None]:
    """Let an expected error on any rank be one of all of them.

    What is done inside must not wait for other ranks: those that fail do not come.

    Raises:
        RanksFailedError: instead of the error, if there are several ranks.
    """
    if workers.size == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except EXPECTED_ERRORS as raised:
        error = raised
    kinds = [int(number) for [number] in workers.gather([float(_kind(error))])]
    failed = [rank for rank, kind in enumerate(kinds) if kind >= 0]
    if failed:
        first = failed[0]
        told = error if workers.rank == first else None
        raise RanksFailedError(workers, first, EXPECTED_ERRORS[kinds[first]], told) from error


def _kind(error: Exception | None) -> int:
    """Its place among the expected ones, -1 for none."""
    return next((i for i, kind in enumerate(EXPECTED_ERRORS) if isinstance(error, kind)), -1)


def gather_texts(workers: Workers, text: str) -> list[str]:
    """The text of every rank."""
    letters = [float(byte) for byte in text.encode()]
    lengths = [int(length) for [length] in workers.gather([float(len(letters))])]
    padding = [0.0] * (max(lengths) - len(letters))
    rows = workers.gather([*letters, *padding])
    return [
        bytes(int(number) for number in row[:length]).decode()
        for row, length in zip(rows, lengths, strict=True)
    ]


def device_of_rank(name: str, workers: Workers) -> torch.device:
    """A GPU for each rank of a machine; the CPU is for all."""
    device = torch.device(name)
    if workers.size == 1 or device.type == "cpu":
        return device
    if device.type != "cuda" or device.index is not None:
        raise ConfigError(
            f"device: several processes train on cpu or on cuda, one GPU each; got {name}"
        )
    local_rank = Launch.from_environment().local_rank
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"device: there is no GPU for process {local_rank} of this machine, which has "
            f"{torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
