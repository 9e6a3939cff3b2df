"""Rendezvous of the processes that torchrun starts, also when it restarts them.

torchrun keeps its store over restarts, with the keys of the processes that have ended, so that
torch's ``env://`` rendezvous then connects to addresses that no longer exist (PyTorch issue
135712). ``TORCHELASTIC_RESTART_COUNT`` does not distinguish the attempts, because every machine
counts its own restarts. Here rank 0 therefore chooses a new prefix and invites the other ranks.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

POLL_SECONDS = 0.02


def open_store(rank: int, size: int, timeout: float) -> Store:
    """Return a store that only the processes of this attempt use.

    Raises:
        TimeoutError: not all ranks start in time; on rank 0, the message names those missing.
        ValueError, RuntimeError: the store of the launcher cannot be reached.
    """
    seconds = timedelta(seconds=timeout)
    store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=seconds)))
    store.set_timeout(seconds)
    attempt = _invite(store, size, timeout) if rank == 0 else _accept(store, rank, timeout)
    return PrefixStore(f"kfc/attempt/{attempt}", store)


def _invite(store: Store, size: int, timeout: float) -> str:
    """Invite every rank, and again if its process is a new one, until all have accepted."""
    attempt, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    missing = list(range(1, size))
    while missing:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise TimeoutError(f"nothing was heard from rank {names} within {timeout:g} s")
        for rank in missing:
            if store.check([f"kfc/process/{rank}"]):
                process = store.get(f"kfc/process/{rank}").decode()
                store.set(f"kfc/invitation/{process}", attempt)
        missing = [rank for rank in missing if not store.check([f"kfc/accepted/{attempt}/{rank}"])]
        time.sleep(POLL_SECONDS)
    store.set(f"kfc/complete/{attempt}", "")
    return attempt


def _accept(store: Store, rank: int, timeout: float) -> str:
    """Wait for rank 0's invitation of this process, and until all ranks have accepted."""
    process = uuid.uuid4().hex
    store.set(f"kfc/process/{rank}", process)
    try:
        attempt = store.get(f"kfc/invitation/{process}").decode()
        store.set(f"kfc/accepted/{attempt}/{rank}", "")
        store.wait([f"kfc/complete/{attempt}"])
    except RuntimeError as error:
        raise TimeoutError(f"not all ranks started within {timeout:g} s; see rank 0") from error
    return attempt
