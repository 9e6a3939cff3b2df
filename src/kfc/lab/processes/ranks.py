"""The processes that torchrun starts to train one network together.

Without torchrun there is a single process, and torch.distributed is not initialised.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from kfc.distributed.ranks import CollectiveError, Ranks
from kfc.lab.config import ConfigError
from kfc.lab.data import DataError
from kfc.lab.disk import RunError
from kfc.lab.networks import NetworkError

POLL_SECONDS = 0.02
# Errors that a user, a disk or another program can cause.
EXPECTED_ERRORS = (ConfigError, NetworkError, DataError, RunError, OSError)


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
        job = variables.get("TORCHELASTIC_RUN_ID")
        if job == "none":  # torchrun got no name; its process id stays the same over restarts
            job = f"{socket.gethostname()}-{os.getppid()}"
        return cls(
            rank,
            size,
            int(variables.get("LOCAL_RANK", rank)),
            int(variables.get("LOCAL_WORLD_SIZE", size)),
            job,
            restarted=variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
        )

    def command(self) -> str:
        """Return the beginning of a command line that starts as many processes."""
        if self.job is None:
            return "kfc"
        machines = self.size // self.local_size
        nodes = f"--nnodes={machines} " if machines > 1 else ""
        return f"torchrun {nodes}--nproc-per-node={self.local_size} -m kfc"


@contextmanager
def joined(launch: Launch, timeout: float) -> Iterator[Ranks]:
    """Join the launched processes in a process group, and destroy it at the end.

    A collective, or joining, fails with ``CollectiveError`` after ``timeout`` seconds. Errors are
    reported to torchrun, as by the ``record`` decorator of torchelastic.
    """
    if launch.size == 1:
        yield Ranks(None)
        return
    errors = get_error_handler()
    errors.initialize()
    try:
        ranks = _join(launch, timeout)
        yield ranks
        ranks.leave()  # waits for all ranks; not after an error, when some might never come
    except Exception as error:
        errors.record_exception(error)
        raise


def _join(launch: Launch, timeout: float) -> Ranks:
    # Only rank 0 knows the device of a resumed run, so the group supports both.
    both = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if both else "gloo",
            store=_open_store(launch, timeout),
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise CollectiveError(
            f"rank {launch.rank} of {launch.size} could not join the other ranks: {error}"
        ) from error
    return Ranks(dist.group.WORLD)


def _open_store(launch: Launch, timeout: float) -> Store:
    """Return a store that only the processes of this attempt use.

    torchrun keeps its store over restarts, with the keys of the processes that have ended, so that
    torch's ``env://`` rendezvous then connects to addresses that no longer exist (PyTorch issue
    135712). ``TORCHELASTIC_RESTART_COUNT`` does not distinguish the attempts, because every machine
    counts its own restarts. Here rank 0 therefore chooses a new prefix and tells the other ranks.

    Raises:
        TimeoutError: not all ranks start in time; on rank 0, the message names those missing.
        ValueError, RuntimeError: the store of the launcher cannot be reached.
    """
    seconds = timedelta(seconds=timeout)
    store, _, _ = next(iter(rendezvous("env://", launch.rank, launch.size, timeout=seconds)))
    store.set_timeout(seconds)
    if launch.rank == 0:
        attempt = _begin_attempt(store, launch.size, timeout)
    else:
        attempt = _join_attempt(store, launch.rank, timeout)
    return PrefixStore(f"kfc/attempt/{attempt}", store)


def _begin_attempt(store: Store, size: int, timeout: float) -> str:
    """Choose a name for the attempt, and wait until every rank has joined it.

    A rank is told the name again if its process is a new one.
    """
    attempt, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    missing = list(range(1, size))
    while missing:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise TimeoutError(f"no response from rank {names} within {timeout:g} s")
        for rank in missing:
            if store.check([f"kfc/process/{rank}"]):
                process = store.get(f"kfc/process/{rank}").decode()
                store.set(f"kfc/attempt-of/{process}", attempt)
        missing = [rank for rank in missing if not store.check([f"kfc/joined/{attempt}/{rank}"])]
        time.sleep(POLL_SECONDS)
    store.set(f"kfc/complete/{attempt}", "")
    return attempt


def _join_attempt(store: Store, rank: int, timeout: float) -> str:
    """Return the name of the attempt from rank 0, once all ranks have joined it."""
    process = uuid.uuid4().hex
    store.set(f"kfc/process/{rank}", process)
    try:
        attempt = store.get(f"kfc/attempt-of/{process}").decode()
        store.set(f"kfc/joined/{attempt}/{rank}", "")
        store.wait([f"kfc/complete/{attempt}"])
    except RuntimeError as error:
        raise TimeoutError(f"not all ranks started within {timeout:g} s; see rank 0") from error
    return attempt


@contextmanager
def explained_collectives(ranks: Ranks) -> Iterator[None]:
    """Name the step in errors of collectives that DistributedDataParallel starts."""
    try:
        yield
    except RuntimeError as error:
        if ranks.size == 1 or isinstance(error, CollectiveError):
            raise
        # gloo has no class of its own for errors.
        words = "gloo|nccl|(closed|reset) by peer|timed out waiting|caused pair closure"
        if not (isinstance(error, dist.DistError) or re.search(words, str(error), re.IGNORECASE)):
            raise
        with ranks.naming_errors("a collective of DistributedDataParallel"):
            raise


@dataclass(eq=False)
class RanksFailedError(Exception):
    """An expected error of one rank, raised on all ranks.

    Attributes:
        rank: the first rank that failed.
        kind: the class of its error.
        error: the error itself on that rank; ``None`` on the others.
    """

    ranks: Ranks
    rank: int
    kind: type[Exception]
    error: Exception | None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks.size}: {self.error or 'see its own message'}"

    def part(self) -> None:
        """Wait for all ranks, because torchrun ends the others when the first has ended."""
        self.ranks.any(False)


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
    kinds = gather_objects(ranks, None if error is None else type(error), "errors")
    for rank, kind in enumerate(kinds):
        if kind is not None:
            own = error if rank == ranks.rank else None
            raise RanksFailedError(ranks, rank, kind, own) from error


def gather_objects(ranks: Ranks, value: Any, about: str) -> list[Any]:
    """Return the objects of all ranks; errors name what they are ``about``."""
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
