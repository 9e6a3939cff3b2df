"""The processes that torchrun starts to train one network together.

Without torchrun there is a single process, and torch.distributed is not initialised.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from kfc.distributed.ranks import CollectiveError, Ranks
from kfc.lab.config import ConfigError
from kfc.lab.data import DataError
from kfc.lab.networks import NetworkError
from kfc.lab.processes.rendezvous import open_store
from kfc.lab.runs import RunError

# Errors that a user, a disk or another program can cause.
EXPECTED_ERRORS: tuple[type[Exception], ...] = (
    *(ConfigError, NetworkError, DataError, RunError, OSError),
)


@dataclass(frozen=True)
class Launch:
    """The description of this process in the environment variables that torchrun sets.

    Attributes:
        rank: the number of this process among ``size``.
        local_rank: its number among the ``local_size`` processes of this machine.
        job: an identifier that stays the same over restarts; ``None`` without torchrun.
        restarted: whether torchrun has restarted its processes on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str | None
    restarted: bool

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Launch:
        """Read the variables; without them, describe a single process."""
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
        """Return the beginning of a command line that starts as many processes."""
        if self.job is None:
            return "kfc"
        machines = self.size // self.local_size
        nodes = f"--nnodes={machines} " if machines > 1 else ""
        return f"torchrun {nodes}--nproc-per-node={self.local_size} -m kfc"


def _job(variables: Mapping[str, str]) -> str | None:
    """Return torchrun's name of the job; if it has none, one made of torchrun's process id."""
    name = variables.get("TORCHELASTIC_RUN_ID")
    return f"{socket.gethostname()}-{os.getppid()}" if name == "none" else name


@contextmanager
def joined(launch: Launch, timeout: float) -> Iterator[Ranks]:
    """Join the launched processes in a process group, and destroy it at the end.

    torchrun is told of an error, as by the ``record`` decorator of torchelastic.

    Args:
        timeout: the seconds after which a collective, or joining, fails.

    Raises:
        CollectiveError: not all processes could join.
    """
    if launch.size == 1:
        yield Ranks(None)
        return
    errors = get_error_handler()
    errors.initialize()
    try:
        ranks = _join(launch, timeout)
        yield ranks
        ranks.any(False)  # wait for all ranks; not after an error, when some might never come
        dist.destroy_process_group()
    except Exception as error:
        errors.record_exception(error)
        raise


def _join(launch: Launch, timeout: float) -> Ranks:
    # Only rank 0 knows the device of a resumed run, so the group supports both.
    both = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if both else "gloo",
            store=open_store(launch.rank, launch.size, timeout),
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise CollectiveError(
            f"rank {launch.rank} of {launch.size} could not join the other ranks: {error}"
        ) from error
    return Ranks(dist.group.WORLD)


@contextmanager
def explained_collectives(ranks: Ranks) -> Iterator[None]:
    """Name the step in errors of collectives that DistributedDataParallel starts."""
    try:
        yield
    except RuntimeError as error:
        named = ranks.size == 1 or isinstance(error, CollectiveError)
        if named or not _is_of_backend(error):
            raise
        with ranks.naming_errors("a collective of DistributedDataParallel"):
            raise


def _is_of_backend(error: RuntimeError) -> bool:
    """Return whether gloo or NCCL raised the error; gloo has no class of its own for errors."""
    words = "gloo|nccl|(closed|reset) by peer|timed out waiting|caused pair closure"
    return isinstance(error, dist.DistError) or bool(re.search(words, str(error), re.IGNORECASE))


class RanksFailedError(Exception):
    """An expected error of one rank, raised on all ranks.

    Attributes:
        rank: the first rank that failed.
        kind: the class of its error.
        error: the error itself on that rank; ``None`` on the others.
    """

    def __init__(
        self, ranks: Ranks, rank: int, kind: type[Exception], error: Exception | None
    ) -> None:
        super().__init__(f"rank {rank} of {ranks.size}: {error or 'see its own message'}")
        self.rank = rank
        self.kind = kind
        self.error = error
        self._ranks = ranks

    def part(self) -> None:
        """Wait for all ranks, because torchrun ends the others when the first has ended."""
        self._ranks.any(False)


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Raise an expected error of any rank on all ranks.

    The body must not contain collectives, which would wait for the rank that failed.

    Raises:
        RanksFailedError: in place of the error, if there are several ranks.
    """
    if ranks.size == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except EXPECTED_ERRORS as raised:
        error = raised
    kinds = _gather(ranks, None if error is None else type(error), "errors")
    for rank, kind in enumerate(kinds):
        if kind is not None:
            own = error if rank == ranks.rank else None
            raise RanksFailedError(ranks, rank, kind, own) from error


def gather_texts(ranks: Ranks, text: str) -> list[str]:
    """Return the texts of all ranks."""
    return _gather(ranks, text, "texts")


def _gather(ranks: Ranks, value: Any, about: str) -> list[Any]:
    """Return the objects of all ranks."""
    gathered = [value] * ranks.size
    if ranks.size > 1:
        with ranks.naming_errors(f"all_gather of {about}"):
            dist.all_gather_object(gathered, value, group=ranks.group)
    return gathered


def device_of_rank(name: str, ranks: Ranks) -> torch.device:
    """Return the device called ``name``; with several ranks on GPUs, one GPU for each."""
    device = torch.device(name)
    if ranks.size == 1 or device.type == "cpu":
        return device
    if device.type != "cuda" or device.index is not None:
        raise ConfigError(
            f"device: several processes must train on cpu or on cuda, with one GPU each, got {name}"
        )
    local_rank = Launch.from_environment().local_rank
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"device: there is no GPU for process {local_rank} of this machine, which has "
            f"{torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
