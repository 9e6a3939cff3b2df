"""Run a function in several real processes: the ranks of a gloo process group.

def double(rank, number):            # at the top level of a test module, so that ranks find it
    return Ranks(dist.group.WORLD).sum([number])

assert run_ranks(double, 2, 1.5) == [[3.0], [3.0]]
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

from kfc.distributed.ranks import leave_group

FORKS = get_context("forkserver")
# How long the other ranks may take to end after one has failed.
GRACE_SECONDS = 2.0

# The process that holds the group's store: rank 0, or one outside the group, as under torchrun.
StoreHolder = Literal["rank 0", "launcher"]


class RankError(AssertionError):
    """A rank that failed or did not end in time; the message contains what it printed."""


@dataclass(frozen=True)
class Outcome:
    """The end of a rank.

    Attributes:
        result: the function's return value.
        error: the traceback if the function raised an error.
        code: the exit code: 0 if the function returned, 1 if it raised an error, -9 if the process
            was killed; ``None`` if it did not end in time.
        stderr: what the process printed there.
        seconds: the time until the process ended.
    """

    rank: int
    result: Any
    error: str
    code: int | None
    stderr: str
    seconds: float

    def __str__(self) -> str:
        end = f"rank {self.rank} did not end" if self.code is None else ""
        end = end or f"rank {self.rank} ended with code {self.code}"
        return f"{end} within {self.seconds:.1f} s\n{self.error or self.stderr}"


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 60, **options: Any
) -> list[Any]:
    """Return what ``function(rank, *args)`` returns on each rank.

    Args:
        function: a function at the top level of a module.
        timeout: the seconds until all ranks must have ended.
        options: options of :class:`Ranks`.

    Raises:
        RankError: a rank failed; the traceback of the first comes first.
    """
    with start_ranks(function, size, *args, **options) as ranks:
        outcomes = ranks.outcomes(timeout, after_failure=GRACE_SECONDS)
    failed = [outcome for outcome in outcomes if outcome.code != 0]
    if failed:
        failed.sort(key=lambda outcome: (outcome.code is None, outcome.seconds))
        raise RankError("\n".join(map(str, failed)))
    return [outcome.result for outcome in outcomes]


def start_ranks(function: Callable[..., Any], size: int, *args: Any, **options: Any) -> Ranks:
    """Start the ranks; use the result in a ``with`` statement, which kills them at its end."""
    return Ranks(function, size, args, **options)


class Ranks:
    """Running ranks.

    Args:
        function: the function to call as ``function(rank, *args)`` in a gloo process group.
        group_timeout: the timeout of collectives in seconds.
        dtype: torch's default dtype in the ranks.
        store: the process that holds the group's store.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        args: tuple[Any, ...],
        *,
        group_timeout: float = 20,
        dtype: torch.dtype | None = None,
        store: StoreHolder = "launcher",
    ) -> None:
        _start_server()
        self._folder = tempfile.TemporaryDirectory(prefix="kfc-ranks-")
        self._store, port = _open_store(store)
        self._start = time.monotonic()
        setup = _Setup(size, port, self._store is None, group_timeout, dtype, self._folder.name)
        self.processes = [
            FORKS.Process(target=_run, args=(setup, rank, function, args)) for rank in range(size)
        ]
        # Otherwise multiprocessing waits at exit for stopped processes, which never end.
        atexit.register(self.kill)
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._folder.cleanup()

    def outcomes(
        self,
        timeout: float,
        *,
        of: Sequence[int] | None = None,
        after_failure: float | None = None,
    ) -> list[Outcome]:
        """Wait for the ranks, kill those that do not end in time, and return all outcomes.

        Args:
            timeout: in seconds since the start.
            of: the ranks to wait for; by default all.
            after_failure: the seconds to wait for the others once one has failed.
        """
        deadline = self._start + timeout
        awaited = range(len(self.processes)) if of is None else of
        running = {self.processes[rank].sentinel: rank for rank in awaited}
        seconds: dict[int, float] = {}
        while running and (left := deadline - time.monotonic()) > 0:
            for sentinel in connection.wait(list(running), left):
                rank = running.pop(sentinel)
                self.processes[rank].join()
                seconds[rank] = time.monotonic() - self._start
                if self.processes[rank].exitcode != 0 and after_failure is not None:
                    deadline = min(deadline, time.monotonic() + after_failure)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        elapsed = time.monotonic() - self._start
        return [
            self._outcome(rank, code, seconds.get(rank, elapsed)) for rank, code in enumerate(codes)
        ]

    def _outcome(self, rank: int, code: int | None, seconds: float) -> Outcome:
        folder = Path(self._folder.name)
        written = folder / f"result-{rank}"
        result, error = pickle.loads(written.read_bytes()) if written.exists() else (None, "")
        printed = folder / f"stderr-{rank}"
        stderr = printed.read_text(errors="replace") if printed.exists() else ""
        return Outcome(rank, result, error, code, stderr, seconds)

    def kill(self) -> None:
        """Kill all ranks that have not ended, even if they are stopped."""
        for process in self.processes:
            if process.pid is not None:
                process.kill()
        for process in self.processes:
            if process.pid is not None:
                process.join()
        atexit.unregister(self.kill)


@dataclass(frozen=True)
class _Setup:
    size: int
    port: int
    rank_0_holds_store: bool
    group_timeout: float
    dtype: torch.dtype | None
    folder: str


def _open_store(holder: StoreHolder) -> tuple[dist.TCPStore | None, int]:
    """Return the store, if this process holds it, and its port."""
    if holder == "launcher":
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return store, store.port
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return None, free.getsockname()[1]


@cache
def _start_server() -> None:
    """Start the server that forks processes, and wait until it is ready.

    All tests of a session share it. It imports what tests of commands need only if there are any.
    """
    more = ["preloaded"] if "commands" in sys.modules else []
    FORKS.set_forkserver_preload([*more, "preloaded_ranks"])
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": path}
    with patch.dict(os.environ, variables):
        first = FORKS.Process(target=os.getpid)
        first.start()
    first.join()


def _run(setup: _Setup, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the function in the forked process, and end as a script does."""
    folder = Path(setup.folder)
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    result, error = None, ""
    try:
        _join_group(setup, rank)
        result = function(rank, *args)
        if dist.is_initialized():
            leave_group(together=False)  # other ranks may have failed
    except Exception as raised:
        error = traceback.format_exc()
        _report_uncaught(raised)
    unfinished = folder / f"unfinished-{rank}"
    unfinished.write_bytes(pickle.dumps((result, error)))
    unfinished.rename(folder / f"result-{rank}")
    # A process of multiprocessing does not run them.
    atexit._run_exitfuncs()
    sys.exit(1 if error else 0)


def _join_group(setup: _Setup, rank: int) -> None:
    torch.set_num_threads(1)
    if setup.dtype is not None:
        torch.set_default_dtype(setup.dtype)
    holds = setup.rank_0_holds_store and rank == 0
    store = dist.TCPStore("localhost", setup.port, is_master=holds, wait_for_workers=False)
    # Before the group's timeout, which may be short, applies: processes may be slow to start.
    store.set(f"rank-{rank}", "here")
    store.wait([f"rank-{other}" for other in range(setup.size)])
    timeout = timedelta(seconds=setup.group_timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setup.size, timeout=timeout)


def _report_uncaught(error: Exception) -> None:
    """Print the error and set ``sys.last_value`` as the interpreter does."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, error.__traceback__)
