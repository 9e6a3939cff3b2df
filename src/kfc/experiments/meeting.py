"""How the processes of a job find each other, also when it starts them again.

torchrun keeps its store over restarts, with all that was written before. A process could take up
the address of one that is gone, and wait for it (pytorch issue 135712); and the number of restarts
does not tell rounds apart, for each machine counts its own. So ranks first agree on who is there.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

POLL_SECONDS = 0.02


def meet(rank: int, size: int, timeout: float) -> Store:
    """A store of these processes alone, at the address that the launcher gives.

    Raises:
        TimeoutError: not all have come; on rank 0 the message says who.
        RuntimeError, ValueError: there is no way to the store.
    """
    store = _open_store(rank, timeout)
    meeting = _Meeting(store, rank, size)
    latest = time.monotonic() + timeout
    while (begun := meeting.call() if rank == 0 else meeting.answer()) is None:
        if time.monotonic() > latest:
            raise TimeoutError(f"after {timeout:g} s {meeting.absence()}")
        time.sleep(POLL_SECONDS)
    return PrefixStore(f"kfc/round/{begun}", store)


def _open_store(rank: int, timeout: float) -> Store:
    """The launcher's, if it has one; else rank 0's."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        raise ValueError("MASTER_ADDR and MASTER_PORT, where the processes meet, are not set")
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        address,
        int(port),
        is_master=rank == 0 and not of_launcher,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )


class _Meeting:
    """Every process has a name that no other has ever had.

    Rank 0 calls the names that it finds, until all who have them answer. A name of a process that
    is gone is replaced by that of its successor, and then all are called anew.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._name = uuid.uuid4().hex
        self._write(f"name/{rank}", self._name)

    def call(self) -> str | None:
        """On rank 0: the round, if it has begun."""
        names = self._names()
        self._write("called", json.dumps(names))
        if self._silent(names):
            return None
        self._write("begun", _round(names))
        return _round(names)

    def answer(self) -> str | None:
        """On the others: the round, if this process was called and rank 0 has begun."""
        names = json.loads(self._read("called") or "[]")
        if self._name not in names:
            return None
        self._write(f"answer/{self._rank}", _round(names))
        return _round(names) if self._read("begun") == _round(names) else None

    def absence(self) -> str:
        if self._rank > 0:
            return "rank 0 had not called this one, or not all had answered"
        silent = ", ".join(map(str, self._silent(self._names())))
        return f"nothing had been heard of rank {silent}"

    def _names(self) -> list[str]:
        return [self._read(f"name/{rank}") for rank in range(self._size)]

    def _silent(self, names: Sequence[str]) -> list[int]:
        """Who has not answered to these names."""
        others = range(1, self._size)
        return [rank for rank in others if self._read(f"answer/{rank}") != _round(names)]

    def _write(self, key: str, value: str) -> None:
        self._store.set(f"kfc/meeting/{key}", value)

    def _read(self, key: str) -> str:
        key = f"kfc/meeting/{key}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _round(names: Sequence[str]) -> str:
    return sha256(" ".join(names).encode()).hexdigest()[:16]
