"""Where the ranks of a group leave signs for each other: the store of the group."""

from __future__ import annotations

import json
import socket
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from kfc.distributed.signs import Sign

# For a store that takes long to answer.
PATIENCE_SECONDS = 1.0
CONNECT_SECONDS = 10.0


class Board:
    """Keys of the group's store, one for each rank, through a connection of its own.

    Its own, because torch's may be busy, and because it stays when the group is destroyed. Besides
    there is a line on which nothing is ever said: it shows when the server is gone, before torch
    notices and prints pages about it, as it would at the end of every run in which rank 0, which
    holds the store, is first.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        host, port = _address_of_store(group)
        self.is_gone = False
        self._place = place_on_board(group)
        self._line = socket.create_connection((host, port), CONNECT_SECONDS)
        self._line.setblocking(False)
        timeout = timedelta(seconds=CONNECT_SECONDS)
        store_at = dist.TCPStore  # type: ignore[attr-defined]
        self._store = store_at(host, port, wait_for_workers=False, timeout=timeout)
        self._store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))

    def write(self, rank: int, sign: Sign) -> None:
        self._assert_there()
        self._store.set(self._key(rank), json.dumps(asdict(sign)))

    def read(self, rank: int) -> Sign | None:
        self._assert_there()
        key = self._key(rank)
        return Sign(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def close(self) -> None:
        self.is_gone = True
        self._line.close()
        del self._store

    def _key(self, rank: int) -> str:
        return f"{self._place}/{rank}"

    def _assert_there(self) -> None:
        with suppress(BlockingIOError):
            if not self._line.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("the store is gone")


def _address_of_store(group: dist.ProcessGroup) -> tuple[str, int]:
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "port"):
        raise ValueError(f"ranks cannot meet at a {type(store).__name__}, which has no server")
    return store.host, store.port


_watches_made: Counter[str] = Counter()


def place_on_board(group: dist.ProcessGroup) -> str:
    """Where the signs of this watch are: not where those of another are, or were before a restart.

    Torch's launcher keeps its server when it starts all ranks again, but gives their group another
    part of it. There whoever comes first says what to call the place.
    """
    _watches_made[group.group_name] += 1
    key = f"kfc/watch/{group.group_name}/{_watches_made[group.group_name]}"
    store = dist.distributed_c10d._get_process_group_store(group)
    return f"{key}/{store.compare_set(key, '', uuid.uuid4().hex).decode()}"
