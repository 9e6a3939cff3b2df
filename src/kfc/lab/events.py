"""Synchronous writing of TensorBoard events.

torch's ``SummaryWriter`` writes from a thread, which would lose an error such as a full disk.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class EventLog:
    """One file of events in a folder that TensorBoard reads.

    Args:
        first: TensorBoard discards events from this update on in the folder's other files.
    """

    def __init__(self, folder: Path, first: int) -> None:
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        # A number, since several files may be written within a second.
        number = len(list(folder.glob("events.out.tfevents.*")))
        self._records = RecordWriter((folder / f"{name}.{number}").open("wb"))
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=now, step=first, session_log=start))

    def add(self, update: int, values: Mapping[str, float]) -> None:
        """Write the values of an update, by tag."""
        entries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(wall_time=time.time(), step=update, summary=Summary(value=entries)))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
